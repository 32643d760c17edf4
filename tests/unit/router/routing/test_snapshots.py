"""Snapshots of nodes as candidates: what they hold, what they may do, and whom they reach."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import astuple, replace
from itertools import islice
from typing import Any

import pytest

from headrace.cache.hashing import prefix_keys
from headrace.cache.hits import PrefixHit
from headrace.cache.types import PrefixKey
from headrace.step_costs import TIMED_STEPS, StepCosts
from headrace.wire.cache_updates import CacheSnapshotPart
from headrace.wire.node_messages import LinkStatus, NodeStatus, PoolStatus, Role
from router.cluster.cluster_index import ClusterIndex
from router.routing.candidates import Candidate, LinkCosts
from router.routing.ledger import Ledger
from router.routing.node_book import REFRESH_S
from router.routing.plan import Plan, RoutedRequest
from router.routing.policies.predicted import Predicted
from router.routing.snapshots import Pins, Snapshots
from tests.support.router.candidates import candidate, linked
from tests.support.router.fake_nodes import LAYOUT, node_info, node_status

ROLES = {"d0": Role.DECODE, "d1": Role.DECODE, "p0": Role.PREFILL, "p1": Role.PREFILL}
KNOWN = {TIMED_STEPS: 99.0}
KEYS = {16: prefix_keys(range(64), 16)}


class Cluster:
    """Nodes that have reported once, and what each has cached."""

    def __init__(self, devices: dict[str, str] | None = None, *, roles_are_fixed: bool = True) -> None:
        self.index = ClusterIndex()
        self.ledger = Ledger()
        self.snapshots = Snapshots(self.index, self.ledger, roles_are_fixed=roles_are_fixed)
        self.devices = devices or dict.fromkeys(ROLES, "cpu")
        for name in self.devices:
            self.report(name)

    def report(self, name: str, status: NodeStatus | None = None) -> None:
        info = node_info(name, ROLES[name], device=self.devices[name])
        self.snapshots.heartbeat(info, status or node_status(), 0.0)

    def take(self, **how: Any) -> dict[str, Candidate]:
        roles = {name: role for name, role in ROLES.items() if name in self.devices}
        return {each.name: each for each in self.snapshots.take(roles, KEYS, 64, 0.0, **how)}


def reaching(candidates: dict[str, Candidate]) -> dict[str, str]:
    """Names that each node can send to, joined."""
    return {name: " ".join(sorted(each.links)) for name, each in candidates.items()}


def able(candidates: dict[str, Candidate]) -> dict[str, str]:
    """What each node may do."""
    return {name: "P" * each.may_prefill + "D" * each.may_decode for name, each in candidates.items()}


def test_hits_load_and_sizes_are_those_of_each_node() -> None:
    cluster = Cluster()
    cluster.index.add(("d1", 1), 16).apply(CacheSnapshotPart(1, 1, tuple(KEYS[16][:3]), (KEYS[16][1],), True))
    busy = NodeStatus(3, 2, PoolStatus(64, 10, 20, 34, 9), PoolStatus(8, 1, 2, 5, 3), waiting_tokens=700)
    cluster.report("d1", replace(busy, num_decoding=2, costs=StepCosts(token_s=0.001), counters=KNOWN))
    found = cluster.take()
    assert list(found) == ["d0", "d1", "p0", "p1"]
    assert (found["d0"].hit, found["d1"].hit) == (PrefixHit(0, 0, 0), PrefixHit(48, 32, 32))
    load = found["d1"].load
    assert (load.num_decoding, load.waiting_tokens, load.free_tokens, load.free_slots) == (2, 700, 480, 3)
    assert found["d1"].costs.token_s == 0.001
    assert found["d1"].bytes_per_token * 16 == LAYOUT.block_bytes
    assert found["d1"].state_bytes == LAYOUT.state_bytes


def test_fixed_roles_forbid_the_other_role_s_work_and_elastic_ones_nothing() -> None:
    assert able(Cluster().take()) == {"d0": "D", "d1": "D", "p0": "P", "p1": "P"}
    assert set(able(Cluster(roles_are_fixed=False).take()).values()) == {"PD"}


def test_a_decode_node_computes_prompts_only_if_nobody_can_send_to_it() -> None:
    assert able(Cluster({"d0": "cpu", "d1": "cpu"}).take()) == {"d0": "PD", "d1": "PD"}
    mixed = Cluster({"d0": "cpu", "d1": "cuda", "p0": "cuda"}).take()
    assert able(mixed) == {"d0": "PD", "d1": "D", "p0": "P"}
    assert reaching(mixed) == {"d0": "", "d1": "p0", "p0": "d1"}
    avoided = Cluster({"d0": "cpu", "p0": "cpu"}).take(avoided={"p0"})
    assert able(avoided) == {"d0": "D"}, "a prefill node that is busy is waited for"


def test_links_have_the_costs_that_were_measured() -> None:
    cluster = Cluster()
    links = (LinkStatus("d0", ("tcp",), 0.001, 2e9), LinkStatus("d1"))
    cluster.report("p0", replace(node_status(), links=links))
    found = cluster.take()["p0"].links
    assert (found["d0"], found["d1"]) == (LinkCosts(0.001, 2e9), LinkCosts())
    with pytest.raises(KeyError):
        found["p0"]
    assert len(found) == 3


def test_a_failed_link_counts_unless_nobody_else_reaches_the_receiver() -> None:
    cluster = Cluster()
    broken = replace(node_status(), links=(LinkStatus("d0", error="nobody is there"),))
    cluster.report("p0", broken)
    assert reaching(cluster.take())["p0"] == "d1 p1"
    cluster.report("p1", broken)
    assert reaching(cluster.take()) == {"d0": "d1 p0 p1", "d1": "d0 p0 p1", "p0": "d0 d1 p1", "p1": "d0 d1 p0"}
    cluster.report("p1")
    assert reaching(cluster.take())["p0"] == "d1 p1"


def test_pins_leave_one_node_for_each_part() -> None:
    cluster = Cluster()
    assert able(cluster.take(pins=Pins("p1", "d0"))) == {"d0": "D", "d1": "", "p0": "", "p1": "P"}
    elastic = Cluster(roles_are_fixed=False)
    assert able(elastic.take(pins=Pins(decode="d0", is_reserved=True))) == {"d0": "D", "d1": "P", "p0": "P", "p1": "P"}
    assert able(elastic.take(pins=Pins("d0", "d0"))) == {"d0": "PD", "d1": "", "p0": "", "p1": ""}


def test_only_nodes_that_may_be_given_work_are_candidates() -> None:
    cluster = Cluster()
    assert [each.name for each in cluster.snapshots.take({"p1": Role.PREFILL, "x": Role.DECODE}, {}, 64, 0.0)] == ["p1"]
    cluster.snapshots.keep(["d0", "p0"])
    assert list(cluster.take()) == ["d0", "p0"]


def test_a_node_that_has_timed_few_steps_is_taken_to_be_like_the_others() -> None:
    cluster = Cluster()
    assert {each.costs for each in cluster.take().values()} == {StepCosts()}
    first = replace(node_status(), costs=StepCosts(token_s=0.03), counters={TIMED_STEPS: 1.0})
    cluster.report("p0", first)
    assert {each.costs for each in cluster.take().values()} == {first.costs}
    measured = replace(node_status(), costs=StepCosts(token_s=0.001), counters=KNOWN)
    cluster.report("d0", measured)
    assert {each.costs for each in cluster.take().values()} == {measured.costs}
    own = replace(measured, costs=StepCosts(token_s=0.002))
    cluster.report("p1", own)
    assert cluster.take()["p1"].costs == own.costs


def _events(dice: random.Random) -> Iterator[Callable[[Cluster, float], None]]:
    """What may happen to a cluster, without end."""
    names, sent = [*ROLES], 0
    while True:
        name, other = dice.sample(names, 2)
        device = dice.choices(("cpu", "cuda"), (9, 1))[0]
        links = (LinkStatus(other, error=dice.choices((None, "nobody"), (3, 1))[0]),) * dice.randrange(2)
        status = replace(
            node_status(),
            links=links,
            waiting_tokens=dice.choice((0, 0, 500)),
            costs=StepCosts(token_s=dice.choice((0.001, 0.002))),
            counters={TIMED_STEPS: dice.choice((0.0, 9.0, 99.0))},
        )
        number = dice.randrange(sent) if sent else 0
        info = node_info(name, ROLES[name], device=device, incarnation=dice.choices((1, 2), (9, 1))[0])
        match dice.choices(range(8), (4, 4, 4, 4, 4, 4, 4, 1))[0]:
            case 0 | 1:
                yield lambda cluster, now_s, info=info, status=status: cluster.snapshots.heartbeat(info, status, now_s)
            case 2 | 3:
                sent += 1
                request, plan = RoutedRequest(sent, 64, 10), Plan(name, other)
                nodes = linked(*(candidate(each) for each in names))
                yield lambda cluster, _, request=request, plan=plan, nodes=nodes: cluster.ledger.sent(
                    request, plan, nodes, KEYS
                )
            case 4:
                yield lambda cluster, now_s, number=number: cluster.ledger.started(number, now_s)
            case 5:
                yield lambda cluster, now_s, number=number: cluster.ledger.prompt_computed(number, now_s)
            case 6:
                yield lambda cluster, now_s, number=number: cluster.ledger.ended(number, now_s)
            case 7:
                kept = [each for each in names if each != name or dice.random() < 0.7]
                yield lambda cluster, _, kept=kept: cluster.snapshots.keep(kept)


@pytest.mark.parametrize("seed", range(4))
def test_a_snapshot_after_many_others_equals_the_first_one_of_a_router_that_has_seen_the_same(seed: int) -> None:
    dice = random.Random(seed)
    often, happened, roles = Cluster(roles_are_fixed=seed % 2 == 0), [], ROLES
    for number, event in enumerate(islice(_events(dice), 60)):
        now_s = 2 * number * REFRESH_S
        event(often, now_s)
        happened.append((event, now_s))
        once = Cluster(roles_are_fixed=often.snapshots.roles_are_fixed)
        for earlier, at_s in happened:
            earlier(once, at_s)
        if dice.random() < 0.1:
            roles = {name: dice.choice((role, Role.BOTH)) for name, role in ROLES.items() if dice.random() < 0.9}
        found, fresh = (each.snapshots.take(roles, KEYS, 64, now_s) for each in (often, once))
        assert [_comparable(each) for each in found] == [_comparable(each) for each in fresh]


def _comparable(node: Candidate) -> Candidate:
    return node._replace(links=dict(node.links))


def ask_in_turn(cluster: Cluster, num_prompts: int) -> None:
    """A thousand requests with prompts of 1,024 tokens, of whose blocks the last one is followed."""
    block, last = PrefixKey(bytes(32)), b"\xff"
    prompts = [{16: [*[block] * 63, PrefixKey(last + b"%d" % prompt)]} for prompt in range(num_prompts)]
    candidates = cluster.snapshots.take(ROLES, {}, 1025, 0.0)
    for number in range(1000):
        request, keys = RoutedRequest(number, 1025, 10), prompts[number % num_prompts]
        cluster.ledger.sent(request, Plan("p0", "d0"), candidates, keys)
        cluster.ledger.ended(number, 0.0)


def cluster_of(*, roles_are_fixed: bool = False, **sizes: int) -> Cluster:
    """Four nodes that hold so much each, of blocks or slots as good as everything if these are not given."""
    cluster = Cluster(roles_are_fixed=roles_are_fixed)
    for name, role in ROLES.items():
        info = node_info(name, role, **({"num_blocks": 1 << 20, "num_slots": 1 << 20} | sizes))
        cluster.snapshots.heartbeat(info, node_status(), 0.0)
    return cluster


UNDIVIDED = dict.fromkeys(ROLES, Role.BOTH)


@pytest.mark.parametrize(("num_prompts", "are_short"), [(40, False), (96, True), (200, False)])
def test_caches_are_short_where_those_for_answers_lose_what_all_keep(num_prompts: int, are_short: bool) -> None:
    """Of prompts of 1,024 tokens two nodes keep 64 and all four 128."""
    for roles_are_fixed in (False, True):
        cluster = cluster_of(roles_are_fixed=roles_are_fixed, num_blocks=32 * 64)
        assert not cluster.snapshots.caches_are_short(ROLES), "nothing is known yet"
        ask_in_turn(cluster, num_prompts)
        assert cluster.snapshots.caches_are_short(ROLES) == (are_short and not roles_are_fixed)
        assert not cluster.snapshots.caches_are_short(UNDIVIDED)
        assert not cluster.snapshots.caches_are_short({**UNDIVIDED, "p0": Role.PREFILL}), "three nodes keep 96"


def test_caches_are_short_by_slots_too() -> None:
    """Of 96 prompts two nodes keep the states of 70 / 1.6, four of 140 / 1.15; undivided ones lack none."""
    cluster = cluster_of(num_slots=35)
    ask_in_turn(cluster, 96)
    assert cluster.snapshots.caches_are_short(ROLES)
    assert not cluster.snapshots.caches_are_short(UNDIVIDED)


def test_packed_checkpoints_have_slots_beside_those_of_running_requests() -> None:
    cluster = cluster_of(num_slots=35, num_packed_slots=100)
    ask_in_turn(cluster, 96)
    assert not cluster.snapshots.caches_are_short(ROLES)


@pytest.mark.parametrize(
    ("num_requests", "decode", "are_short"), [(8, "d0", False), (16, "d0", True), (16, None, False)]
)
def test_caches_are_short_where_too_few_of_the_requests_under_way_run_at_once(
    num_requests: int, decode: str | None, are_short: bool
) -> None:
    """Two nodes generate, with four slots each, and may hold half as many more in line. Packed checkpoints have slots
    that no request runs in, and a prompt of one token takes none at these nodes."""
    cluster = cluster_of(num_slots=4, num_packed_slots=100)
    candidates = cluster.snapshots.take(ROLES, {}, 1025, 0.0)
    for number in range(num_requests):
        cluster.ledger.sent(RoutedRequest(number, 1025, 10), Plan("p0", decode), candidates, {})
    assert cluster.snapshots.caches_are_short(ROLES) == are_short


def test_roles_may_change_in_place() -> None:
    cluster, roles = cluster_of(num_blocks=32 * 64), dict(ROLES)
    ask_in_turn(cluster, 96)
    assert cluster.snapshots.caches_are_short(roles)
    roles |= UNDIVIDED
    assert not cluster.snapshots.caches_are_short(roles)


@pytest.mark.parametrize("slow_start", [1.0, 30.0])
def test_equal_nodes_share_the_first_requests_whatever_their_first_steps_took(slow_start: float) -> None:
    cluster = Cluster()
    cluster.snapshots.keep([])
    usual = StepCosts(token_s=0.001)
    first = StepCosts(*(slow_start * each for each in astuple(usual)))
    for name, costs, timed in (("n0", first, 2.0), ("n1", usual, 64.0)):
        status = replace(node_status(), costs=costs, counters={TIMED_STEPS: timed})
        cluster.snapshots.heartbeat(node_info(name, Role.BOTH), status, 0.0)
    chosen: Counter[str] = Counter()
    for number in range(40):
        found = cluster.snapshots.take({"n0": Role.BOTH, "n1": Role.BOTH}, {}, 1000, 0.0)
        plan = Predicted().choose(RoutedRequest(number, 1000, 20), found)
        assert plan is not None
        chosen[plan.prefill] += 1
    assert chosen["n0"] == chosen["n1"]
