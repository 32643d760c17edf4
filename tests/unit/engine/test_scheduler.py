from cache.checkpoints import ChunkSpan
from cache.hashing import PrefixHasher
from engine.scheduler import Scheduler
from engine.sequence import Job, Sequence
from tests.support.driving import request, resume_locally

SCHEDULER = Scheduler(max_step_tokens=64, max_running=4, block_size=16)


def sequence(prompt_length: int, num_computed: int = 0) -> Sequence:
    asked = request([7] * prompt_length)
    made = Sequence(Job(asked, resume_locally, 16, 0.0, print), PrefixHasher(16), list(asked.tokens))
    made.num_computed = num_computed
    return made


def spans(*running: Sequence) -> list[tuple[int, int, int]]:
    return [(running.index(p.sequence), p.span.start, p.span.end) for p in SCHEDULER.plan(running)]


def test_nothing_runs_when_nothing_is_ready() -> None:
    assert SCHEDULER.plan([]) == []


def test_decodes_go_before_an_earlier_prefill_and_cost_one_token_each() -> None:
    prefill, decode = sequence(1000), sequence(10, num_computed=12)
    assert spans(prefill, decode) == [(1, 12, 13), (0, 0, 48)]


def test_a_chunk_ends_on_a_block_boundary_unless_it_ends_the_prompt() -> None:
    assert spans(sequence(60)) == [(0, 0, 60)]
    assert spans(sequence(100)) == [(0, 0, 64)]
    assert spans(sequence(100, num_computed=64)) == [(0, 64, 100)]
    assert spans(sequence(1000, num_computed=8)) == [(0, 8, 64)]


def test_a_budget_below_one_block_still_moves_a_prompt() -> None:
    small = Scheduler(max_step_tokens=5, max_running=4, block_size=16)
    assert small.plan([sequence(100)])[0].span == ChunkSpan(0, 5)


def test_prefills_share_the_budget_in_order_of_arrival() -> None:
    assert spans(sequence(30), sequence(30), sequence(30)) == [(0, 0, 30), (1, 0, 30), (2, 0, 4)]


def test_never_more_sequences_than_max_running() -> None:
    decodes = [sequence(4, num_computed=4) for _ in range(9)]
    assert len(SCHEDULER.plan(decodes)) == 4
    assert len(SCHEDULER.plan([sequence(1) for _ in range(9)])) == 4
