"""Clients beyond their share beside others: whose answers and prompts are in a step, and what it costs."""

import math
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.cache.checkpoints import ChunkSpan
from headrace.cache.hashing import PrefixHasher
from headrace.engine.build import build_engine
from headrace.engine.scheduling.scheduler import Scheduler, after_turn
from headrace.engine.scheduling.step_budget import TokenCost
from headrace.engine.scheduling.yielding import BETWEEN_TURNS, LIGHT_SHARE, NOTHING_YIELDED, TURN_STEPS
from headrace.engine.sequence import Job, Sequence
from headrace.step_costs import StepCosts, StepShape
from tests.support.engine.driving import (
    GREEDY,
    SMALL,
    assert_nothing_in_use,
    generate,
    request,
    resume_locally,
    serve,
    small_engine,
    submit,
)
from tests.support.engine.fake_device import FakeDevice
from tests.support.engine.oracle import random_prompt

SLOW_ROWS = StepCosts(step_s=6e-3, decode_s=1e-3, context_s=0.0, chunk_s=7e-3, token_s=2e-4, depth_s=0.0)
UNEVEN = replace(SLOW_ROWS, step_s=6.1e-3)
TURN_ROWS = 56  # of these fit into a third of the time of TURN_STEPS steps
CHEAP_ROWS = replace(SLOW_ROWS, decode_s=1e-5)
SCHEDULER = Scheduler(256, 64, 16, TokenCost.in_tokens(math.inf))


def answer(*, is_over_share: bool, depth: int = 8) -> Sequence:
    return _sequence(4, depth, is_over_share, 0)


def prompt(length: int, arrival: int = 0, *, is_over_share: bool, num_computed: int = 0) -> Sequence:
    return _sequence(length, num_computed, is_over_share, arrival)


def _sequence(length: int, num_computed: int, is_over_share: bool, arrival: int) -> Sequence:
    asked = request([7] * length)
    made = Sequence(Job(asked, resume_locally, 16, 0.0, print), PrefixHasher(16), (arrival, 0))
    made.num_computed, made.is_over_share = num_computed, is_over_share
    return made


def scheduled(
    running: list[Sequence], costs: StepCosts = SLOW_ROWS, scheduler: Scheduler = SCHEDULER
) -> list[Sequence]:
    return [chunk.sequence for chunk in scheduler.schedule(running, costs)]


def steps(running: list[Sequence], count: int, costs: StepCosts = SLOW_ROWS) -> list[list[Sequence]]:
    """So many steps in a row, as an engine makes them."""
    made, yielded = [], NOTHING_YIELDED
    for _ in range(count):
        chunks = SCHEDULER.schedule(running, costs, yielded)
        yielded = yielded.after(chunks, costs, SCHEDULER.least_row)
        running = after_turn(running, chunks)
        made.append([chunk.sequence for chunk in chunks])
    return made


def test_beside_an_ordinary_answer_a_crowds_have_one_step_of_twenty_four() -> None:
    crowd, ordinary = [answer(is_over_share=True) for _ in range(12)], answer(is_over_share=False)
    made = steps([*crowd, ordinary], 2 * TURN_STEPS)
    assert all(ordinary in step for step in made)
    assert [number for number, step in enumerate(made, 1) if len(step) > 1] == [TURN_STEPS, 2 * TURN_STEPS]
    assert {*made[TURN_STEPS - 1]} == {*made[-1]} == {ordinary, *crowd}


def test_a_turn_takes_a_third_of_the_time_that_was_left_to_others_and_the_rest_have_the_next() -> None:
    crowd, ordinary = [answer(is_over_share=True) for _ in range(62)], answer(is_over_share=False)
    first, second = (step for step in steps([*crowd, ordinary], 2 * TURN_STEPS, UNEVEN) if len(step) > 1)
    assert len(first) == len(second) == 1 + TURN_ROWS
    assert {*first, *second} == {ordinary, *crowd}


def test_each_turn_takes_one_answer_whatever_it_costs() -> None:
    deep = replace(SLOW_ROWS, context_s=1e-4)
    crowd, ordinary = [answer(is_over_share=True, depth=40_000) for _ in range(3)], answer(is_over_share=False)
    made = steps([*crowd, ordinary], 3 * TURN_STEPS, deep)
    assert [it for step in made for it in step if it is not ordinary] == crowd


