"""Clients beyond their share beside others: whose answers and prompts are in a step, and what it costs."""

import math
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.cache.checkpoints import ChunkSpan
from headrace.cache.hashing import PrefixHasher
from headrace.engine.load import shape_of
from headrace.engine.scheduler import Scheduler, after_turn
from headrace.engine.sequence import Job, Sequence
from headrace.engine.step_budget import TokenCost
from headrace.engine.yielding import LIGHT_SHARE
from headrace.step_costs import StepCosts
from tests.support.engine.driving import (
    GREEDY,
    assert_nothing_in_use,
    generate,
    request,
    resume_locally,
    serve,
    small_engine,
    submit,
)
from tests.support.engine.oracle import random_prompt

SLOW_ROWS = StepCosts(step_s=6e-3, decode_s=1e-3, context_s=0.0, chunk_s=7e-3, token_s=2e-4, depth_s=0.0)
CHEAP_ROWS = replace(SLOW_ROWS, decode_s=1e-5)
SCHEDULER = Scheduler(256, 64, 16, TokenCost.in_tokens(math.inf))


def answer(*, exceeds: bool, depth: int = 8) -> Sequence:
    return _sequence(4, depth, exceeds, 0)


def prompt(length: int, arrival: int = 0, *, exceeds: bool, num_computed: int = 0) -> Sequence:
    return _sequence(length, num_computed, exceeds, arrival)


def _sequence(length: int, num_computed: int, exceeds: bool, arrival: int) -> Sequence:
    asked = request([7] * length)
    made = Sequence(Job(asked, resume_locally, 16, 0.0, print), PrefixHasher(16), (arrival, 0))
    made.num_computed, made.exceeds = num_computed, exceeds
    return made


def scheduled(
    running: list[Sequence], costs: StepCosts = SLOW_ROWS, scheduler: Scheduler = SCHEDULER
) -> list[Sequence]:
    return [chunk.sequence for chunk in scheduler.schedule(running, costs)]


def test_beside_an_ordinary_answer_a_crowds_take_turns() -> None:
    crowd, ordinary = [answer(exceeds=True) for _ in range(12)], answer(exceeds=False)
    running, taken = [*crowd, ordinary], []
    for _ in range(6):
        chunks = SCHEDULER.schedule(running, SLOW_ROWS)
        assert ordinary in [chunk.sequence for chunk in chunks] and len(chunks) == 3
        taken += [chunk.sequence for chunk in chunks if chunk.sequence is not ordinary]
        running = after_turn(running, chunks)
    assert taken == crowd


def test_a_crowd_among_itself_decodes_all_its_answers() -> None:
    crowd = [answer(exceeds=True) for _ in range(12)]
    assert scheduled(crowd) == crowd


def test_answers_that_make_a_step_no_longer_yield_nothing() -> None:
    running = [*(answer(exceeds=True) for _ in range(12)), answer(exceeds=False)]
    assert scheduled(running, CHEAP_ROWS) == running


def test_answers_yield_where_steps_of_one_size_have_shown_no_cost_of_a_row() -> None:
    running = [*(answer(exceeds=True) for _ in range(12)), answer(exceeds=False)]
    flat = replace(SLOW_ROWS, step_s=20e-3, decode_s=0.0)
    assert scheduled(running, flat) == running
    assert len(scheduled(running, flat, replace(SCHEDULER, least_row=1 / 8))) == 3


@given(
    num_ordinary=st.integers(1, 30),
    depths=st.lists(st.integers(8, 40_000), min_size=1, max_size=30),
    decode_s=st.floats(0, 2e-3),
    context_s=st.floats(0, 1e-6),
)
@settings(max_examples=50, deadline=None)
def test_a_crowd_lengthens_a_step_by_a_third_or_by_one_answer(
    num_ordinary: int, depths: list[int], decode_s: float, context_s: float
) -> None:
    costs = replace(SLOW_ROWS, decode_s=decode_s, context_s=context_s)
    ordinary = [answer(exceeds=False, depth=100) for _ in range(num_ordinary)]
    chunks = SCHEDULER.schedule([answer(exceeds=True, depth=depth) for depth in depths] + ordinary, costs)
    alone_s = costs.seconds(shape_of(chunk for chunk in chunks if not chunk.sequence.exceeds))
    num_beyond = sum(chunk.sequence.exceeds for chunk in chunks)
    assert num_beyond >= 1 and len(chunks) - num_beyond == num_ordinary
    assert num_beyond == 1 or costs.seconds(shape_of(chunks)) <= alone_s / LIGHT_SHARE + num_ordinary * context_s + 1e-9


