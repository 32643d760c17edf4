"""Work that a router has sent counts at once, and until it is seen finished."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.cache.hashing import prefix_keys
from headrace.cache.hits import PrefixHit
from headrace.step_costs import PROMPT_SECONDS, TIMED_STEPS, StepCosts, StepShape
from headrace.wire.node_messages import NodeStatus, Role
from router.routing.candidates import Load
from router.routing.ledger import Ledger
from router.routing.plan import NO_OBJECTIVES, Objectives, Plan, Prediction, RoutedRequest
from tests.support.router.candidates import candidate, linked
from tests.support.router.fake_nodes import node_info, node_status

NODES = linked(candidate("p0", Role.PREFILL), candidate("d0", Role.DECODE))
TOKENS = range(1000)
KEYS = {16: prefix_keys(TOKENS, 16)}
HAND_OVER, ALONE = Plan("p0", "d0"), Plan("d0", "d0")
PER_TOKEN = StepCosts(0.0, 0.0, 0.0, 0.0, token_s=0.001, depth_s=0.0)  # 1,000 tokens of prompts in a second
FREE_TOKENS, FREE_SLOTS = 64 * 16, 8


def started_ledger(**status: Any) -> Ledger:
    ledger = Ledger(hits_ttl_s=2.0)
    for name, role in (("p0", Role.PREFILL), ("d0", Role.DECODE)):
        beat(ledger, name, role, **status)
    return ledger


def beat(ledger: Ledger, name: str = "p0", role: Role = Role.PREFILL, now_s: float = 0.0, **status: Any) -> None:
    values: dict[str, Any] = {"costs": PER_TOKEN} | status
    reported: NodeStatus = replace(node_status(), **values)
    ledger.heartbeat(node_info(name, role, max_step_tokens=100), reported, now_s)


def send(
    ledger: Ledger,
    plan: Plan,
    number: int = 1,
    num_tokens: int = 1000,
    objectives: Objectives = NO_OBJECTIVES,
    **hits: PrefixHit,
) -> None:
    nodes = [node._replace(hit=hits.get(node.name, node.hit)) for node in NODES]
    ledger.sent(RoutedRequest(number, num_tokens, 10, objectives=objectives), plan, nodes, KEYS)


IDLE = Load(free_tokens=FREE_TOKENS, free_slots=FREE_SLOTS, empty_tokens=FREE_TOKENS)


def test_a_prompt_counts_where_it_is_computed_from_the_moment_it_is_sent_until_its_first_token() -> None:
    ledger = started_ledger()
    send(ledger, HAND_OVER, p0=PrefixHit(96, 64, 64))
    load = ledger.load("p0", 0.0)
    assert (load.waiting_tokens, load.waiting_lengths) == (936, (0,) * 9 + (936,))
    assert load.waiting_depths == StepShape.prefill(64, 1000).prefill_depths
    assert (load.free_tokens, load.free_slots) == (FREE_TOKENS - 1000, FREE_SLOTS - 1)
    ledger.prompt_computed(1, 1.0)
    assert ledger.load("p0", 1.0) == IDLE._replace(recent_lengths=(0.0,) * 9 + (93.6,))


def test_prompts_that_were_computed_lately_count_by_their_lengths_and_are_forgotten_in_time() -> None:
    ledger = started_ledger()
    for number, (num_tokens, is_computed) in enumerate(((1000, True), (100, True), (600, True), (1000, False))):
        send(ledger, HAND_OVER, number=number, num_tokens=num_tokens)
        if is_computed:
            ledger.prompt_computed(number, 1.0)
        ledger.ended(number, 1.0)
    assert ledger.load("p0", 1.0).recent_lengths == pytest.approx((0.0,) * 6 + (10.0, 0.0, 0.0, 160.0))
    assert ledger.load("d0", 1.0).recent_lengths == (), "it computed none"
    beat(ledger, now_s=11.0)
    assert ledger.load("p0", 11.0).recent_lengths[9] == pytest.approx(160.0 / math.e)


def test_an_answer_comes_then_generates_then_ends() -> None:
    ledger = started_ledger()
    send(ledger, replace(HAND_OVER, prediction=Prediction(2.5, 0.01)))
    held = {"free_tokens": FREE_TOKENS - 1000, "free_slots": FREE_SLOTS - 1}
    coming = IDLE._replace(num_coming=1, coming_tokens=1000, coming_s=2.5, shortness=1 / 30, **held)
    assert ledger.load("d0", 0.0) == coming
    ledger.reserved(1)
    assert ledger.load("d0", 0.0) == coming
    ledger.prompt_computed(1, 1.0)
    generating = coming._replace(num_coming=0, coming_tokens=0, coming_s=0.0, num_decoding=1, context_tokens=1000)
    assert ledger.load("d0", 1.0) == generating
    ledger.ended(1, 2.0)
    assert ledger.load("d0", 2.0) == IDLE
    for late in (ledger.ended, ledger.prompt_computed, ledger.started):
        late(1, 3.0)
    assert ledger.load("d0", 3.0) == IDLE


def test_answers_of_any_length_leave_nothing_behind() -> None:
    ledger, numbers = started_ledger(), range(1, 8)
    for number in numbers:
        ledger.sent(RoutedRequest(number, 1000, 50 + 30 * number), HAND_OVER, NODES, KEYS)
    for number in reversed(numbers):
        ledger.ended(number, 1.0)
    assert ledger.load("d0", 1.0) == IDLE


def test_a_failed_attempt_takes_all_its_work_with_it() -> None:
    ledger = started_ledger()
    for plan in (HAND_OVER, ALONE, Plan("p0", None)):
        send(ledger, plan)
        ledger.ended(1, 0.5)
        assert (ledger.load("p0", 0.5), ledger.load("d0", 0.5)) == (IDLE, IDLE)
        assert ledger.coming.match(KEYS[16], 62, 0.5) == {}


def test_a_node_alone_has_the_prompt_and_the_answer_but_one_place() -> None:
    ledger = started_ledger()
    send(ledger, ALONE)
    load = ledger.load("d0", 0.0)
    assert (load.waiting_tokens, load.num_coming, load.free_slots) == (1000, 1, FREE_SLOTS - 1)
    assert load.free_tokens == FREE_TOKENS - 1000
    assert ledger.load("p0", 0.0) == IDLE


def test_a_decode_node_that_computes_the_prompt_itself_takes_it_from_the_planned_node() -> None:
    ledger = started_ledger()
    send(ledger, HAND_OVER)
    ledger.prefills_itself(1, 960, 0.0)
    assert ledger.load("p0", 0.0) == IDLE
    assert ledger.load("d0", 0.0).waiting_tokens == 40
    assert ledger.coming.match(KEYS[16], 62, 0.0) == {}


def test_a_running_prompt_shrinks_as_fast_as_its_node_computes_and_never_vanishes() -> None:
    ledger = started_ledger()
    send(ledger, HAND_OVER)
    assert ledger.load("p0", 5.0).waiting_tokens == 1000, "it waits for its turn"
    ledger.started(1, 5.0)
    assert [ledger.load("p0", now_s).waiting_tokens for now_s in (5.0, 5.25, 5.5, 9.0)] == [1000, 750, 500, 100]
    send(ledger, HAND_OVER, number=2, num_tokens=200)
    ledger.started(2, 5.5)
    assert ledger.load("p0", 5.625).waiting_tokens == 575, "the shorter one goes first: 180 of it, 445 of the other"
    ledger.prompt_computed(2, 5.625)
    assert ledger.load("p0", 5.75).waiting_tokens == 875, "anew since the last end"


def test_a_prompt_shrinks_no_faster_than_a_gap_between_tokens_lets_its_node_compute() -> None:
    ledger = Ledger()
    busy: dict[str, Any] = {
        "num_decoding": 1,
        "costs": StepCosts(0.05, 0.0, 0.0, chunk_s=0.0, token_s=0.001, depth_s=0.0, late_s=0.02),
    }
    beat(ledger, "d0", Role.DECODE, **busy)
    send(ledger, ALONE, number=1, objectives=Objectives(token_gap_s=0.1))
    ledger.prompt_computed(1, 0.0)
    beat(ledger, "d0", Role.DECODE, **busy)
    send(ledger, ALONE, number=2)
    ledger.started(2, 0.0)
    # A step of 75 ms, 95 % of the gap less the 20 ms by which steps are late, has 25 ms for prompts.
    assert ledger.load("d0", 0.75).waiting_tokens == pytest.approx(750, abs=1)
    ledger.ended(1, 0.0)
    beat(ledger, "d0", Role.DECODE, **busy)
    assert ledger.load("d0", 0.75).waiting_tokens == pytest.approx(500, abs=1), (
        "full chunks of 100 tokens, in steps of 150 ms"
    )


def test_a_prompt_shrinks_between_the_longer_steps_of_a_node_that_drafts() -> None:
    ledger = Ledger()
    costs = StepCosts(0.05, 0.0, 0.0, chunk_s=0.0, token_s=0.001, depth_s=0.0, check_s=0.04, draft_s=0.01)
    counted = {"sampled_tokens": 0.0, "accepted_tokens": 0.0, "drafted_tokens": 0.0, "draft_steps": 0.0}
    beat(ledger, "d0", Role.DECODE, counters={TIMED_STEPS: 99.0, **counted}, costs=costs, num_decoding=1)
    # Ten steps of one answer with a draft each, all of them right: 100 ms beside 50 without.
    drafted = {"sampled_tokens": 20.0, "accepted_tokens": 10.0, "drafted_tokens": 10.0, "draft_steps": 10.0}
    beat(ledger, "d0", Role.DECODE, 1.0, counters={TIMED_STEPS: 109.0, **drafted}, costs=costs, num_decoding=1)
    load = ledger.load("d0", 1.0)
    assert (load.step_stretch, load.answer_pace) == (pytest.approx(2.0), pytest.approx(1.0))
    send(ledger, ALONE)
    ledger.started(1, 1.0)
    assert ledger.load("d0", 2.0).waiting_tokens == pytest.approx(500, abs=1), "a chunk of 100 tokens in each 200 ms"


def test_the_share_of_the_last_seconds_in_which_prompts_waited() -> None:
    ledger = started_ledger()
    assert ledger.load("p0", 0.0).prompt_share == 0.0
    for second in range(1, 61):
        beat(ledger, now_s=float(second), waiting_tokens=500)
    assert ledger.load("p0", 60.0).prompt_share == pytest.approx(1.0, abs=0.01)
    beat(ledger, now_s=61.0)
    assert 0.85 < ledger.load("p0", 61.0).prompt_share < 0.95, "one moment without says little"
    for second in range(62, 122):
        beat(ledger, now_s=float(second), waiting_tokens=500 * (second % 2))
    assert ledger.load("p0", 121.0).prompt_share == pytest.approx(0.5, abs=0.05)


def test_the_share_of_the_last_seconds_that_the_work_on_prompts_took() -> None:
    ledger = started_ledger(counters={PROMPT_SECONDS: 7.0})
    for second in range(1, 61):
        beat(ledger, now_s=float(second), counters={PROMPT_SECONDS: 7.0 + 0.4 * second})
    assert ledger.load("p0", 60.0).prompt_use == pytest.approx(0.4, abs=0.002), "what was counted before says nothing"
    beat(ledger, now_s=70.0, counters={PROMPT_SECONDS: 31.0})
    assert ledger.load("p0", 70.0).prompt_use == pytest.approx(0.4 / math.e, abs=0.01)


def test_prompts_that_wait_count_as_work_of_the_last_seconds_at_once() -> None:
    ledger = started_ledger(counters={PROMPT_SECONDS: 7.0})
    assert ledger.load("p0", 0.0).prompt_use == 0.0
    send(ledger, HAND_OVER, num_tokens=6000)
    assert ledger.load("p0", 0.0).prompt_use == pytest.approx(0.6), "6 s of work, in ten seconds"


def test_heartbeats_add_what_others_have_sent_and_count_nothing_twice() -> None:
    ledger = started_ledger()
    send(ledger, HAND_OVER)
    ledger.reserved(1)
    beat(ledger, "p0", waiting_tokens=1500, waiting_lengths=(0,) * 8 + (500, 1000), waiting_depths=1_000_000)
    beat(ledger, "d0", Role.DECODE, num_decoding=4, context_tokens=5000)
    assert ledger.load("p0", 0.0).waiting_tokens == 1500
    assert ledger.load("p0", 0.0).waiting_lengths == (0,) * 8 + (500, 1000)
    assert ledger.load("p0", 0.0).num_waiting == pytest.approx(1 + 500 / 384 - 1 + 1000 / 768)
    assert ledger.load("p0", 0.25).waiting_tokens == 1250, "others' prompts are computed meanwhile, too"
    load = ledger.load("d0", 0.0)
    assert (load.num_decoding, load.context_tokens, load.num_coming, load.coming_tokens) == (3, 4000, 1, 1000)
    ledger.prompt_computed(1, 0.0)
    ledger.ended(1, 0.0)
    load = ledger.load("d0", 0.0)
    assert (load.num_decoding, load.context_tokens, load.num_coming) == (3, 4000, 0)
    assert ledger.load("p0", 0.0).waiting_tokens == 500


def test_places_that_a_node_has_reserved_already_are_not_taken_off_again() -> None:
    ledger = started_ledger()
    send(ledger, HAND_OVER)
    ledger.reserved(1)
    pool = node_status().blocks
    beat(ledger, "d0", Role.DECODE, blocks=replace(pool, free=10))
    assert ledger.load("d0", 0.0).free_tokens == 160
    send(ledger, HAND_OVER, number=2, num_tokens=100)
    assert ledger.load("d0", 0.0).free_tokens == 60
    ledger.ended(1, 0.0)
    assert ledger.load("d0", 0.0).free_tokens == 1060


def test_a_prompt_under_way_is_a_hit_to_come_for_the_next_with_its_prefix() -> None:
    ledger = started_ledger()
    ledger.sent(RoutedRequest(1, 1000, 10), HAND_OVER, NODES, KEYS, boundaries=(100, 500, 2000))
    assert ledger.coming.match(KEYS[16], 62, 0.0) == {"p0": 62}
    assert ledger.coming.match(KEYS[16], 61, 0.0) == {"p0": 31}
    other = prefix_keys([*range(120), *range(5000, 5100)], 16)
    assert ledger.coming.match(other, 13, 0.0) == {"p0": 6}, "the end of the first message, by the hint"
    assert ledger.coming.match(prefix_keys(range(1, 300), 16), 18, 0.0) == {}


def test_hits_to_come_end_soon_after_the_prompt_is_computed_for_then_the_node_reports_them() -> None:
    ledger = started_ledger()
    for number in (1, 2):
        send(ledger, HAND_OVER, number=number)
        ledger.prompt_computed(number, 10.0 + number)
    assert [bool(ledger.coming.match(KEYS[16], 62, now_s)) for now_s in (12.9, 13.9, 14.0)] == [True, True, False]
    assert not ledger.coming._nodes


def test_only_what_is_computed_is_expected() -> None:
    ledger = started_ledger()
    node = [each._replace(hit=PrefixHit(992, 992, 992)) for each in NODES]
    ledger.sent(RoutedRequest(1, 1000, 10), HAND_OVER, node, KEYS, boundaries=(100, 500))
    assert ledger.coming.match(KEYS[16], 62, 0.0) == {}


@pytest.mark.parametrize("part", ["prefill", "decode"])
def test_a_node_that_is_gone_takes_its_work_and_its_hits_along(part: str) -> None:
    ledger = started_ledger()
    send(ledger, HAND_OVER)
    send(ledger, HAND_OVER, number=2)
    ledger.prompt_computed(2, 0.0)
    name, role = ("p0", Role.PREFILL) if part == "prefill" else ("d0", Role.DECODE)
    ledger.forget(name)
    beat(ledger, name, role)
    assert ledger.load(name, 0.0) == IDLE
    assert bool(ledger.coming.match(KEYS[16], 62, 0.0)) == (part == "decode")
    for number in (1, 2):
        ledger.ended(number, 1.0)
    loads = [ledger.load(name, 9.0)._replace(recent_lengths=()) for name in ("p0", "d0")]
    assert loads == [IDLE, IDLE]


def test_prompts_are_in_use_from_when_they_are_sent_until_they_end() -> None:
    ledger, keys = started_ledger(), {16: prefix_keys(range(32_768), 16)}
    for number in range(257):
        ledger.sent(RoutedRequest(number, 32_768, 10), HAND_OVER, NODES, keys)
    assert ledger.reuses.curve.miss_ratio(0, 0) == pytest.approx(1 / 256), "the first of these uses"
    for number in range(257):
        ledger.ended(number, 0.0)
    for number in range(257, 520):
        ledger.sent(RoutedRequest(number, 32_768, 10), HAND_OVER, NODES, keys)
        ledger.ended(number, 0.0)
    assert ledger.reuses.curve.miss_ratio(0, 0) == 1


def test_a_prompt_comes_back_whatever_the_block_size_of_the_node_that_computes_it() -> None:
    ledger = started_ledger()
    nodes = linked(candidate("p0"), candidate("p1")._replace(block_size=128))
    prompts = [{size: prefix_keys(range(first, 65_536), size) for size in (16, 128)} for first in range(16)]
    for number in range(512):
        plan = ("p0", "p1")[number // 16 % 2]
        ledger.sent(RoutedRequest(number, 65_536, 10), Plan(plan, plan), nodes, prompts[number % 16])
        ledger.ended(number, 0.0)
    curve = ledger.reuses.curve
    assert curve.miss_ratio(12 * 65_536, 1 << 20) == 1
    assert curve.miss_ratio(20 * 65_536, 1 << 20) == 0


def test_prompts_without_keys_are_followed_by_nothing() -> None:
    """No node has a cache index yet, or the prompt is shorter than a block."""
    ledger = started_ledger()
    for number, keys in enumerate(({}, {16: []}) * 16):
        ledger.sent(RoutedRequest(number, 10, 10), HAND_OVER, NODES, keys)
        ledger.ended(number, 0.0)
    assert ledger.reuses.curve.miss_ratio(0, 0) == 0


PLANS = (HAND_OVER, ALONE, Plan("p0", "p0"), Plan("d0", "p0"), Plan("p0", None))
EVENTS = ("sent", "reserved", "started", "prefills_itself", "prompt_computed", "ended", "forget", "heartbeat")


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 3), st.integers(0, 4)), max_size=40))
def test_whatever_comes_in_any_order_no_work_is_negative_and_none_is_left(
    events: list[tuple[str, int, int]],
) -> None:
    """Events of requests that are gone or were never sent among them, as of attempts that end while others begin."""
    ledger, now_s, numbers = started_ledger(), 0.0, iter(range(1000))
    sent = {each: next(numbers) for each in range(4)}
    for event, each, choice in events:
        now_s += 0.3
        match event:
            case "sent":
                ledger.ended(sent[each], now_s)
                sent[each] = next(numbers)  # each decision has a number of its own
                send(ledger, PLANS[choice], sent[each], num_tokens=1 + 250 * choice)
            case "prefills_itself":
                ledger.prefills_itself(sent[each], 100 * choice, now_s)
            case "reserved":
                ledger.reserved(sent[each])
            case "forget":
                ledger.forget(("p0", "d0")[choice % 2])
                beat(ledger, ("p0", "d0")[choice % 2], now_s=now_s)
            case "heartbeat":
                beat(ledger, ("p0", "d0")[choice % 2], now_s=now_s, waiting_tokens=400 * each, num_decoding=choice)
            case _:
                getattr(ledger, event)(sent[each], now_s)
        for load in ledger.loads(("p0", "d0"), now_s):
            values = load._replace(free_tokens=0, free_slots=0, waiting_lengths=(), recent_lengths=())
            work = [value for value in values if value != ()]
            assert min(*work, *load.waiting_lengths, *load.recent_lengths) >= 0
            assert sum(load.waiting_lengths) <= load.waiting_tokens
    for number in sent.values():
        ledger.ended(number, now_s)
    for name in ("p0", "d0"):
        beat(ledger, name, now_s=now_s)
        load = ledger.load(name, now_s)
        assert load._replace(recent_lengths=(), prompt_share=0.0, prompt_use=0.0) == IDLE
    assert ledger.coming.match(KEYS[16], 62, now_s + 3) == {}