def test_cheap_answers_of_a_crowd_do_not_wait_for_its_turn_nor_behind_a_costly_one() -> None:
    costly, cheap = answer(is_over_share=True, depth=40_000), [answer(is_over_share=True) for _ in range(3)]
    running = [costly, *cheap, answer(is_over_share=False)]
    assert scheduled(running, replace(CHEAP_ROWS, context_s=1e-6)) == running[1:]


def test_a_crowd_that_comes_late_has_one_turn_not_all_that_it_missed() -> None:
    ordinary, yielded = answer(is_over_share=False), NOTHING_YIELDED
    for _ in range(100 * TURN_STEPS):
        yielded = yielded.after(SCHEDULER.schedule([ordinary], UNEVEN, yielded), UNEVEN, 0.0)
    crowd = [answer(is_over_share=True) for _ in range(63)]
    assert len(SCHEDULER.schedule([ordinary, *crowd], UNEVEN, yielded)) == 1 + TURN_ROWS


def test_a_step_without_ordinary_answers_is_a_turn() -> None:
    crowd, ordinary, yielded = (
        [answer(is_over_share=True) for _ in range(12)],
        answer(is_over_share=False),
        NOTHING_YIELDED,
    )
    for running in [[ordinary, *crowd]] * (TURN_STEPS - 1) + [crowd]:
        yielded = yielded.after(SCHEDULER.schedule(running, SLOW_ROWS, yielded), SLOW_ROWS, 0.0)
    assert [chunk.sequence for chunk in SCHEDULER.schedule([ordinary, *crowd], SLOW_ROWS, yielded)] == [ordinary]


def test_a_crowd_among_itself_decodes_all_its_answers() -> None:
    crowd = [answer(is_over_share=True) for _ in range(12)]
    assert scheduled(crowd) == crowd


def test_answers_that_make_a_step_no_longer_yield_nothing() -> None:
    running = [*(answer(is_over_share=True) for _ in range(12)), answer(is_over_share=False)]
    assert scheduled(running, CHEAP_ROWS) == running


def test_answers_yield_where_steps_of_one_size_have_shown_no_cost_of_a_row() -> None:
    running = [*(answer(is_over_share=True) for _ in range(12)), answer(is_over_share=False)]
    flat = replace(SLOW_ROWS, step_s=20e-3, decode_s=0.0)
    assert scheduled(running, flat) == running
    assert len(scheduled(running, flat, replace(SCHEDULER, least_row=1 / 20))) == 3


@given(
    num_ordinary=st.integers(1, 30),
    depths=st.lists(st.integers(8, 40_000), min_size=1, max_size=30),
    decode_s=st.floats(0, 2e-3),
    context_s=st.floats(0, 1e-6),
)
@settings(max_examples=50, deadline=None)
def test_a_crowd_takes_a_quarter_of_the_time_at_most_or_an_answer_a_turn(
    num_ordinary: int, depths: list[int], decode_s: float, context_s: float
) -> None:
    costs = replace(SLOW_ROWS, decode_s=decode_s, context_s=context_s)
    ordinary = [answer(is_over_share=False, depth=100) for _ in range(num_ordinary)]
    made = steps([answer(is_over_share=True, depth=depth) for depth in depths] + ordinary, 2 * TURN_STEPS, costs)
    alone_s = costs.decode_part_s(StepShape(num_ordinary, 100 * num_ordinary))
    for step in made:
        assert len([it for it in step if not it.is_over_share]) == num_ordinary
    added_s = [
        costs.decode_part_s(StepShape(len(step), sum(it.num_computed for it in step))) - alone_s for step in made
    ]
    assert max(added_s[: TURN_STEPS - 1]) <= alone_s * BETWEEN_TURNS + 1e-9
    for turn in (TURN_STEPS, 2 * TURN_STEPS):
        assert len(made[turn - 1]) > num_ordinary
        most_s = TURN_STEPS * (1 / LIGHT_SHARE - 1) * alone_s
        assert len(made[turn - 1]) == num_ordinary + 1 or sum(added_s[turn - TURN_STEPS : turn]) <= most_s + 1e-9


def test_beside_an_ordinary_prompt_a_crowds_add_a_third_to_the_step() -> None:
    crowd = [prompt(2000, i, is_over_share=True) for i in range(4)]
    ordinary = prompt(96, 9, is_over_share=False)
    chunks = SCHEDULER.schedule([*crowd, ordinary])
    assert [(chunk.sequence, chunk.span.end) for chunk in chunks] == [(ordinary, 96), (crowd[0], 32)]


