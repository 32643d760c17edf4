import math
from bisect import bisect_left
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.cache.checkpoints import ChunkSpan
from headrace.cache.hashing import PrefixHasher
from headrace.cache.publishing import ScheduledChunk
from headrace.engine.scheduling.cost_fit import CostFit
from headrace.engine.scheduling.load import step_shape
from headrace.engine.scheduling.scheduler import LatestArrival, Scheduler, after_turn
from headrace.engine.scheduling.step_budget import TokenCost
from headrace.engine.sequence import Job, Sequence
from headrace.step_costs import KEPT_SHARE, MOST_LATE_SHARE, StepCosts, StepShape
from tests.support.engine.driving import request, resume_locally

FLAT = TokenCost.in_tokens(math.inf)
SCHEDULER = Scheduler(max_step_tokens=64, max_running=4, block_size=16, token_cost=FLAT)


def sequence(prompt_length: int, num_computed: int = 0, arrival: int = 0) -> Sequence:
    asked = request([7] * prompt_length)
    made = Sequence(Job(asked, resume_locally, 16, 0.0, print), PrefixHasher(16), (arrival, 0))
    made.num_computed = num_computed
    return made


def run_steps(running: list[Sequence], num_steps: int, scheduler: Scheduler = SCHEDULER) -> dict[Sequence, list[int]]:
    """The steps in which each took part."""
    steps: dict[Sequence, list[int]] = {sequence: [] for sequence in running}
    for step in range(num_steps):
        chunks = scheduler.schedule(running)
        for chunk in chunks:
            chunk.sequence.num_computed = chunk.span.end
            steps[chunk.sequence].append(step)
        running = after_turn(running, chunks)
    return steps


def spans(*running: Sequence) -> list[tuple[int, int, int]]:
    return [(running.index(p.sequence), p.span.start, p.span.end) for p in SCHEDULER.schedule(running)]


def test_nothing_runs_when_nothing_is_ready() -> None:
    assert SCHEDULER.schedule([]) == []


def test_decodes_go_before_an_earlier_prefill_and_cost_one_token_each() -> None:
    prefill, decode = sequence(1000), sequence(10, num_computed=12)
    assert spans(prefill, decode) == [(1, 12, 13), (0, 0, 48)]


def test_a_chunk_ends_on_a_block_boundary_unless_it_ends_the_prompt() -> None:
    assert spans(sequence(60)) == [(0, 0, 60)]
    assert spans(sequence(100)) == [(0, 0, 64)]
    assert spans(sequence(100, num_computed=64)) == [(0, 64, 100)]
    assert spans(sequence(1000, num_computed=8)) == [(0, 8, 64)]


def test_a_budget_below_one_block_still_moves_a_prompt() -> None:
    small = Scheduler(max_step_tokens=5, max_running=4, block_size=16, token_cost=FLAT)
    assert small.schedule([sequence(100)])[0].span == ChunkSpan(0, 5)


def test_prefills_share_the_budget_in_order_of_arrival() -> None:
    assert spans(sequence(30), sequence(30), sequence(30)) == [(0, 0, 30), (1, 0, 30), (2, 0, 4)]


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    long, short = sequence(8000, arrival=1), sequence(5, arrival=2)
    chunks = SCHEDULER.schedule([long, short])
    assert [(chunk.sequence, chunk.span.end) for chunk in chunks] == [(short, 5), (long, 48)]


def test_the_shortest_prompts_get_up_to_two_thirds_of_a_step() -> None:
    long, *shorter = [sequence(left, arrival=i) for i, left in enumerate((8000, 400, 20, 7))]
    chunks = SCHEDULER.schedule([long, *shorter])
    assert [(chunk.sequence, chunk.span.end) for chunk in chunks] == [
        (shorter[2], 7),
        (shorter[1], 20),
        (shorter[0], 15),
        (long, 16),
    ]


def test_prompts_of_one_length_are_computed_one_after_another() -> None:
    prompts = [sequence(640, arrival=i) for i in range(3)]
    steps = run_steps(prompts, 24)
    starts = [taken[0] for taken in steps.values()]
    assert starts == [0, 10, 10]  # the second leaves less than a block of its steps to the third
    assert prompts[1].num_computed >= 640 > prompts[2].num_computed


