"""Every dataclass survives the way over protobuf, with extreme values and with every option left out."""

import dataclasses
import types
from collections.abc import Mapping
from enum import Enum
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.cache.layout import AttentionGroup, CacheLayout, StateGroup
from headrace.request import Request, Sampling
from headrace.token_array import TokenArray
from headrace.wire import codecs
from headrace.wire import messages as m
from headrace.wire.generated import headrace_pb2 as pb
from headrace.wire.node_messages import NodeInfo, NodeStatus

LAYOUT = CacheLayout("f", "bfloat16", "float32", 16, (AttentionGroup(2, 2, 32),), (StateGroup(6, (8, 3), (4, 8, 8)),))

# Field names whose protobuf type is narrower or wider than the usual uint32.
_WIDE = {"seed", "nonce", "failed_nonce", "incarnation", "attention_bytes", "state_bytes", "max_message_bytes"}


def values_of(hint: Any, name: str = "") -> st.SearchStrategy[Any]:
    """Anything that a field of this type may hold."""
    if get_origin(hint) in (types.UnionType, Union):
        (inner,) = (arg for arg in get_args(hint) if arg is not type(None))
        return st.none() | values_of(inner, name)
    if hint is CacheLayout:
        return st.just(LAYOUT)
    if hint is TokenArray:
        return st.lists(st.integers(0, 2**32 - 1), max_size=5).map(TokenArray.of)
    if dataclasses.is_dataclass(hint):
        return instances_of(hint)  # type: ignore[arg-type]
    if get_origin(hint) is tuple:
        return st.lists(values_of(get_args(hint)[0]), max_size=3).map(tuple)
    if get_origin(hint) is Mapping:
        return st.dictionaries(st.text(max_size=5), values_of(get_args(hint)[1]), max_size=3)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return st.sampled_from(hint)
    if hint is int:
        return st.integers(0, 2**64 - 1 if name in _WIDE else 2**32 - 1)
    return {
        bool: st.booleans(),
        float: st.floats(allow_nan=False),
        str: st.text(max_size=10),
        bytes: st.binary(max_size=10),
    }[hint]


def instances_of(cls: type) -> st.SearchStrategy[Any]:
    hints = get_type_hints(cls)
    return st.builds(cls, **{f.name: values_of(hints[f.name], f.name) for f in dataclasses.fields(cls)})


PREFILL_EVENTS = (m.ComputeStarted, m.FirstToken, m.PromptLogprobs, m.PrefillDone)
DECODE_COMMANDS = (m.Start, m.Renew, m.Stop, m.Abandon, m.Halt, m.HandOver, m.GoOn)
DECODE_EVENTS = (
    m.Reservation, m.LocalPrefill, m.SessionFailed, m.TransferReport, m.Tokens, m.DecodeDone, m.PromptLogprobs,
    m.HaltReply, m.HandedOver,
)  # fmt: skip
PLAIN = (
    NodeInfo, NodeStatus, Request, Sampling, m.PrefillReport, m.DecodeReport, m.FetchRequest, m.FetchReply,
    m.PrefillRequest,
)  # fmt: skip


@given(st.one_of(*map(instances_of, PREFILL_EVENTS)))
def test_prefill_events(event: m.PrefillEvent):
    sent = pb.PrefillEvent.FromString(codecs.encode_one_of(event, pb.PrefillEvent()).SerializeToString())
    assert codecs.decode_one_of(sent) == event


@given(st.one_of(*map(instances_of, DECODE_COMMANDS)))
def test_decode_commands(command: m.DecodeCommand):
    sent = pb.DecodeCommand.FromString(codecs.encode_one_of(command, pb.DecodeCommand()).SerializeToString())
    assert codecs.decode_one_of(sent) == command


@given(st.one_of(*map(instances_of, DECODE_EVENTS)))
def test_decode_events(event: m.DecodeEvent):
    sent = pb.DecodeEvent.FromString(codecs.encode_one_of(event, pb.DecodeEvent()).SerializeToString())
    assert codecs.decode_one_of(sent) == event


@given(st.one_of(*map(instances_of, PLAIN)))
def test_plain_messages(value: Any):
    message = getattr(pb, type(value).__name__)()
    codecs.encode(value, message)
    sent = type(message).FromString(message.SerializeToString())
    assert codecs.decode(sent, type(value)) == value


def test_the_events_of_the_unions_are_all_tested():
    assert set(get_args(m.PrefillEvent)) == set(PREFILL_EVENTS)
    assert set(get_args(m.DecodeCommand)) == set(DECODE_COMMANDS)
    assert set(get_args(m.DecodeEvent)) == set(DECODE_EVENTS)


@pytest.mark.parametrize("message", [name for name in pb.DESCRIPTOR.message_types_by_name if hasattr(m, name)])
def test_no_protobuf_field_is_forgotten(message: str):
    cls = getattr(m, message)
    if dataclasses.is_dataclass(cls):
        in_proto = set(pb.DESCRIPTOR.message_types_by_name[message].fields_by_name)
        assert {field.name for field in dataclasses.fields(cls)} == in_proto


def test_zero_and_absent_differ():
    for logprobs in (None, 0):
        message = pb.Sampling()
        codecs.encode(Sampling(max_tokens=1, seed=0, logprobs=logprobs), message)
        assert codecs.decode(message, Sampling).logprobs == logprobs


def test_a_field_without_a_counterpart_is_an_error():
    @dataclasses.dataclass(frozen=True)
    class Renew:
        failed_nonce: int
        reason: str

    with pytest.raises(TypeError, match=r"Renew\.reason has no field in Renew"):
        codecs.encode(Renew(1, "x"), pb.Renew())


def test_an_unknown_event_names_the_cause():
    with pytest.raises(ValueError, match="PrefillEvent without a known event: the peer runs another version"):
        codecs.decode_one_of(pb.PrefillEvent())


@pytest.mark.parametrize("num_bytes", [1, 3, 4095])
def test_tokens_that_are_no_whole_ids_are_an_error(num_bytes: int):
    sent = codecs.encode(Request("r", TokenArray.of(()), 0, Sampling(1, 0)), pb.Request())
    sent.tokens = bytes(num_bytes)
    with pytest.raises(ValueError, match=f"{num_bytes} bytes are no token ids"):
        codecs.decode(pb.Request.FromString(sent.SerializeToString()), Request)


def test_a_reservation_tells_its_secret_on_the_wire_and_in_no_repr():
    secret = b"only the two nodes may know this"
    reservation = m.Reservation(7, 0, 16, "d0:2", LAYOUT, 5.0, secret)
    work = m.PrefillRequest(Request("r", TokenArray.of((1,)), 1, Sampling(1, 0)), reservation)
    assert codecs.decode(codecs.encode(work, pb.PrefillRequest()), m.PrefillRequest) == work
    for said in (repr(work), str(reservation), repr(m.FetchRequest(b"key", reservation))):
        assert "two nodes" not in said and secret.hex() not in said
