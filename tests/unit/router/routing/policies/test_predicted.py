import math
import random
from dataclasses import fields, replace
from itertools import combinations

import pytest

from headrace.step_costs import StepCosts
from headrace.wire.node_messages import Role
from router.routing.plan import Objectives, Plan
from router.routing.policies.cost import answer_part, meeting
from router.routing.policies.predicted import Predicted, _best
from router.routing.policies.times import pace as node_pace
from tests.support.router.priced_nodes import LINK, REQUEST, busy, choose, line, node


def where(plan: Plan) -> tuple[str, str | None]:
    return (plan.prefill, plan.decode)


def test_no_node_no_plan() -> None:
    assert Predicted().choose(REQUEST, []) is None


def test_a_long_prompt_is_computed_away_from_the_node_that_decodes_many() -> None:
    assert choose(node("p", Role.PREFILL), node("d", **busy(48))).prefill == "p"


def test_a_prompt_that_waits_long_takes_room_elsewhere_only_where_that_is_plenty() -> None:
    """At twenty times the trace's speed what was reserved for waiting prompts drove half of all hits out."""
    prefill = node("a", Role.BOTH, **line(*[16384] * 17), free_tokens=1 << 14)
    little, plenty = (
        node("b", Role.BOTH, **busy(40), **line(*[16384] * 4), free_tokens=room) for room in (1 << 20, 1 << 27)
    )
    assert where(choose(prefill, little)) == ("b", "b")
    assert where(choose(prefill, plenty)) == ("a", "b")


@pytest.mark.parametrize(
    ("role", "room", "decode"),
    [
        (Role.BOTH, {}, "b"),
        (Role.BOTH, {"free_tokens": 0}, "a"),
        (Role.BOTH, {"free_slots": 0}, "a"),
        (Role.DECODE, {"free_tokens": 0}, "b"),
    ],
)
def test_a_full_node_of_both_roles_holds_no_room_for_a_prompt_elsewhere(
    role: Role, room: dict[str, int], decode: str
) -> None:
    """At twenty-four times the trace's speed 75 % of requests came within 30 s, and 83 do. A node for answers gets all
    its prompts from others."""
    sender = node("a", Role.BOTH, **busy(2), **line(*[16384] * 4))
    assert where(choose(sender, node("b", role, **busy(40), **room))) == ("a", decode)


def test_a_prompt_delays_those_behind_it_more_than_those_that_go_first() -> None:
    """Twelve of its length are done by its turn; twelve of four times its length wait for it."""
    answering, request = node("d", **busy(40)), replace(REQUEST, answer_tokens=256)
    alike, longer = (node("p", Role.PREFILL, **line(*[length] * 12)) for length in (16384, 65536))
    assert where(choose(alike, answering, request=request)) == ("p", "d")
    assert where(choose(longer, answering, request=request)) == ("d", "d")


@pytest.mark.parametrize(("room", "chosen"), [({}, "a"), ({"free_tokens": -1}, "b"), ({"free_slots": -1}, "b")])
def test_where_requests_wait_for_room_a_prompt_delays_as_many_that_come(room: dict[str, int], chosen: str) -> None:
    """At twenty-four times the trace's speed short prompts' p95 was 6.4 s, and 2.0 by this."""
    request = replace(REQUEST, num_tokens=16384, answer_tokens=1, needs_decode=False)
    held = node("a", hit=14720, **line(*[1024] * 11), **room)
    assert choose(held, node("b"), request=request).prefill == chosen


def test_a_chats_next_turn_stays_where_its_cache_is() -> None:
    request = replace(REQUEST, num_tokens=17536)
    plan = choose(node("a", **busy(4)), node("b", hit=16512, **busy(6)), node("c", **busy(4)), request=request)
    assert where(plan) == ("b", "b")
    assert plan.reason == "resumed"
    assert plan.prediction.computed_tokens == 1024


def test_a_queue_that_costs_more_than_computing_again_sends_a_chat_elsewhere() -> None:
    held = node("b", hit=16384, **line(*[16384] * 40))
    assert where(choose(node("a"), held, request=replace(REQUEST, num_tokens=24576))) == ("a", "a")


def test_blocks_without_a_checkpoint_save_no_computing() -> None:
    plan = choose(node("a", hit=16000, state=0), node("b", hit=8000))
    assert plan.prefill == "b"