def test_a_long_prompt_is_done_in_time_however_many_short_ones_come() -> None:
    long, num_steps = sequence(3200, arrival=0), 0
    running = [long]
    while long.is_prefilling:
        running = [*(s for s in running if s.is_prefilling), *(sequence(40, arrival=1 + num_steps) for _ in range(3))]
        for chunk in SCHEDULER.schedule(running):
            chunk.sequence.num_computed = chunk.span.end
        num_steps += 1
    assert num_steps <= 3200 / 16, "a third of a step, up to a block's end"


def test_a_prompt_in_the_middle_is_done_in_time_too() -> None:
    before, middle = [sequence(1000, arrival=i) for i in range(3)], sequence(500, arrival=3)
    running, num_steps = [*before, middle], 0
    while middle.is_prefilling:
        running = [*(s for s in running if s.is_prefilling), sequence(40, arrival=10 + num_steps)]
        for chunk in SCHEDULER.schedule(running):
            chunk.sequence.num_computed = chunk.span.end
        num_steps += 1
    assert num_steps <= 3 * 3500 / 64 + 4


DEEP = Scheduler(max_step_tokens=256, max_running=64, block_size=16, token_cost=TokenCost.in_tokens(5000))


def cost_of(chunks: list[ScheduledChunk[Sequence]]) -> float:
    return sum(DEEP.token_cost.of(chunk.span) for chunk in chunks)


def test_a_deep_chunk_beside_a_short_prompt_costs_no_more_than_a_step_at_depth_zero() -> None:
    long, short = sequence(40_000, num_computed=30_000, arrival=1), sequence(100, arrival=2)
    chunks = DEEP.schedule([long, short])
    assert [(chunk.sequence, chunk.span) for chunk in chunks] == [
        (short, ChunkSpan(0, 100)),
        (long, ChunkSpan(30_000, 30_016)),
    ]
    assert cost_of(chunks) <= 256 * 1.03


def test_a_deep_chunk_beside_decodes_costs_no_more_either() -> None:
    long, decodes = sequence(40_000, num_computed=20_000), [sequence(4000, num_computed=4000) for _ in range(20)]
    chunks = DEEP.schedule([long, *decodes])
    assert [chunk.sequence for chunk in chunks] == [*decodes, long]
    assert 0.75 * 256 < cost_of(chunks) <= 256 * 1.03


def test_a_lone_prompt_takes_whole_steps_however_deep() -> None:
    long = sequence(32_000)
    steps = run_steps([long], 125, DEEP)
    assert steps[long] == list(range(125)) and not long.is_prefilling


def test_prompts_of_one_length_take_as_few_steps_as_their_tokens_need() -> None:
    prompts, num_steps = [sequence(3200, arrival=i) for i in range(4)], 0
    while waiting := [prompt for prompt in prompts if prompt.is_prefilling]:
        for chunk in DEEP.schedule(waiting):
            chunk.sequence.num_computed = chunk.span.end
        num_steps += 1
    assert num_steps == 4 * 3200 // 256


def test_a_short_prompt_that_arrived_first_does_not_wait_for_deep_tokens_of_another() -> None:
    short, long = sequence(300, num_computed=256, arrival=1), sequence(32_000, num_computed=15_312, arrival=2)
    chunks = DEEP.schedule([short, long])
    assert [(chunk.sequence, chunk.span) for chunk in chunks] == [
        (short, ChunkSpan(256, 300)),
        (long, ChunkSpan(15_312, 15_360)),
    ]
    assert cost_of(chunks) < 1.1 * 256


def test_decodes_at_any_depth_leave_a_quarter_of_the_step_to_prompts() -> None:
    decodes = [sequence(30_000, num_computed=30_000) for _ in range(60)]
    long, short = sequence(1000, arrival=1), sequence(20, arrival=2)
    chunks = DEEP.schedule([*decodes, long, short])
    assert cost_of(chunks[:60]) > 256
    assert [(chunk.sequence, chunk.span.end) for chunk in chunks[60:]] == [(short, 20), (long, 32)]


