import asyncio
from dataclasses import replace
from typing import Any

import pytest

from headrace.cache.layout import AttentionGroup
from headrace.wire.errors import NodeLost
from headrace.wire.node_messages import LinkStatus, Peer, Role
from router.cluster.nodes import NodeTable
from router.errors import LayoutRefused, NameTaken
from tests.support.router.fake_nodes import (
    LAYOUT,
    FakeCluster,
    FakePrefillNode,
    Transfers,
    fake_cluster,
    node_info,
    node_status,
)


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def cluster() -> FakeCluster:
    return fake_cluster([1], prefill=3, decode=2)


@pytest.fixture
def nodes(clock: Clock, cluster: FakeCluster) -> NodeTable:
    return NodeTable(2.0, clock, cluster.connect)


def names(nodes: NodeTable, role: Role) -> list[str]:
    return [node.info.name for node in nodes.live(role)]


def test_registered_nodes_by_role_and_name(nodes: NodeTable):
    for name, role in (("p1", Role.PREFILL), ("d0", Role.DECODE), ("p0", Role.PREFILL)):
        nodes.register(node_info(name, role), node_status())
    assert names(nodes, Role.PREFILL) == ["p0", "p1"]
    assert names(nodes, Role.DECODE) == ["d0"]
    assert nodes.max_model_tokens == 2048


def test_the_longest_sequence_follows_the_nodes_and_can_be_read_while_they_change(nodes: NodeTable):
    assert nodes.max_model_tokens is None
    for name, length in (("d0", 4096), ("d1", 1024)):
        nodes.register(node_info(name, Role.DECODE, max_model_tokens=length), node_status())
    assert nodes.max_model_tokens == 1024
    nodes._nodes = Untouchable(nodes._nodes)  # as while another thread registers a node
    assert nodes.max_model_tokens == 1024
    nodes._nodes = dict(nodes._nodes.items())
    nodes.leave("d1", 1)
    assert nodes.max_model_tokens == 4096


class Untouchable(dict[str, Any]):
    def values(self) -> Any:
        raise RuntimeError("dictionary changed size during iteration")


LOST = NodeLost("p0", "nobody is there")


def test_a_node_is_asked_from_its_second_missed_heartbeat_on(nodes: NodeTable, clock: Clock):
    info = node_info("p0", Role.PREFILL)
    nodes.register(info, node_status())
    clock.now_s += 3.9
    assert nodes.late() == []
    clock.now_s += 0.1
    assert nodes.late() == nodes.all()
    nodes.register(info, node_status())
    assert nodes.late() == []


def test_three_missed_heartbeats_and_no_answer_are_a_death(
    nodes: NodeTable, clock: Clock, caplog: pytest.LogCaptureFixture
):
    nodes.register(node_info("p0", Role.PREFILL), node_status())
    (node,) = nodes.all()
    clock.now_s += 5.9
    assert names(nodes, Role.PREFILL) == ["p0"], "nobody has asked it yet"
    nodes.unanswered(node, LOST)
    assert names(nodes, Role.PREFILL) == []
    assert nodes.all() == [node], "its third heartbeat may still come"
    clock.now_s += 0.1
    for _ in range(2):
        nodes.unanswered(node, LOST)
        assert nodes.all() == []
    (message,) = caplog.messages
    assert message == "node p0 missed its heartbeats and does not answer: taken for dead: p0: nobody is there"


def test_a_node_that_answers_stays_however_late_its_heartbeats_are(nodes: NodeTable, clock: Clock):
    info, status = node_info("p0", Role.PREFILL), replace(node_status(), running=3)
    nodes.register(info, node_status())
    (node,) = nodes.all()
    clock.now_s += 60.0  # nobody asked meanwhile: the router itself stood still
    assert names(nodes, Role.PREFILL) == ["p0"]
    node.suspect = True
    nodes.answered(node, info, status)
    assert (nodes.live(Role.PREFILL), node.status, nodes.late()) == ([node], status, [])


def test_an_answer_of_another_process_is_a_death(nodes: NodeTable, clock: Clock):
    nodes.register(node_info("p0", Role.PREFILL), node_status())
    nodes.answered(nodes.all()[0], node_info("p0", Role.PREFILL, incarnation=2), node_status())
    assert nodes.all() == []