def test_a_state_is_fetched_if_that_is_sooner_than_computing_it() -> None:
    request = replace(REQUEST, num_tokens=65536)
    holder = node("d", hit=64512, **busy(200), **line(*[32768] * 30))
    plan = choose(node("p", Role.PREFILL)._replace(may_decode=False), holder, request=request)
    assert (plan.prefill, plan.fetch_from) == ("p", "d")


def test_a_full_node_does_not_fetch_a_second_copy_that_an_empty_one_would() -> None:
    request = replace(REQUEST, num_tokens=17408)
    holder = node("b", hit=16384, **busy(4), **line(8000))
    chosen = [choose(node("a", empty_tokens=room), holder, request=request) for room in (1 << 20, 0)]
    assert [plan.fetch_from for plan in chosen] == ["b", None]
    assert chosen[1].prefill == "b", "it waits where its cache is"


def test_a_node_that_answers_may_fetch_what_a_busy_one_holds() -> None:
    holder = node("b", hit=16384, **busy(40), **line(*[16384] * 40))
    plan = choose(node("a"), holder, request=replace(REQUEST, num_tokens=17408))
    assert (where(plan), plan.fetch_from, plan.reason) == (("a", "a"), "b", "fetched")


def test_a_request_of_one_token_may_fetch_among_two_nodes() -> None:
    holder = node("b", hit=16384, **line(*[16384] * 40))
    request = replace(REQUEST, num_tokens=17408, needs_decode=False)
    plan = choose(node("a"), holder, request=request)
    assert (where(plan), plan.fetch_from) == (("a", None), "b")


def test_a_long_prompt_leaves_the_node_of_a_short_answer_alone() -> None:
    """A step of 88 ms among three tokens was 30 ms a token: elastic roles' p99 of TPOT was twice that of fixed ones."""
    request, home = replace(REQUEST, num_tokens=12288), {"hit": 4096, "num_coming": 1, "coming_tokens": 1000}
    long, short = (choose(node("a"), node("b", **home, shortness=1 / number), request=request) for number in (300, 40))
    assert (long.prefill, short.prefill) == ("b", "a")


def test_a_node_that_is_busy_with_prompts_gets_no_answer_in_a_moment_without() -> None:
    gap = replace(REQUEST, num_tokens=2048, objectives=Objectives(token_gap_s=0.01))
    decode = node("d", **busy(24), **line(16000))
    assert where(choose(node("p", Role.PREFILL), decode, request=gap)) == ("p", "p")
    assert where(choose(node("p", Role.PREFILL, prompt_share=1.0), decode, request=gap)) == ("p", "d")


def test_a_node_that_computes_prompts_for_half_of_the_time_takes_only_answers_that_no_other_keeps_the_gap_for() -> None:
    """With one answer its steps take 10 ms instead of 40: in a run on two H200s 7 % of the answers were there, and it
    made 5,117 steps in 80 s."""
    request = replace(REQUEST, num_tokens=17536, objectives=Objectives(token_gap_s=0.01))
    prompts = node("p", Role.PREFILL, hit=16384, prompt_share=0.5)
    crowded, full = (node("d", hit=16384, **busy(number), **line(1152, 1152)) for number in (56, 130))
    assert where(choose(prompts, crowded, request=request)) == ("p", "d")
    assert where(choose(prompts, full, request=request)) == ("p", "p")


@pytest.mark.parametrize(("gap_s", "computes"), [(0.01, "d"), (0.015, "p"), (0.03, "p"), (None, "p")])
def test_the_more_of_a_step_a_gap_leaves_the_more_prompts_cost_beside_answers(
    gap_s: float | None, computes: str
) -> None:
    """Whatever the gap a quarter was counted: at 15 ms the node of 48 answers computed most prompts, and its steps took
    10.6 ms instead of 4.8, while the one for prompts stood idle for a fifth of the time."""
    request = replace(REQUEST, num_tokens=17536, objectives=Objectives(token_gap_s=gap_s))
    prompts = node("p", Role.PREFILL, hit=16384, prompt_share=0.9, **line(*[16384] * 6))
    assert choose(prompts, node("d", hit=16384, **busy(36)), request=request).prefill == computes


def test_prompts_in_a_third_of_the_time_are_in_few_of_the_steps() -> None:
    """A step with a prompt takes forty times as long as one without: such a node has few stalls for an answer."""
    decode, request = node("d", **busy(60)), replace(REQUEST, num_tokens=2048, answer_tokens=300)
    assert where(choose(node("p", Role.PREFILL, prompt_share=0.3), decode, request=request)) == ("p", "p")
    assert where(choose(node("p", Role.PREFILL, prompt_share=1.0), decode, request=request)) == ("p", "d")