def test_the_first_prompt_computes_a_block_where_even_that_costs_too_much() -> None:
    long, short = sequence(200_000, num_computed=160_000, arrival=1), sequence(200, arrival=2)
    assert DEEP.schedule([long, short])[-1].span == ChunkSpan(160_000, 160_016)


def test_a_deep_prompt_is_done_in_time_however_many_short_ones_come() -> None:
    long, num_steps = sequence(8000, arrival=0), 0
    running = [long]
    while long.is_prefilling:
        running = [*(s for s in running if s.is_prefilling), *(sequence(40, arrival=1 + num_steps) for _ in range(4))]
        for chunk in DEEP.schedule(running):
            chunk.sequence.num_computed = chunk.span.end
        num_steps += 1
    assert num_steps <= 4 * DEEP.token_cost.of(ChunkSpan(0, 8000)) / 256 + 1


def of_client(work: float, made: Sequence) -> Sequence:
    made.client_work = work
    return made


def test_a_prompt_of_a_lighter_client_goes_first_however_many_came_before() -> None:
    heavy = [of_client(50_000, sequence(300, arrival=i)) for i in range(6)]
    light = of_client(200, sequence(180, arrival=9))
    chunks = DEEP.schedule([*heavy, light])
    assert [chunk.sequence for chunk in chunks[:2]] == [light, heavy[0]]
    assert chunks[0].span.end == 180


def test_short_prompts_of_a_heavy_client_come_after_longer_ones_of_a_lighter_client() -> None:
    heavy = of_client(50_000, sequence(32_000, arrival=0))
    short, light = of_client(50_000, sequence(10, arrival=1)), of_client(0, sequence(100, arrival=2))
    assert [chunk.sequence for chunk in DEEP.schedule([heavy, short, light])] == [light, short, heavy]


def test_clients_of_about_the_same_work_go_by_arrival() -> None:
    first, second = of_client(5000, sequence(300, arrival=1)), of_client(4500, sequence(300, arrival=2))
    assert DEEP.schedule([first, second])[0].sequence is first


def test_a_heavy_clients_prompt_is_done_in_time_however_many_come_from_light_ones() -> None:
    heavy, num_steps = of_client(50_000, sequence(3200, arrival=0)), 0
    running = [heavy]
    while heavy.is_prefilling:
        running = [*(s for s in running if s.is_prefilling), *(sequence(90, arrival=1 + num_steps) for _ in range(4))]
        for chunk in DEEP.schedule(running):
            chunk.sequence.num_computed = chunk.span.end
        num_steps += 1
    assert num_steps <= 8 * DEEP.token_cost.of(ChunkSpan(0, 3200)) / 256 + 1


COSTS = StepCosts(step_s=2e-3, decode_s=30e-6, context_s=2e-9, chunk_s=1e-3, token_s=10e-6, depth_s=1e-9)


def with_gap(made: Sequence, token_gap_s: float | None) -> Sequence:
    made.job = replace(made.job, request=replace(made.job.request, token_gap_s=token_gap_s))
    return made


def predicted_s(chunks: list[ScheduledChunk[Sequence]]) -> float:
    return COSTS.seconds(step_shape(chunks))


lengths, ages = st.integers(1, 5_000), st.integers(0, 100)


@given(
    gaps=st.lists(st.none() | st.floats(1e-3, 50e-3), min_size=1, max_size=20),
    prompts=st.lists(st.tuples(lengths, st.floats(0, 0.99), ages), min_size=1, max_size=8),
)
@settings(max_examples=50, deadline=None)
def test_a_step_keeps_the_smallest_gap_of_its_decodes_or_has_one_block_of_prompts(
    gaps: list[float | None], prompts: list[tuple[int, float, int]]
) -> None:
    decodes = [with_gap(sequence(4, num_computed=500 * i + 4), gap) for i, gap in enumerate(gaps)]
    prefills = [sequence(length, num_computed=int(length * share), arrival=age) for length, share, age in prompts]
    scheduler = replace(DEEP, max_step_tokens=1024)
    chunks = scheduler.schedule([*decodes, *prefills], COSTS)
    first = min(prefills, key=lambda s: s.arrival)
    assert first in [chunk.sequence for chunk in chunks]
    wanted = [gap for gap in gaps if gap is not None]
    if not wanted:
        unbound = scheduler.schedule([*decodes, *prefills])
        assert [(c.sequence, c.span) for c in chunks] == [(c.sequence, c.span) for c in unbound]
        return
    block = ScheduledChunk(first, ChunkSpan(first.num_computed, first.num_computed + 16))
    least_s = predicted_s([*chunks[: len(decodes)], block])
    assert predicted_s(chunks) <= max(KEPT_SHARE * min(wanted), least_s) * 1.001


