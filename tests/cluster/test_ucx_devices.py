"""Interfaces of somebody else's beside the one of a node's host: UCX leaves them alone."""

from collections.abc import Iterator

import pytest

from tests.support.cluster.netns import NamespacesUnavailable, StrayLink, host_with_a_stray_link
from tests.support.transfer.transfer_peer import Peer, two
from transfer.protocol.plan import TransferPlan

PLAN = TransferPlan(
    nonce=1,
    num_tokens=1024,
    first_block=0,
    block_size=16,
    block_bytes=16_384,
    state_bytes=30_000,
    max_message_bytes=65_536,
)


@pytest.fixture
def stray() -> Iterator[StrayLink]:
    try:
        with host_with_a_stray_link() as link:
            yield link
    except NamespacesUnavailable as why:
        pytest.skip(str(why))


async def test_a_link_beside_the_hosts_own_is_not_taken_and_may_vanish(stray: StrayLink) -> None:
    async with two(Peer.start(*stray.enter), Peer.start(*stray.enter)) as (prefill, decode):
        landed = await decode.expect(PLAN)
        sent = prefill.send(PLAN, decode, tokens=512)
        await decode.heard("landed")
        assert (await prefill.report())["describe"][f"to {decode.address}"] == "tcp/lo"
        stray.vanish()
        prefill.call("go_on", nonce=PLAN.nonce, tokens=PLAN.num_tokens)
        assert (await landed)["wrong"] == 0
        assert (await sent)["messages"] == 17
        assert (await prefill.report())["connections_lost"] == 0