def test_what_became_of_a_question_to_an_earlier_incarnation_does_not_matter(nodes: NodeTable, clock: Clock):
    first, second = (node_info("p0", Role.PREFILL, incarnation=i) for i in (1, 2))
    nodes.register(first, node_status())
    (earlier,) = nodes.all()
    nodes.register(second, node_status())
    clock.now_s += 6.0
    nodes.answered(earlier, second, replace(node_status(), running=3))
    nodes.unanswered(earlier, LOST)
    (node,) = nodes.live(Role.PREFILL)
    assert (node.info, node.status) == (second, node_status())


def test_a_suspect_gets_no_work_until_its_next_heartbeat(nodes: NodeTable):
    info = node_info("p0", Role.PREFILL)
    nodes.register(info, node_status())
    nodes.live(Role.PREFILL)[0].suspect = True
    assert names(nodes, Role.PREFILL) == []
    nodes.register(info, node_status())
    assert names(nodes, Role.PREFILL) == ["p0"]


async def test_a_restarted_node_gets_a_new_client_and_the_old_one_closes(nodes: NodeTable, cluster: FakeCluster):
    nodes.register(node_info("p0", Role.PREFILL), node_status())
    old = nodes.live(Role.PREFILL)[0]
    async with nodes.in_use(old):
        nodes.register(node_info("p0", Role.PREFILL, incarnation=2), node_status())
        await nodes.close_retired()
        assert not cluster.nodes["p0"].closed  # a call still runs on it
    assert cluster.nodes["p0"].closed
    assert nodes.live(Role.PREFILL)[0].id == ("p0", 2)


def test_of_two_processes_with_one_name_the_later_keeps_it(nodes: NodeTable):
    for incarnation in (1, 2, 3):
        assert nodes.register(node_info("p0", Role.PREFILL, incarnation=incarnation), node_status())
    holder = nodes.live(Role.PREFILL)
    for incarnation in (1, 2):
        earlier = node_info("p0", Role.PREFILL, incarnation=incarnation, address="there:9")
        with pytest.raises(NameTaken, match=r"node p0 at there:9: the name is taken, p0:1 .* another --name"):
            nodes.register(earlier, node_status())
        nodes.leave("p0", incarnation)
    assert not nodes.register(node_info("p0", Role.PREFILL, incarnation=3), node_status())
    assert nodes.live(Role.PREFILL) == holder


@pytest.mark.parametrize("how", ["leaves", "dies"])
def test_a_name_is_free_again_once_its_holder_is_gone(nodes: NodeTable, clock: Clock, how: str):
    first, second = (node_info("p0", Role.PREFILL, incarnation=i) for i in (1, 2))
    nodes.register(first, node_status())
    nodes.register(second, node_status())
    if how == "leaves":
        nodes.leave("p0", 2)
    else:
        clock.now_s += 6.0
        nodes.unanswered(nodes.all()[0], LOST)
    assert nodes.register(first, node_status())
    assert nodes.live(Role.PREFILL)[0].info == first


def test_an_old_incarnation_cannot_leave_for_the_new_one(nodes: NodeTable):
    nodes.register(node_info("p0", Role.PREFILL, incarnation=2), node_status())
    nodes.leave("p0", 1)
    assert names(nodes, Role.PREFILL) == ["p0"]
    nodes.leave("p0", 2)
    assert names(nodes, Role.PREFILL) == []


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("fingerprint", "other", "fingerprint other != fake of p0"),
        ("dtype", "bfloat16", "dtype bfloat16 != float32 of p0"),
        ("attention_groups", (AttentionGroup(2, 4, 8),), "attention group 0: num_heads 4 != 2 of p0"),
        ("state_groups", (), "0 state groups != 1 of p0; .* speculation.drafter: mtp all or none"),
        ("version", 9, "version 9 != 2 of p0"),
    ],
)
def test_what_cannot_be_converted_is_refused_with_both_values(nodes: NodeTable, field: str, value: Any, named: str):
    nodes.register(node_info("p0", Role.PREFILL), node_status())
    other = node_info("d0", Role.DECODE, layout=replace(LAYOUT, **{field: value}))
    with pytest.raises(LayoutRefused, match=f"node d0: {named}"):
        nodes.register(other, node_status())
    assert names(nodes, Role.DECODE) == []


