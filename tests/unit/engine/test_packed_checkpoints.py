"""Checkpoints in fewer bytes than running states: packed when they are published, unpacked by what resumes."""

from dataclasses import replace

import pytest
import torch

from headrace.config import ConfigError
from headrace.engine.config import EngineConfig
from headrace.engine.pool_sizes import EMISSION_SLOTS, PoolSizes
from headrace.speculation.config import SpeculationConfig
from tests.support.engine.driving import (
    GREEDY,
    assert_nothing_in_use,
    fail_launches,
    generate,
    request,
    run_all,
    serve,
    small_engine,
    submit,
)
from tests.support.engine.oracle import clear_prompt, greedy, random_prompt

SHORT = replace(GREEDY, max_tokens=8)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("family", ["granite", "qwen35"])
@pytest.mark.parametrize("checkpoint_dtype", ["float16", "int8"])
def test_a_chat_goes_on_from_packed_checkpoints(family, checkpoint_dtype, overlap, tiny_checkpoint) -> None:
    path = tiny_checkpoint(family)
    built = small_engine(path, checkpoint_dtype=checkpoint_dtype, overlap=overlap)
    chat: list[int] = []
    for turn in range(4):
        known = (len(chat) - 1) // 16 * 16 if turn else 0
        chat = clear_prompt(path, 23, SHORT.max_tokens, seed=turn, after=chat)
        answer = generate(built, request(chat, SHORT))
        assert answer.tokens == greedy(path, chat, SHORT.max_tokens)
        assert answer.sequence.num_prefilled == len(chat) - known
        chat += answer.tokens
    stats = built.engine.cache.stats()
    assert stats.packed is not None and stats.packed.in_use == 0 and stats.packed.cached == stats.num_checkpoints > 0
    assert_nothing_in_use(built)


def test_states_inside_a_chunk_are_packed_and_each_can_be_resumed(tiny_checkpoint) -> None:
    path = tiny_checkpoint("granite")
    built = small_engine(path, checkpoint_dtype="float16", checkpoint_policy="every")
    assert built.sizes.num_emission_slots < EMISSION_SLOTS, "this pool is small"
    kept = 16 * built.sizes.num_emission_slots
    prompt = clear_prompt(path, kept + 5, 4)
    first = generate(built, request(prompt, replace(GREEDY, max_tokens=1)))
    assert first.sequence.all_checkpoints == tuple(range(16, kept + 1, 16))
    for boundary in first.sequence.all_checkpoints[::3]:
        branched = clear_prompt(path, 5, 4, seed=boundary, after=prompt[:boundary])
        resumed = generate(built, request(branched, replace(GREEDY, max_tokens=4)))
        assert resumed.sequence.num_prefilled == 5
        assert resumed.tokens == greedy(path, branched, 4)


def test_a_resumed_state_is_the_packed_one_and_its_checkpoint_stays_as_it_is(tiny_checkpoint) -> None:
    built = small_engine(tiny_checkpoint("qwen35"), checkpoint_dtype="int8")
    prompt = random_prompt(40)
    generate(built, request(prompt, SHORT))
    checkpoint = next(iter(built.engine.cache._storage.index.checkpoints()))
    assert checkpoint.slot >= built.sizes.num_states

    def bytes_of(slot: int) -> torch.Tensor:
        out = torch.empty(built.layout.on_wire("int8").state_bytes, dtype=torch.uint8)
        built.memory.gather_state(slot, out, "int8")
        return out

    before = bytes_of(checkpoint.slot)
    again = submit(built, request([*prompt, 1], SHORT))
    built.engine.admit()
    assert torch.equal(bytes_of(again.sequence.state_slot)[:-64], before[:-64]), "but for the last bits of scales"
    run_all(built)
    assert torch.equal(bytes_of(checkpoint.slot), before)