def test_a_gap_leaves_room_for_as_much_of_a_prompt_as_it_can() -> None:
    scheduler = replace(DEEP, max_step_tokens=1024)
    decodes = [with_gap(sequence(4, num_computed=1000), gap) for gap in (None, 12e-3, 8e-3)]
    for late_s, left_s in ((0.0, 0.0), (1e-3, 1e-3), (1.0, MOST_LATE_SHARE * 8e-3)):
        kept_s = KEPT_SHARE * 8e-3 - left_s
        chunks = scheduler.schedule([*decodes, sequence(8000)], replace(COSTS, late_s=late_s))
        assert 0.93 * kept_s < predicted_s(chunks) <= kept_s
    loose = [with_gap(decode, 1.0) for decode in decodes]
    assert scheduler.schedule([*loose, sequence(8000)], COSTS)[-1].span.end == 1008, "memory still bounds it"


def test_nobody_waits_for_a_gap_where_nothing_decodes() -> None:
    scheduler = replace(DEEP, max_step_tokens=1024)
    (chunk,) = scheduler.schedule([with_gap(sequence(8000), 1e-3)], COSTS)
    assert chunk.span == ChunkSpan(0, 1024)


def test_prompts_are_done_under_a_gap_that_cannot_be_kept() -> None:
    decode = with_gap(sequence(4, num_computed=4), 1e-6)
    long, running, num_steps = sequence(1600, arrival=0), [decode], 0
    while long.is_prefilling:
        running = [decode, long, sequence(40, arrival=1 + num_steps)]
        chunks = DEEP.schedule(running, COSTS)
        assert chunks[0].sequence is decode
        for chunk in chunks[1:]:
            chunk.sequence.num_computed = chunk.span.end
        num_steps += 1
    assert num_steps <= 4 * 1600 / 16, "a third of a block, and what is left at a block's end"


def test_a_short_prompt_shares_the_little_that_a_gap_leaves() -> None:
    decode = with_gap(sequence(4, num_computed=4), 5e-3)
    long, short = sequence(20_000, arrival=0), sequence(60, arrival=1)
    chunks = DEEP.schedule([decode, long, short], COSTS)
    assert [chunk.sequence for chunk in chunks] == [decode, short, long]
    assert chunks[1].span.end == 60


def test_a_budget_for_one_token_goes_to_the_prompt_that_arrived_first() -> None:
    one = Scheduler(max_step_tokens=1, max_running=1, block_size=16, token_cost=FLAT)
    long, short = sequence(100, arrival=1), sequence(5, arrival=2)
    assert [chunk.sequence for chunk in one.schedule([long, short])] == [long]


def test_never_more_sequences_than_max_running() -> None:
    decodes = [sequence(4, num_computed=4) for _ in range(9)]
    assert len(SCHEDULER.schedule(decodes)) == 4
    assert len(SCHEDULER.schedule([sequence(1) for _ in range(9)])) == 4


def test_more_decodes_than_a_step_takes_take_turns() -> None:
    decodes = [sequence(4, num_computed=4) for _ in range(9)]
    steps = run_steps(decodes, 9)
    assert [len(taken) for taken in steps.values()] == [4] * 9
    assert [steps[decode][0] for decode in decodes] == [0, 0, 0, 0, 1, 1, 1, 1, 2]


def test_a_prefill_has_its_turn_beside_more_decodes_than_a_step_takes() -> None:
    decodes, prefill = [sequence(4, num_computed=4) for _ in range(9)], sequence(1000)
    steps = run_steps([*decodes, prefill], 10)
    assert len(steps[prefill]) == 4 and prefill.num_computed == 4 * 48
    assert all(len(steps[decode]) == 4 for decode in decodes)