def test_a_node_that_had_few_prompts_lately_takes_an_answer_that_a_busy_one_leaves() -> None:
    decode, request = node("d", **busy(8)), replace(REQUEST, num_tokens=1024, answer_tokens=1000)
    chosen = [choose(node("p", Role.PREFILL, prompt_share=share), decode, request=request) for share in (0.1, 0.7)]
    assert [plan.decode for plan in chosen] == ["p", "d"]


@pytest.mark.parametrize(("uses", "chosen"), [((0.2, 0.2), "p"), ((0.2, 0.4), "d"), ((0.6, 0.0), "d")])
def test_no_node_is_kept_free_for_prompts_that_take_little_of_the_time(uses: tuple[float, float], chosen: str) -> None:
    """By the work of all nodes, wherever it is done."""
    at_p, at_d = ({"prompt_share": 0.3, "prompt_use": use} for use in uses)
    nodes = node("p", Role.PREFILL, **at_p, **busy(30, 1500)), node("d", **at_d, **busy(34, 1500))
    assert choose(*nodes, request=replace(REQUEST, num_tokens=1024, answer_tokens=1000)).decode == chosen


def test_prompts_that_are_done_soon_keep_a_short_answer_away_but_no_long_one() -> None:
    prompts = node("p", Role.PREFILL, prompt_share=0.2, **line(*[1000] * 10))
    chosen = [
        choose(prompts, node("d", **busy(20)), request=replace(REQUEST, num_tokens=1024, answer_tokens=number))
        for number in (30, 1000)
    ]
    assert [plan.decode for plan in chosen] == ["d", "p"]


@pytest.mark.parametrize("stretch", [1.0, 1.5])
@pytest.mark.parametrize(("share", "gap_s"), [(0.0, None), (0.3, None), (0.3, 0.01), (1.0, None), (1.0, 0.01)])
def test_an_answer_takes_the_steps_of_both_kinds_that_their_shares_of_the_time_hold(
    share: float, gap_s: float | None, stretch: float
) -> None:
    """With drafts, too, here wrong ones: each step gives a token."""
    request = replace(REQUEST, objectives=Objectives(token_gap_s=gap_s))
    met = meeting(request, node("p", Role.PREFILL, prompt_share=share, step_stretch=stretch, answer_pace=stretch))
    alone = node_pace(met.node, 1, REQUEST.num_tokens + 64, gap_s, met.work_s / REQUEST.num_tokens)
    with_prompts_s = alone.step_work_s + alone.overhead_s
    tokens_per_s = share / with_prompts_s + (1 - share) / alone.drafted_s
    assert answer_part(request, met).rest_s == pytest.approx(REQUEST.answer_tokens / tokens_per_s)


def test_a_short_answer_is_generated_away_from_long_prompts() -> None:
    holder, other = node("b", hit=1008, **line(8192)), node("a", **busy(40), empty_tokens=1 << 20)
    chosen = [choose(holder, other, request=replace(REQUEST, num_tokens=1024, answer_tokens=n)) for n in (300, 3)]
    assert [plan.decode for plan in chosen] == ["b", "a"]


def test_equal_nodes_take_turns() -> None:
    nodes = [node(name, Role.DECODE) for name in "abcd"]
    chosen = [choose(*nodes, request=replace(REQUEST, number=number)).prefill for number in range(8)]
    assert sorted(chosen) == sorted("abcd" * 2)


def test_one_of_many_equal_nodes_is_chosen_in_turn() -> None:
    nodes = [node("a")._replace(name=f"n{number:03}") for number in range(300)]
    chosen = {choose(*nodes, request=replace(REQUEST, number=number)).prefill for number in range(300)}
    assert len(chosen) == 300


def test_a_node_that_only_prefills_never_decodes() -> None:
    fixed = node("p", Role.PREFILL)._replace(may_decode=False)
    decoding = node("d", **busy(200))._replace(may_prefill=False)
    assert where(choose(fixed, decoding)) == ("p", "d")
    assert where(choose(fixed, decoding, request=replace(REQUEST, needs_decode=False))) == ("p", None)
    assert Predicted().choose(REQUEST, [fixed]) is None


def test_nodes_without_a_link_do_not_hand_over() -> None:
    alone = [node("p", Role.PREFILL)._replace(links={}), node("d", **busy(48))._replace(links={})]
    assert where(choose(*alone)) in {("p", "p"), ("d", "d")}