def test_a_crowds_prompts_behind_an_ordinary_one_do_not_fill_its_step() -> None:
    ordinary, crowd = prompt(96, 0, is_over_share=False), prompt(2000, 1, is_over_share=True)
    chunks = SCHEDULER.schedule([ordinary, crowd])
    assert [(chunk.sequence, chunk.span.end) for chunk in chunks] == [(ordinary, 96), (crowd, 32)]


def test_a_crowds_prompts_alone_take_short_steps_however_deep() -> None:
    deep = Scheduler(256, 64, 16, TokenCost.in_tokens(5000))
    (chunk,) = deep.schedule([prompt(40_000, is_over_share=True, num_computed=20_000)])
    assert chunk.span == ChunkSpan(20_000, 20_016)
    assert SCHEDULER.schedule([prompt(2000, is_over_share=True)])[0].span == ChunkSpan(0, 64)


def test_a_crowds_prompt_computes_a_block_in_each_step_however_many_ordinary_ones_come() -> None:
    long, num_steps = prompt(1600, 0, is_over_share=True), 0
    while long.is_prefilling:
        newcomers = [prompt(200, 1 + num_steps, is_over_share=False) for _ in range(4)]
        for chunk in SCHEDULER.schedule([long, *newcomers]):
            chunk.sequence.num_computed = chunk.span.end
        num_steps += 1
    assert num_steps <= 1600 / 16


def test_answers_of_a_step_share_what_it_costs_without_any() -> None:
    chunks = SCHEDULER.schedule([answer(is_over_share=False) for _ in range(3)], SLOW_ROWS)
    assert SCHEDULER.work(chunks, SLOW_ROWS) == [(2e-3 + 1e-3) / 2e-4] * 3
    assert SCHEDULER.work(chunks[:1], SLOW_ROWS) == [(6e-3 + 1e-3) / 2e-4]


def test_an_answer_counts_as_a_whole_step_at_the_most() -> None:
    chunks = SCHEDULER.schedule([answer(is_over_share=False, depth=20_000) for _ in range(3)], SLOW_ROWS)
    for costs in (replace(SLOW_ROWS, token_s=1e-12), replace(SLOW_ROWS, step_s=0.0, decode_s=0.0, context_s=1e-6)):
        assert SCHEDULER.work(chunks, replace(costs, token_s=1e-310)) == [256] * 3
        assert all(0 < work <= 256 for work in SCHEDULER.work(chunks, costs))


def test_prompts_count_their_tokens_and_depths() -> None:
    chunks = SCHEDULER.schedule([prompt(40, is_over_share=False)], SLOW_ROWS)
    assert SCHEDULER.work(chunks, SLOW_ROWS) == [40]


def test_an_engine_decodes_an_ordinary_answer_in_each_step_and_a_crowds_in_one_of_twenty_four(
    tiny_checkpoint,
) -> None:
    path, asked = tiny_checkpoint("granite"), replace(GREEDY, max_tokens=90)
    prompts = [random_prompt(20, seed) for seed in range(9)]
    expected = [generate(small_engine(path), request(prompt, asked)).tokens for prompt in prompts]
    # What a step costs here is known: on a busy machine a share of the clients' measured work is anybody's guess.
    device = FakeDevice(SLOW_ROWS)
    built = build_engine(str(path), replace(SMALL, overlap=False), device.clock)
    device.compute_for(built)
    crowd = [submit(built, request(prompt, asked, client=1)) for prompt in prompts[:8]]
    while any(len(run.tokens) < 60 for run in crowd):
        built.engine.admit()
        built.engine.step()
    ordinary = submit(built, request(prompts[8], asked, client=2))
    while not ordinary.tokens:
        built.engine.admit()
        built.engine.step()
    turns = []
    for number in range(TURN_STEPS):
        before = len(ordinary.tokens), sum(len(run.tokens) for run in crowd)
        built.engine.step()
        assert len(ordinary.tokens) == before[0] + 1
        if sum(len(run.tokens) for run in crowd) > before[1]:
            turns.append(number)
    assert len(turns) == 1
    serve(built, *crowd, ordinary)
    assert [run.tokens for run in (*crowd, ordinary)] == expected
    assert_nothing_in_use(built)