def test_beside_an_ordinary_prompt_a_crowds_add_a_third_to_the_step() -> None:
    crowd = [prompt(2000, i, exceeds=True) for i in range(4)]
    ordinary = prompt(96, 9, exceeds=False)
    chunks = SCHEDULER.schedule([*crowd, ordinary])
    assert [(chunk.sequence, chunk.span.end) for chunk in chunks] == [(ordinary, 96), (crowd[0], 32)]


def test_a_crowds_prompts_behind_an_ordinary_one_do_not_fill_its_step() -> None:
    ordinary, crowd = prompt(96, 0, exceeds=False), prompt(2000, 1, exceeds=True)
    chunks = SCHEDULER.schedule([ordinary, crowd])
    assert [(chunk.sequence, chunk.span.end) for chunk in chunks] == [(ordinary, 96), (crowd, 32)]


def test_a_crowds_prompts_alone_take_short_steps_however_deep() -> None:
    deep = Scheduler(256, 64, 16, TokenCost.in_tokens(5000))
    (chunk,) = deep.schedule([prompt(40_000, exceeds=True, num_computed=20_000)])
    assert chunk.span == ChunkSpan(20_000, 20_016)
    assert SCHEDULER.schedule([prompt(2000, exceeds=True)])[0].span == ChunkSpan(0, 64)


def test_a_crowds_prompt_computes_a_block_in_each_step_however_many_ordinary_ones_come() -> None:
    long, num_steps = prompt(1600, 0, exceeds=True), 0
    while long.is_prefilling:
        newcomers = [prompt(200, 1 + num_steps, exceeds=False) for _ in range(4)]
        for chunk in SCHEDULER.schedule([long, *newcomers]):
            chunk.sequence.num_computed = chunk.span.end
        num_steps += 1
    assert num_steps <= 1600 / 16


def test_answers_of_a_step_share_what_it_costs_without_any() -> None:
    chunks = SCHEDULER.schedule([answer(exceeds=False) for _ in range(3)], SLOW_ROWS)
    assert SCHEDULER.work(chunks, SLOW_ROWS) == [(2e-3 + 1e-3) / 2e-4] * 3
    assert SCHEDULER.work(chunks[:1], SLOW_ROWS) == [(6e-3 + 1e-3) / 2e-4]


def test_prompts_count_their_tokens_and_depths() -> None:
    chunks = SCHEDULER.schedule([prompt(40, exceeds=False)], SLOW_ROWS)
    assert SCHEDULER.work(chunks, SLOW_ROWS) == [40]


def test_an_engine_decodes_an_ordinary_answer_in_each_step_and_a_few_of_a_crowds_each_as_if_alone(
    tiny_checkpoint,
) -> None:
    path, asked = tiny_checkpoint("granite"), replace(GREEDY, max_tokens=30)
    prompts = [random_prompt(20, seed) for seed in range(9)]
    expected = [generate(small_engine(path), request(prompt, asked)).tokens for prompt in prompts]
    built = small_engine(path, overlap=False)
    crowd = [submit(built, request(prompt, asked, client=1)) for prompt in prompts[:8]]
    while any(len(run.tokens) < 5 for run in crowd):
        built.engine.admit()
        built.engine.step()
    ordinary = submit(built, request(prompts[8], asked, client=2))
    while not ordinary.tokens:
        built.engine.admit()
        built.engine.step()
    for _ in range(8):
        before = len(ordinary.tokens), [len(run.tokens) for run in crowd]
        built.engine.step()
        assert len(ordinary.tokens) == before[0] + 1
        assert 1 <= sum(len(run.tokens) for run in crowd) - sum(before[1]) <= 3
    assert max(len(run.tokens) for run in crowd) - min(len(run.tokens) for run in crowd) <= 1, "they take turns"
    serve(built, *crowd, ordinary)
    assert [run.tokens for run in (*crowd, ordinary)] == expected
    assert_nothing_in_use(built)