@pytest.mark.parametrize("gap_s", [0.006, 0.010])
def test_a_plan_within_the_token_gap_goes_before_a_cheaper_one(gap_s: float) -> None:
    request = replace(REQUEST, num_tokens=1024, objectives=Objectives(token_gap_s=gap_s))
    full = node("a", hit=1008, **busy(250))
    assert "a" not in where(choose(full, node("b", **busy(10)), request=request))


def test_a_plan_within_the_first_token_objective_goes_before_a_cheaper_one() -> None:
    request = replace(REQUEST, num_tokens=8192, objectives=Objectives(first_token_s=0.15))
    late = node("a", hit=4096, **line(2048, 4000, 2000))
    assert choose(late, node("b", **busy(40)), request=request).prefill == "b"


def test_a_handed_over_first_token_is_predicted_for_when_the_client_gets_it() -> None:
    """With the second one, where a gap is asked for: behind the transfer, half of a step and a step."""
    decoding = node("d", **busy(8), **line(16384))._replace(may_prefill=False)
    nodes, seconds = (node("p", Role.PREFILL)._replace(may_decode=False), decoding), {}
    for gap_s in (None, 0.05):
        plan = choose(*nodes, request=replace(REQUEST, objectives=Objectives(token_gap_s=gap_s)))
        assert where(plan) == ("p", "d")
        seconds[gap_s] = plan.prediction.first_token_s or 0.0
    step_s = nodes[1].costs.step_s
    assert LINK.latency_s + 1.5 * step_s < seconds[0.05] - seconds[None] < LINK.latency_s + 5 * step_s


def test_an_objective_is_kept_if_any_plan_keeps_it() -> None:
    dice = random.Random(15)
    names, kept = [f"n{number}" for number in range(7)], 0
    for number in range(150):
        nodes = []
        for name in names:
            load = busy(dice.choice((0, 5, 40, 120, 250))) | line(
                *dice.choices((200, 3000, 20000), k=dice.randrange(5))
            )
            links = {other: LINK for other in names if other != name}
            role = dice.choice((Role.PREFILL, Role.DECODE))
            nodes.append(node(name, role, hit=dice.choice((0, 0, 2048)), **load)._replace(links=links))
        objectives = Objectives(dice.choice((None, 0.05, 0.3)), dice.choice((None, 0.008, 0.015)))
        request = replace(REQUEST, number=number, num_tokens=4096, may_fetch=False, objectives=objectives)
        some_plan_keeps_it = any(
            choose(p._replace(may_decode=p is d), d._replace(may_prefill=p is d), request=request).relief_s == 0
            if p is not d
            else choose(p, request=request).relief_s == 0
            for p in nodes
            for d in nodes
        )
        assert (choose(*nodes, request=request).relief_s == 0) is some_plan_keeps_it
        kept += some_plan_keeps_it
    assert 50 < kept < 150


def test_cheap_nodes_beyond_an_objective_hide_no_dearer_one_within_it() -> None:
    request = replace(REQUEST, num_tokens=4096, objectives=Objectives(token_gap_s=0.008))
    cheap = [node(name, **busy(1, context=3_000_000))._replace(may_prefill=False) for name in "abc"]
    dear = node("d", **busy(150, context=512))._replace(may_prefill=False)
    sender = node("p", Role.PREFILL)._replace(may_decode=False)
    assert where(choose(*cheap, dear, sender, request=request)) == ("p", "d")


def test_a_missed_objective_says_when_there_would_be_room() -> None:
    late = node("a", **line(*[8192] * 20))
    plan = choose(late, request=replace(REQUEST, num_tokens=8192, objectives=Objectives(first_token_s=0.5)))
    assert plan.prediction.first_token_s is not None
    assert plan.relief_s == pytest.approx(plan.prediction.first_token_s - 0.5)
    full = replace(REQUEST, num_tokens=64, objectives=Objectives(token_gap_s=0.006))
    assert choose(node("a", **busy(10)), request=full).relief_s == 0
    relief_s = [choose(node("a", **busy(n)), request=full).relief_s for n in (60, 90, 120)]
    assert 0 < relief_s[0] < relief_s[1] < relief_s[2]
    never = replace(full, objectives=Objectives(token_gap_s=0.001))
    assert choose(node("a", **busy(10)), request=never).relief_s == math.inf


