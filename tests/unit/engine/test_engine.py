"""The engine against transformers, and what it holds and gives back. Both families, random tiny models."""

import time
from dataclasses import replace

import pytest
import torch

from headrace.cache.hits import ReceiveState
from headrace.config import ConfigError
from headrace.engine.config import EngineConfig
from headrace.engine.intake import BadRequest, RequestTooLarge
from headrace.engine.pool_sizes import PoolSizes
from headrace.engine.sequence import AdmissionTimedOut, Admitted, Computed, Finished, Sampled, Scored, Started
from headrace.request import FinishReason
from tests.support.engine.driving import GREEDY, generate, request, run_all, small_engine, submit
from tests.support.engine.oracle import clear_prompt, greedy, oracle, random_prompt

FAMILIES = (
    "falcon_h1", "granite", "granite_moe", "jamba", "kimi_linear", "lfm2", "lfm2_moe", "nemotron_h",
    "nemotron_h_moe", "olmo_hybrid", "qwen35", "qwen35_moe",
)  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_lengths_at_once_answer_like_transformers(family, tiny_checkpoint) -> None:
    path = tiny_checkpoint(family)
    built = small_engine(path)
    prompts = [clear_prompt(path, length, 16) for length in (1, 2, 15, 16, 17, 63, 64, 65, 300)]
    runs = [submit(built, request(prompt)) for prompt in prompts]
    run_all(built)
    assert [run.tokens for run in runs] == [greedy(path, prompt, 16) for prompt in prompts]


@pytest.mark.parametrize("policy", ["none", "align", "every", "branch"])
def test_a_cached_prefix_changes_no_token(policy, tiny_checkpoint) -> None:
    path = tiny_checkpoint("granite")
    built = small_engine(path, checkpoint_policy=policy)
    first = random_prompt(100)
    for prompt in (first, first, first[:70] + random_prompt(30), first + random_prompt(50)):
        assert generate(built, request(prompt)).tokens == greedy(path, prompt, 16)


def test_admissions_beside_a_step_leave_time_for_the_next_and_none_is_lost(tiny_checkpoint) -> None:
    path = tiny_checkpoint("granite")
    built = small_engine(path)
    prompts = [random_prompt(20, seed) for seed in range(4)]
    runs = [submit(built, request(prompt)) for prompt in prompts]
    for number in range(1, 5):
        built.engine.admit(within_s=0.0)
        assert built.engine.num_running == number
        assert built.engine.has_work
    run_all(built)
    assert [run.tokens for run in runs] == [greedy(path, prompt, 16) for prompt in prompts]


def test_the_same_prompt_again_computes_its_last_block_only(tiny_checkpoint) -> None:
    built = small_engine(tiny_checkpoint("qwen35"))
    prompt = random_prompt(64)
    generate(built, request(prompt))
    again = generate(built, request(prompt))
    assert again.sequence.num_prefilled == 16
    assert next(e for e in again.events if isinstance(e, Admitted)).hit.resumable_tokens == 48


def test_a_chat_resumes_where_the_answer_before_ended(tiny_checkpoint) -> None:
    path = tiny_checkpoint("qwen35")
    built = small_engine(path)
    turn = request(random_prompt(40), replace(GREEDY, max_tokens=30))
    answer = generate(built, turn).tokens
    prompt = [*turn.tokens, *answer, *random_prompt(9)]
    followed = generate(built, request(prompt))
    assert followed.tokens == greedy(path, prompt, 16)
    # 69 tokens had been computed (the last of the answer never is): the newest boundary is 64.
    assert followed.sequence.num_prefilled == len(prompt) - 64


def test_events_tell_of_admission_progress_tokens_and_end(tiny_checkpoint) -> None:
    built = small_engine(tiny_checkpoint("granite"))
    run = submit(built, request(random_prompt(600), replace(GREEDY, max_tokens=2)))
    run_all(built)
    kinds = [type(event) for event in run.events]
    assert kinds == [Admitted, Started, Computed, Computed, Computed, Sampled, Sampled, Finished]
    assert [e.num_tokens for e in run.events if isinstance(e, Computed)] == [256, 512, 600]
    assert run.events[-1] == Finished(FinishReason.LENGTH)


def test_stop_tokens_end_the_answer_but_not_before_min_tokens(tiny_checkpoint) -> None:
    built = small_engine(tiny_checkpoint("granite"))
    prompt = random_prompt(20)
    free = generate(built, request(prompt)).tokens
    stopper = free[3]
    stopped = generate(built, request(prompt, replace(GREEDY, stop_token_ids=(stopper,))))
    assert stopped.tokens == free[: free.index(stopper) + 1]
    assert stopped.events[-1] == Finished(FinishReason.STOP)
    later = generate(built, request(prompt, replace(GREEDY, stop_token_ids=(stopper,), min_tokens=6)))
    assert stopper not in later.tokens[:5] and len(later.tokens) >= 6


