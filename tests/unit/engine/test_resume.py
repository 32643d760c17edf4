"""A prefill that resumes from a state which another engine computed."""

from dataclasses import replace

import pytest
import torch

from headrace.cache.hits import FetchState, ReceiveState
from headrace.engine.build import BuiltEngine
from headrace.engine.sequence import Admitted, Computed, Sequence
from tests.support.engine.driving import GREEDY, generate, request, run_all, small_engine, submit
from tests.support.engine.oracle import greedy, random_prompt


def copy_prefix(source: BuiltEngine, target: BuiltEngine, sequence: Sequence, num_tokens: int, hit: int) -> None:
    """Copies, as a transfer does, the blocks beyond the hit and the checkpoint at `num_tokens`."""
    size = source.layout.block_size
    checkpoint = source.engine.cache.find_checkpoint(sequence.hasher.keys[num_tokens // size - 1])
    assert checkpoint is not None and checkpoint.num_tokens == num_tokens
    hold = source.engine.cache.hold_checkpoint(checkpoint)
    assert hold is not None
    first, end = hit // size, num_tokens // size
    blocks = torch.empty((end - first) * source.layout.block_bytes, dtype=torch.uint8)
    state = torch.empty(source.layout.state_bytes, dtype=torch.uint8)
    source.memory.gather_prompt(hold.block_ids, size, first, end - first, blocks)
    source.memory.gather_state(checkpoint.slot, state)
    target.memory.scatter_blocks(sequence.held.block_ids[first:end], blocks)
    target.memory.scatter_state(sequence.held.slot, state)
    source.engine.cache.drop(hold)


@pytest.mark.parametrize("family", ["granite", "qwen35"])
def test_the_next_turn_goes_on_from_the_other_engines_answer(family, tiny_checkpoint) -> None:
    path = tiny_checkpoint(family)
    prefill, decode = small_engine(path), small_engine(path)
    turn = random_prompt(40)
    generate(prefill, request(turn), max_new=1)
    answer = generate(decode, request(turn, replace(GREEDY, max_tokens=60))).tokens
    prompt = [*turn, *answer, *random_prompt(21)]

    run = submit(prefill, request(prompt), hit_policy=lambda hit: FetchState(96))
    run_all(prefill)
    # Its own: the 32 tokens of two blocks. The decode engine has computed 99: its newest boundary is 96.
    assert [(e.reused_tokens, e.state_arrives) for e in run.events] == [(32, True)]
    copy_prefix(decode, prefill, run.sequence, 96, hit=32)
    prefill.engine.resume_prefill(run.sequence, 96)
    run_all(prefill)
    assert run.tokens == greedy(path, prompt, 16)
    assert run.sequence.num_prefilled == len(prompt) - 96
    assert [e.num_tokens for e in run.events if isinstance(e, Computed)] == [len(prompt)]
    assert run.sequence.all_checkpoints[0] == 96
    totals = prefill.engine.cache.stats().totals
    assert (totals.lookups, totals.looked_up_tokens) == (2, 39 + len(prompt) - 1)
    assert (totals.state_lookups, totals.state_looked_up_tokens) == (2, 39 + len(prompt) - 1)
    assert (totals.attention_hit_tokens, totals.attention_fetched_tokens, totals.reused_tokens) == (96, 64, 32)
    assert (totals.state_hit_tokens, totals.state_fetched_tokens, totals.resumable_tokens) == (96, 64, 96)
    assert totals.tombstone_tokens == 0
    prefill.engine.release(run.sequence)

    again = generate(prefill, request(prompt[:110]))
    assert next(e for e in again.events if isinstance(e, Admitted)).hit.resumable_tokens == 96
    assert again.tokens == greedy(path, prompt[:110], 16)
    for built in (prefill, decode):
        stats = built.engine.cache.stats()
        assert (stats.blocks.in_use, stats.slots.in_use) == (0, 0)


def test_without_checkpoints_the_state_that_came_is_used_once(tiny_checkpoint) -> None:
    path = tiny_checkpoint("granite")
    prefill, decode = small_engine(path, checkpoint_policy="none"), small_engine(path)
    prompt = random_prompt(50)
    generate(decode, request(prompt, replace(GREEDY, max_tokens=1)))
    run = submit(prefill, request(prompt), hit_policy=lambda hit: FetchState(48))
    run_all(prefill)
    copy_prefix(decode, prefill, run.sequence, 48, hit=0)
    prefill.engine.resume_prefill(run.sequence, 48)
    run_all(prefill)
    assert run.tokens == greedy(path, prompt, 16)
    assert run.sequence.all_checkpoints == ()
    assert prefill.engine.cache.find_checkpoint(run.sequence.hasher.keys[2]) is None


def test_a_sequence_whose_lease_ran_out_is_not_resumed(tiny_checkpoint) -> None:
    built = small_engine(tiny_checkpoint("granite"))
    run = submit(built, request(random_prompt(50)), hit_policy=lambda hit: ReceiveState())
    run_all(built)
    built.engine.release(run.sequence)
    built.engine.resume_prefill(run.sequence, 48)
    assert built.engine.num_running == 0


def test_a_state_that_does_not_come_is_computed_before_new_requests_are_admitted(tiny_checkpoint) -> None:
    path = tiny_checkpoint("qwen35")
    built = small_engine(path)
    prompt = random_prompt(100)
    generate(built, request(prompt[:40]))
    run = submit(built, request(prompt), hit_policy=lambda hit: FetchState(96))
    run_all(built)
    later = submit(built, request(random_prompt(30)))
    built.engine.prefill_locally(run.sequence)
    built.engine.admit()
    assert [(e.reused_tokens, e.state_arrives) for e in run.events] == [(32, True), (32, False)]
    totals = built.engine.cache.stats().totals
    assert (totals.lookups, totals.state_lookups, totals.looked_up_tokens) == (3, 3, 39 + 99 + 29), "each prompt once"
    assert (totals.attention_hit_tokens, totals.state_hit_tokens, totals.attention_fetched_tokens) == (32, 32, 0)
    run_all(built)
    assert run.tokens == greedy(path, prompt, 16)
    assert later.tokens == greedy(path, random_prompt(30), 16)
    for each in (run, later):
        built.engine.release(each.sequence)
    stats = built.engine.cache.stats()
    assert (stats.blocks.in_use, stats.slots.in_use) == (0, 0)


def test_what_lost_its_lease_computes_nothing_instead(tiny_checkpoint) -> None:
    built = small_engine(tiny_checkpoint("granite"))
    run = submit(built, request(random_prompt(50)), hit_policy=lambda hit: FetchState(48))
    run_all(built)
    built.engine.release(run.sequence)
    built.engine.prefill_locally(run.sequence)
    assert built.engine.num_waiting == 0