def test_answers_that_come_one_after_the_other_end_as_late_as_those_that_run_at_once() -> None:
    full = replace(REQUEST, num_tokens=64, objectives=Objectives(token_gap_s=0.006))
    costs = node("a").costs
    answer_s = full.answer_tokens * (costs.step_s + costs.decode_s * 60 + costs.context_s * busy(60)["context_tokens"])

    def coming(number: int) -> dict[str, object]:
        return busy(60) | {"num_coming": number, "coming_tokens": busy(number)["context_tokens"]}

    one_by_one, at_once, together = (
        choose(node("a", **load), request=full).relief_s
        for load in (coming(120) | {"coming_s": 120 * 2 * answer_s}, coming(30), coming(120))
    )
    assert one_by_one == pytest.approx(at_once)
    assert one_by_one < together


def test_a_request_counts_the_time_that_it_has_waited() -> None:
    request = replace(REQUEST, num_tokens=512, objectives=Objectives(first_token_s=1.0))
    assert choose(node("a"), request=request).relief_s == 0
    assert choose(node("a"), request=replace(request, waited_s=2.0)).relief_s > 1.0


def test_more_of_a_prompt_in_a_cache_never_makes_a_node_less_likely() -> None:
    for load in ({}, busy(20), line(512, 4096, 30000), busy(8) | line(100, 9000)):
        chosen = [
            choose(node("a", hit=hit, **load), node("b", hit=4096)).prefill == "a" for hit in range(0, 16384, 512)
        ]
        assert chosen == sorted(chosen)


def test_a_busier_node_is_never_more_likely() -> None:
    for kind in (lambda n: busy(n * 5), lambda n: line(*[2048] * n), lambda n: line(*[30000] * n)):
        chosen = [choose(node("a", hit=8192, **kind(n)), node("b")).prefill == "a" for n in range(0, 40)]
        assert chosen == sorted(chosen, reverse=True)
        assert chosen[0]


COEFFICIENTS = [each.name for each in fields(StepCosts)]


@pytest.mark.parametrize("gap_s", [None, 0.001, 0.02])
@pytest.mark.parametrize("kept", [*combinations(COEFFICIENTS, 1), *combinations(COEFFICIENTS, 3)])
def test_costs_that_were_measured_as_nothing_leave_times_that_are_numbers(
    kept: tuple[str, ...], gap_s: float | None
) -> None:
    costs = replace(StepCosts(), **{name: 0.0 for name in COEFFICIENTS if name not in kept})
    nodes = [node("a", hit=1600, **busy(20), **line(500)), node("b")]
    for num_answer in (0, 200):
        request = replace(REQUEST, answer_tokens=num_answer, objectives=Objectives(token_gap_s=gap_s))
        plan = choose(*(each._replace(costs=costs) for each in nodes), request=request)
        assert plan.prediction is not None
        assert 0 <= plan.prediction.first_token_s < 60


def test_a_long_prompt_is_predicted_later_where_short_ones_come_but_costs_no_more() -> None:
    tokens = [0.0] * 10 + [40_000.0]  # a second, of prompts of 1,024 to 2,047
    calm, overtaken = (node("d", recent_lengths=tuple(recent)) for recent in ((), tokens))
    plans = [choose(each) for each in (calm, overtaken)]
    times = [plan.prediction.first_token_s for plan in plans]
    assert times[1] > 1.5 * times[0]  # type: ignore[operator]
    cheap = node("c", **line(4096))
    assert {choose(each, cheap).prefill for each in (calm, overtaken)} == {"d"}
    wanted = replace(REQUEST, objectives=Objectives(first_token_s=1.2 * times[0]))  # type: ignore[operator]
    assert [choose(each, cheap, request=wanted).prefill for each in (calm, overtaken)] == ["d", "c"]


def test_room_that_is_held_for_a_prompt_costs_no_more_where_short_ones_overtake_it() -> None:
    tokens = (0.0,) * 10 + (40_000.0,)
    prices = []
    for recent in ((), tokens):
        nodes = [node("p", Role.PREFILL, recent_lengths=recent), node("d", **busy(48), free_tokens=1 << 14)]
        best = _best(REQUEST, [nodes[0]._replace(may_decode=False), nodes[1]._replace(may_prefill=False)])
        assert best is not None and best.answer is not None and best.answer.held_share > 0
        prices.append((best.seconds, best.prompt.first_token_s))
    assert prices[1][0] == pytest.approx(prices[0][0])
    assert prices[1][1] > prices[0][1]