def test_an_engine_that_may_sample_one_token_keeps_blocks_and_state_until_release(tiny_checkpoint) -> None:
    built = small_engine(tiny_checkpoint("granite"))
    run = submit(built, request(random_prompt(40)), max_new=1)
    run_all(built)
    assert len(run.tokens) == 1 and not any(isinstance(e, Finished) for e in run.events)
    assert built.engine.cache.stats().blocks.in_use == 3
    built.engine.release(run.sequence)
    assert built.engine.cache.stats().blocks.in_use == 0
    assert built.engine.cache.stats().slots.in_use == 0


def test_what_nobody_releases_comes_back_with_its_lease(tiny_checkpoint) -> None:
    built = small_engine(tiny_checkpoint("granite"))
    run = submit(built, request(random_prompt(40)), max_new=1)
    built.engine.lease(run.sequence, time.monotonic() + 60)
    run_all(built)
    assert built.engine.cache.stats().blocks.in_use == 3
    built.engine.lease(run.sequence, time.monotonic() - 1)
    built.engine.admit()
    assert built.engine.cache.stats().blocks.in_use == 0


def test_a_released_prefill_leaves_no_lease_behind(tiny_checkpoint) -> None:
    built = small_engine(tiny_checkpoint("granite"))
    run = submit(built, request(random_prompt(40)), max_new=1)
    built.engine.lease(run.sequence, time.monotonic() + 60)
    run_all(built)
    built.engine.release(run.sequence)
    stats = built.engine.cache.stats()
    assert (stats.blocks.in_use, stats.slots.in_use, run.sequence.lease) == (0, 0, None)


@pytest.mark.parametrize("tokens", [(), (5, 512)])
def test_tokens_that_the_model_does_not_know_are_refused_before_they_reach_a_step(tokens, tiny_checkpoint) -> None:
    built = small_engine(tiny_checkpoint("granite"))
    with pytest.raises(BadRequest):
        submit(built, request(list(tokens)))


def test_state_and_blocks_moved_to_another_engine_go_on_with_the_same_tokens(tiny_checkpoint) -> None:
    path = tiny_checkpoint("qwen35")
    source, target = small_engine(path), small_engine(path)
    prompt = random_prompt(70)
    here = submit(source, request(prompt), max_new=1)
    run_all(source)
    there = submit(target, request(prompt), hit_policy=lambda hit: ReceiveState())
    target.engine.admit()
    blocks = torch.empty(5 * source.layout.block_bytes, dtype=torch.uint8)
    source.memory.gather_prompt(here.sequence.held.block_ids, source.layout.block_size, 0, 5, blocks)
    target.memory.scatter_blocks(there.sequence.held.block_ids[:5], blocks)
    state = torch.empty(source.layout.state_bytes, dtype=torch.uint8)
    source.memory.gather_state(here.sequence.state_slot, state)
    target.memory.scatter_state(there.sequence.held.slot, state)
    target.engine.run_decode(there.sequence, here.tokens[0])
    run_all(target)
    assert here.tokens + there.tokens == greedy(path, prompt, 16)