def test_many_requests_in_a_scarce_cache_answer_like_alone(tiny_checkpoint) -> None:
    path = tiny_checkpoint("granite")
    built = small_engine(
        path, checkpoint_dtype="float16", cache_bytes=1 << 20, max_running=4, max_step_tokens=64, overlap=True
    )
    prompts = [clear_prompt(path, 30 + 7 * number, 8, seed=number) for number in range(8)]
    for _ in range(2):
        prompts.reverse()
        runs = [submit(built, request(prompt, SHORT)) for prompt in prompts]
        serve(built, *runs)
        assert [run.tokens for run in runs] == [greedy(path, prompt, 8) for prompt in prompts]
    stats = built.engine.cache.stats()
    assert stats.totals.checkpoints_evicted and stats.totals.checkpoints_used
    assert_nothing_in_use(built)


def test_a_step_that_found_too_little_memory_is_computed_again_from_the_checkpoint(tiny_checkpoint) -> None:
    path = tiny_checkpoint("qwen35")
    built = small_engine(path, checkpoint_dtype="float16")
    prompt = clear_prompt(path, 50, 8)
    generate(built, request(prompt, SHORT))
    fail_launches(built, lambda inputs: any(len(each.tokens) > 150 for each in inputs))
    resumed = submit(built, request(prompt, SHORT))
    poison = submit(built, request(random_prompt(600), SHORT))
    serve(built, resumed)
    assert resumed.tokens == greedy(path, prompt, 8)
    built.engine.release(poison.sequence)
    assert_nothing_in_use(built)


def test_drafts_change_no_token_where_checkpoints_are_packed(tiny_checkpoint) -> None:
    path = tiny_checkpoint("qwen35")
    drafting = SpeculationConfig(drafter="ngram")
    built = small_engine(path, checkpoint_dtype="float16", speculation=drafting)
    prompt = clear_prompt(path, 20, 40)
    for _ in range(2):
        answer = generate(built, request(prompt, replace(GREEDY, max_tokens=40)))
        assert answer.tokens == greedy(path, prompt, 40)
    assert_nothing_in_use(built)


def test_more_checkpoints_fit_the_same_bytes(tiny_checkpoint) -> None:
    layout = small_engine(tiny_checkpoint("granite")).layout
    budget = 40_000 * layout.state_bytes

    def sizes(**changes: object) -> PoolSizes:
        config = EngineConfig(cache_bytes=budget, **changes)
        return PoolSizes.fit(layout, config, free_bytes=0, max_model_tokens=1 << 20)

    plain = sizes(state_share=0.5)
    for checkpoint_dtype in ("float16", "int8"):
        packed = sizes(checkpoint_dtype=checkpoint_dtype, state_share=0.5)
        packed_bytes = layout.on_wire(checkpoint_dtype).state_bytes
        assert (packed.num_slots, packed.num_emission_slots, packed.num_blocks) == (80, 16, plain.num_blocks)
        used = packed.num_states * layout.state_bytes + packed.num_packed_slots * packed_bytes
        assert budget / 2 - packed_bytes < used <= budget / 2
    by_default = sizes(checkpoint_dtype="int8")
    assert by_default.num_blocks > sizes().num_blocks and by_default.num_packed_slots > sizes().num_slots


def test_formats_that_save_nothing_are_refused(tiny_checkpoint) -> None:
    with pytest.raises(
        ConfigError, match="float16 with state_dtype bfloat16: as many bytes; leave it out, or use int8"
    ):
        EngineConfig(device="cuda", state_dtype="bfloat16", checkpoint_dtype="float16")
    with pytest.raises(ConfigError, match=r"int8: a packed state of this model has .* leave it out"):
        small_engine(tiny_checkpoint("lfm2"), checkpoint_dtype="int8")
    layout = small_engine(tiny_checkpoint("granite")).layout
    scarce = EngineConfig(cache_bytes=16 * layout.state_bytes, checkpoint_dtype="int8")
    with pytest.raises(ConfigError, match="and no checkpoint: raise cache_bytes"):
        PoolSizes.fit(layout, scarce, free_bytes=0, max_model_tokens=1 << 20)