def test_block_sizes_and_state_dtypes_may_differ(nodes: NodeTable):
    nodes.register(node_info("p0", Role.PREFILL), node_status())
    nodes.register(node_info("p1", Role.PREFILL, layout=replace(LAYOUT, state_dtype="bfloat16")), node_status())
    nodes.register(node_info("d0", Role.DECODE, layout=replace(LAYOUT, block_size=24)), node_status())
    assert (names(nodes, Role.PREFILL), names(nodes, Role.DECODE)) == (["p0", "p1"], ["d0"])


def test_a_node_with_another_max_message_bytes_is_refused(nodes: NodeTable):
    nodes.register(node_info("p0", Role.PREFILL, max_message_bytes=20_000), node_status())
    for name, role in (("p1", Role.PREFILL), ("d0", Role.DECODE)):
        other = node_info(name, role, max_message_bytes=30_000)
        with pytest.raises(
            LayoutRefused, match=f"node {name}: max_message_bytes 30000 != 20000 of p0; start all nodes"
        ):
            nodes.register(other, node_status())


def test_max_message_bytes_may_differ_between_gpu_and_host_nodes_which_never_transfer(nodes: NodeTable):
    nodes.register(node_info("p0", Role.PREFILL, max_message_bytes=20_000), node_status())
    nodes.register(node_info("d0", Role.DECODE, max_message_bytes=30_000, device="cuda"), node_status())
    assert (names(nodes, Role.PREFILL), names(nodes, Role.DECODE)) == (["p0"], ["d0"])


def test_a_restarted_node_may_bring_another_max_message_bytes_to_a_cluster_of_its_own(nodes: NodeTable):
    for incarnation, num_bytes in ((1, 20_000), (2, 30_000)):
        info = node_info("p0", Role.PREFILL, incarnation=incarnation, max_message_bytes=num_bytes)
        assert nodes.register(info, node_status())


def test_dead_nodes_do_not_hold_the_cluster_to_their_layout(nodes: NodeTable, clock: Clock):
    nodes.register(node_info("p0", Role.PREFILL), node_status())
    clock.now_s += 7
    nodes.unanswered(nodes.all()[0], LOST)
    nodes.register(node_info("d0", Role.DECODE, layout=replace(LAYOUT, dtype="bfloat16")), node_status())
    assert names(nodes, Role.DECODE) == ["d0"]


def test_a_node_may_have_to_send_to_every_other_one_whatever_their_roles(nodes: NodeTable):
    for name, role in (("p0", Role.PREFILL), ("p1", Role.PREFILL), ("d0", Role.DECODE)):
        nodes.register(node_info(name, role), node_status())
    assert nodes.receivers_of("p1") == [Peer("d0", 1, "d0:2", "cpu"), Peer("p0", 1, "p0:2", "cpu")]
    assert [peer.name for peer in nodes.receivers_of("d0")] == ["p0", "p1"]


def test_a_node_with_both_roles_is_there_for_either_work(nodes: NodeTable, clock: Clock):
    nodes.register(node_info("p0", Role.BOTH), node_status())
    assert names(nodes, Role.PREFILL) == names(nodes, Role.DECODE) == ["p0"]
    clock.now_s += 7
    nodes.unanswered(nodes.all()[0], LOST)
    assert [lost.info.name for work in (Role.PREFILL, Role.DECODE) for lost in nodes.awaited(work)] == ["p0", "p0"]


def test_a_nodes_role_is_the_one_that_it_was_last_switched_to(nodes: NodeTable):
    for name in ("p0", "p1"):
        nodes.register(node_info(name, Role.PREFILL), node_status())
    switched = nodes.named("p1")
    assert switched is not None and switched.role is Role.PREFILL
    switched.switched(Role.DECODE, 1)
    assert (names(nodes, Role.PREFILL), names(nodes, Role.DECODE)) == (["p0"], ["p1"])