def test_a_full_cache_makes_requests_wait_and_refuses_them_at_their_deadline(tiny_checkpoint) -> None:
    built = small_engine(tiny_checkpoint("granite"), cache_bytes=1 << 20)
    size = built.sizes.num_blocks * 16
    sampling = replace(GREEDY, max_tokens=1)
    big = submit(built, request(random_prompt(size * 3 // 4), sampling))
    waits = submit(built, request(random_prompt(size // 2), sampling))
    late = submit(built, request(random_prompt(size // 2, 1), sampling), admit_by_s=time.monotonic() - 1)
    run_all(built)
    assert isinstance(late.events[-1], AdmissionTimedOut)
    assert len(big.tokens) == 1 and waits.events == []
    built.engine.release(big.sequence)
    run_all(built)
    assert len(waits.tokens) == 1


def test_a_request_that_can_never_fit_is_refused_with_the_numbers(tiny_checkpoint) -> None:
    built = small_engine(tiny_checkpoint("granite"), max_model_tokens=100)
    with pytest.raises(RequestTooLarge, match="101 tokens > 100"):
        submit(built, request(random_prompt(101)))


def test_aborts_in_any_phase_give_everything_back(tiny_checkpoint) -> None:
    built = small_engine(tiny_checkpoint("granite"))
    start = built.engine.cache.stats()
    for steps in range(6):
        run = submit(built, request(random_prompt(500, steps)))
        if steps:
            built.engine.admit()
        for _ in range(steps - 1):
            built.engine.step()
        built.engine.release(run.sequence)
        built.engine.cache.check()
        stats = built.engine.cache.stats()
        assert (stats.blocks.in_use, stats.slots.in_use) == (0, 0)
    assert start.blocks.free == built.sizes.num_blocks


def test_prompt_logprobs_equal_transformers_and_ignore_the_cache(tiny_checkpoint) -> None:
    path = tiny_checkpoint("qwen35")
    built = small_engine(path)
    prompt = random_prompt(300)
    generate(built, request(prompt))
    sampling = replace(GREEDY, max_tokens=0, prompt_logprobs=2)
    run = generate(built, request(prompt, sampling), prompt_logprobs=2)
    scored = [event.logprobs for event in run.events if isinstance(event, Scored)]
    with torch.inference_mode():
        expected = torch.log_softmax(oracle(path)(torch.tensor([prompt])).logits[0].double(), -1)
    assert [part.start for part in scored] == [1, *(part.end for part in scored[:-1])]
    ours = [logprob for part in scored for logprob in part.logprobs]
    best = [top for part in scored for top in part.top_ids]
    assert best == expected[:-1].topk(2).indices.flatten().tolist()
    assert ours == pytest.approx([float(expected[i, t]) for i, t in enumerate(prompt[1:])], abs=1e-3)
    assert run.tokens == [] and isinstance(run.events[-1], Finished)


def test_the_same_seed_gives_the_same_answer_alone_in_a_batch_and_after_a_migration(tiny_checkpoint) -> None:
    built = small_engine(tiny_checkpoint("granite"))
    sampling = replace(GREEDY, temperature=1.0, seed=42, max_tokens=20)
    prompt = random_prompt(30)
    alone = generate(built, request(prompt, sampling)).tokens
    crowd = [submit(built, request(random_prompt(9, i), replace(sampling, seed=i))) for i in range(5)]
    together = submit(built, request(prompt, sampling))
    run_all(built)
    assert together.tokens == alone
    assert len({tuple(run.tokens) for run in crowd}) == 5
    moved = request([*prompt, *alone[:7]], sampling)
    moved = replace(moved, num_prompt_tokens=len(prompt))
    assert generate(built, moved, max_new=13).tokens == alone[7:]


def test_pools_that_hold_no_request_are_a_config_error(tiny_checkpoint) -> None:
    layout = small_engine(tiny_checkpoint("granite")).layout
    with pytest.raises(ConfigError, match="raise cache_bytes"):
        PoolSizes.fit(layout, EngineConfig(cache_bytes=1000), free_bytes=0, max_model_tokens=100)
    tiny = replace(layout, block_size=1)
    two_blocks = EngineConfig(cache_bytes=1 << 30, state_share=1 - 2.5 * tiny.block_bytes / (1 << 30), block_size=1)
    with pytest.raises(ConfigError, match="holds 2 blocks"):
        PoolSizes.fit(tiny, two_blocks, free_bytes=0, max_model_tokens=100)
    three_slots = EngineConfig(cache_bytes=1 << 30, state_share=3.5 * layout.state_bytes / (1 << 30))
    assert PoolSizes.fit(layout, three_slots, free_bytes=0, max_model_tokens=100).num_slots == 3
    with pytest.raises(ConfigError, match="holds 3 states, and drafts get 25% of them, which is none"):
        PoolSizes.fit(layout, three_slots, free_bytes=0, max_model_tokens=100, most_draft_slots=8)
    sizes = PoolSizes.fit(layout, EngineConfig(state_share=0.25), free_bytes=8 << 20, max_model_tokens=100)
    assert sizes.num_slots * layout.state_bytes <= 2 << 20
    assert sizes.num_blocks * layout.block_bytes <= 6 << 20


def test_rings_leave_room_for_the_states_of_a_node_with_little_memory(tiny_checkpoint) -> None:
    """It holds fewer states than `max_running`, and no more rows than states; a budget that is given is no less."""
    layout = small_engine(tiny_checkpoint("granite")).layout
    config, state_bytes = EngineConfig(state_share=0.5, max_running=64), layout.state_bytes
    for free_bytes, num_rows in ((40 * state_bytes, 10), (1000 * state_bytes, 80)):
        limits = {"free_bytes": free_bytes, "max_model_tokens": 100, "tail_row_bytes": state_bytes}
        sizes = PoolSizes.fit(layout, config, **limits)
        taken = (sizes.num_tail_rows + sizes.num_states) * state_bytes + sizes.num_blocks * layout.block_bytes
        assert sizes.num_tail_rows == num_rows <= sizes.num_states and taken <= free_bytes
        given = PoolSizes.fit(layout, replace(config, cache_bytes=free_bytes), **limits)
        assert given.num_states == free_bytes // (2 * state_bytes)
    with pytest.raises(ConfigError, match="raise cache_bytes"):
        PoolSizes.fit(layout, config, free_bytes=6 * state_bytes, max_model_tokens=100, tail_row_bytes=9 * state_bytes)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_prompt_length_up_to_two_chunks_and_more(family, tiny_checkpoint) -> None:
    path = tiny_checkpoint(family)
    built = small_engine(path, checkpoint_policy="none")
    prompt = random_prompt(140)
    with torch.inference_mode():
        expected = oracle(path)(torch.tensor([prompt])).logits[0].argmax(-1).tolist()
    sampling = replace(GREEDY, max_tokens=1)
    ours = [generate(built, request(prompt[:length], sampling)).tokens[0] for length in range(1, 141)]
    assert ours == expected