def test_one_place_goes_round_decodes_and_prefills() -> None:
    one = Scheduler(max_step_tokens=16, max_running=1, block_size=16, token_cost=FLAT)
    decodes = [sequence(4, num_computed=4) for _ in range(2)]
    prefills = [sequence(32, arrival=1), sequence(16, arrival=2)]
    steps = run_steps([*decodes, *prefills], 9, one)
    assert [steps[decode] for decode in decodes] == [[0, 3, 7], [1, 4, 8]]
    # The second prompt has waited since the start: it is next once it heads the line.
    assert [steps[prefill] for prefill in prefills] == [[2, 5], [6]]


def test_prefills_behind_the_first_take_only_places_that_are_left() -> None:
    decodes, prefills = [sequence(4, num_computed=4) for _ in range(3)], [sequence(8) for _ in range(3)]
    chunks = SCHEDULER.schedule([*prefills, *decodes])
    assert [chunk.sequence for chunk in chunks] == [*decodes, prefills[0]]


def test_a_preempted_sequence_prefills_its_answer_too() -> None:
    preempted = sequence(20, num_computed=40)
    preempted.tokens.extend([8] * 21)
    preempted.start_over()
    assert spans(preempted) == [(0, 0, 41)]
    assert preempted.prompt_length == 20


def test_the_latest_arrival_is_preempted() -> None:
    running = [sequence(1, arrival=arrival) for arrival in (3, 9, 1)]
    assert LatestArrival().victim(running) is running[1]


def test_a_step_under_a_gap_takes_the_rows_to_which_its_pass_is_padded() -> None:
    decode, loose = (with_gap(sequence(4, num_computed=4), gap) for gap in (5e-3, None))
    long, ending, other = sequence(20_000, arrival=0), sequence(100, arrival=0), sequence(20_000, arrival=1)
    plain = replace(DEEP, max_step_tokens=1024)
    padded = replace(plain, pass_rows=(64, 256))

    def ends(scheduler: Scheduler, *running: Sequence) -> list[int]:
        return [chunk.span.end for chunk in scheduler.schedule(running, COSTS)]

    assert ends(plain, decode, long, other) == [5, 160, 10]
    assert ends(padded, decode, long, other) == [5, 256]
    assert ends(padded, decode, ending, other) == [5, 100, 144]
    assert ends(replace(padded, max_step_tokens=200), decode, long) == [5, 192], "memory still bounds it"
    assert ends(replace(padded, pass_rows=(64,)), decode, long) == ends(plain, decode, long)
    assert ends(padded, loose, long) == ends(plain, loose, long)


def test_full_passes_keep_the_gap_that_their_costs_are_fitted_to() -> None:
    """A device that computes padding as it does tokens, as an H100 beside 35 decodes does."""
    pass_s = {64: 8.7e-3, 128: 9.1e-3, 192: 9.25e-3, 256: 9.85e-3, 320: 10.4e-3, 384: 11e-3}
    sizes = tuple(pass_s)

    def computed_a_second(pass_rows: tuple[int, ...]) -> float:
        fit = CostFit(StepCosts())
        scheduler = replace(DEEP, max_step_tokens=512, pass_rows=pass_rows)
        took_s, num_tokens = [], 0
        for step in range(2000):
            decodes = [with_gap(sequence(4, num_computed=20_000), 10e-3) for _ in range(35)]
            if step % 10 == 0:
                fit.observe(StepShape(35, 700_000), 6.3e-3)
            chunks = scheduler.schedule([*decodes, sequence(20_000, num_computed=step % 20 * 512)], fit.costs)
            tokens = sum(chunk.span.end - chunk.span.start for chunk in chunks[35:])
            seconds = pass_s[sizes[bisect_left(sizes, tokens)]]
            fit.observe(step_shape(chunks), seconds)
            if step >= 500:
                took_s.append(seconds)
                num_tokens += tokens
        assert sorted(took_s)[int(0.99 * len(took_s))] <= 10e-3
        return num_tokens / sum(took_s)

    assert computed_a_second(sizes) > 1.1 * computed_a_second(())