def test_a_report_from_before_a_switch_that_comes_after_it_changes_nothing(nodes: NodeTable):
    info = node_info("p0", Role.PREFILL)
    nodes.register(info, node_status())
    (node,) = nodes.all()
    node.switched(Role.BOTH, 2)
    nodes.register(info, replace(node_status(), role=Role.DECODE, role_switches=1, running=3))
    assert (node.role, node.status.running) == (Role.BOTH, 3)
    nodes.register(info, replace(node_status(), role=Role.DECODE, role_switches=3))
    assert node.role is Role.DECODE, "another router's later switch counts"


def test_a_restarted_router_gets_the_role_from_the_node(nodes: NodeTable):
    nodes.register(node_info("p0", Role.PREFILL), replace(node_status(), role=Role.DECODE, role_switches=1))
    assert names(nodes, Role.DECODE) == ["p0"]


def test_a_restarted_node_has_the_role_with_which_it_starts(nodes: NodeTable):
    nodes.register(node_info("p0", Role.PREFILL), replace(node_status(), role=Role.DECODE, role_switches=1))
    nodes.register(node_info("p0", Role.PREFILL, incarnation=2), node_status())
    assert names(nodes, Role.PREFILL) == ["p0"]


def test_with_elastic_roles_every_node_may_do_any_work(clock: Clock, cluster: FakeCluster):
    nodes = NodeTable(2.0, clock, cluster.connect, roles_are_fixed=False)
    nodes.register(node_info("p0", Role.PREFILL), node_status())
    assert names(nodes, Role.DECODE) == ["p0"]
    clock.now_s += 7
    nodes.unanswered(nodes.all()[0], LOST)
    assert nodes.may_come(Role.DECODE)


def test_a_node_does_not_send_to_itself(nodes: NodeTable):
    for name in ("p0", "p1", "d0"):
        nodes.register(node_info(name, Role.BOTH), node_status())
    assert [node.info.name for node in nodes.senders_to(node_info("p1", Role.BOTH), Role.PREFILL)] == ["d0", "p0"]


def test_only_nodes_of_one_kind_of_device_transfer_to_each_other(nodes: NodeTable):
    for role in (Role.PREFILL, Role.DECODE):
        for number, device in enumerate(("cpu", "cuda")):
            nodes.register(node_info(f"{role.value[0]}{number}", role, device=device), node_status())
    senders = {node.info.name: [each.info.name for each in nodes.senders_to(node.info)] for node in nodes.all()}
    assert senders == {"p0": ["d0"], "p1": ["d1"], "d0": ["p0"], "d1": ["p1"]}


def test_a_node_reaches_all_but_those_whose_link_check_failed(nodes: NodeTable):
    d0, d1, d2 = (node_info(f"d{i}", Role.DECODE) for i in range(3))
    links = (LinkStatus("d0", error="lost: no way to its host"), LinkStatus("d1", bytes_per_s=1e9, warning="slow"))
    nodes.register(node_info("p0", Role.PREFILL), replace(node_status(), links=links))
    (p0,) = nodes.live(Role.PREFILL)
    assert [p0.reaches(receiver) for receiver in (d0, d1, d2)] == [False, True, True]


def test_another_transfer_version_is_refused_with_the_remedy(nodes: NodeTable):
    nodes.register(node_info("d0", Role.DECODE), node_status())
    with pytest.raises(LayoutRefused, match=r"p0: transfer_version 0 != 2 of d0; run one release on all nodes"):
        nodes.register(node_info("p0", Role.PREFILL, transfer_version=0), node_status())
    nodes.register(node_info("d0", Role.DECODE, transfer_version=3, incarnation=2), node_status())
    assert names(nodes, Role.DECODE) == ["d0"], "a lone node that came back with another release is no mixture"


async def test_retired_clients_may_be_closed_by_several_at_once(clock: Clock):
    closing, closed = asyncio.Event(), []

    class SlowClient(FakePrefillNode):
        async def close(self) -> None:
            await closing.wait()
            closed.append(self.name)

    nodes = NodeTable(2.0, clock, lambda info: SlowClient(info.name, [1], Transfers()))
    for name in ("p0", "p1"):
        nodes.register(node_info(name, Role.PREFILL), node_status())
        nodes.leave(name, 1)
    both = [asyncio.create_task(nodes.close_retired()) for _ in range(2)]
    await asyncio.sleep(0)
    closing.set()
    await asyncio.gather(*both)
    assert sorted(closed) == ["p0", "p1"]
