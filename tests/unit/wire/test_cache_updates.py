"""Cache updates survive the conversion to protobuf and back, and stay small."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.cache.types import PREFIX_KEY_BYTES, PrefixKey
from headrace.wire.cache_updates import (
    CacheChange,
    CacheChanges,
    CacheSnapshotPart,
    decode_cache_update,
    encode_cache_update,
)
from headrace.wire.generated import headrace_pb2 as pb

numbers = st.integers(0, 2**64 - 1)
keys = st.binary(min_size=PREFIX_KEY_BYTES, max_size=PREFIX_KEY_BYTES).map(PrefixKey)
many_keys = st.lists(keys, max_size=5).map(tuple)
changes = st.lists(st.tuples(st.sampled_from(CacheChange), keys), max_size=5).map(tuple)


@given(
    st.builds(CacheSnapshotPart, numbers, numbers, many_keys, many_keys, st.booleans())
    | st.builds(CacheChanges, numbers, numbers, changes)
)
def test_round_trip(update: CacheSnapshotPart | CacheChanges):
    sent = pb.CacheUpdate.FromString(encode_cache_update(update).SerializeToString())
    assert decode_cache_update(sent) == update


def test_a_change_takes_its_key_and_one_byte():
    key = PrefixKey(bytes(PREFIX_KEY_BYTES))
    message = encode_cache_update(CacheChanges(1, 1, ((CacheChange.BLOCK_STORED, key),) * 1000))
    assert message.ByteSize() < 1000 * (PREFIX_KEY_BYTES + 1) + 32


def test_what_no_node_says_is_refused():
    with pytest.raises(ValueError, match="without a known update"):
        decode_cache_update(pb.CacheUpdate(incarnation=1))
    with pytest.raises(ValueError, match="33 bytes of keys"):
        decode_cache_update(pb.CacheUpdate(snapshot=pb.CacheSnapshotPart(blocks=bytes(33))))
    stored = pb.CACHE_CHANGE_BLOCK_STORED
    with pytest.raises(ValueError, match="shorter"):
        decode_cache_update(pb.CacheUpdate(changes=pb.CacheChanges(kinds=[stored, stored], keys=bytes(32))))
    with pytest.raises(ValueError, match="9 is not a valid"):
        decode_cache_update(pb.CacheUpdate(changes=pb.CacheChanges(kinds=[9], keys=bytes(32))))
