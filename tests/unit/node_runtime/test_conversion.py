"""Nodes with different cache layouts transfer to each other, and answer like a single model."""

from dataclasses import replace
from pathlib import Path

import pytest

from decode_node.config import LocalPrefillConfig
from tests.support.engine.driving import GREEDY, SMALL, request
from tests.support.engine.oracle import clear_prompt, greedy, random_prompt
from tests.support.node.linked_roles import linked

ALWAYS_REMOTE = LocalPrefillConfig(max_tokens=0)
NUM_TOKENS = 24


@pytest.fixture(params=["granite", "qwen35"])
def model(request: pytest.FixtureRequest, tiny_checkpoint) -> Path:
    return tiny_checkpoint(request.param)


def asked(prompt: list[int]):
    return request(prompt, replace(GREEDY, max_tokens=NUM_TOKENS))


@pytest.mark.parametrize("sizes", [(16, 32), (32, 16), (16, 8), (8, 24)])
async def test_block_sizes_may_differ(model: Path, sizes: tuple[int, int]) -> None:
    own, theirs = sizes
    changes = {
        "prefill": {"engine": replace(SMALL, block_size=own)},
        "decode": {"engine": replace(SMALL, block_size=theirs), "local_prefill": ALWAYS_REMOTE},
        "max_message_bytes": 1 << 14,  # several messages, which end within the prefill node's blocks
    }
    async with linked(model, **changes) as nodes:
        for length in (1, 15, 16, 17, 33, 100, 333):
            prompt = clear_prompt(model, length, NUM_TOKENS)
            for turn in range(2):
                answer = await nodes.answer(asked(prompt))
                assert answer.tokens == greedy(model, prompt, NUM_TOKENS)
                # The decode node knows the first turn's prompt and answer, less the token that it only sampled.
                hit = (length + NUM_TOKENS - 1) // theirs * theirs if turn else 0
                assert answer.reserved.attention_hit_tokens == answer.decode.attention_hit_tokens == hit
                assert answer.moved.attention_tokens == len(prompt) - hit
                known = (length - 1) // own * own if turn else 0
                assert (answer.prefill.resumed_tokens, answer.prefill.computed_tokens) == (known, len(prompt) - known)
                prompt = clear_prompt(model, 9, NUM_TOKENS, seed=length, after=[*prompt, *answer.tokens])
        await nodes.settled()


@pytest.mark.parametrize("sizes", [(16, 32), (32, 16), (8, 24)])
async def test_a_prefill_node_fetches_blocks_of_another_size(model: Path, sizes: tuple[int, int]) -> None:
    own, theirs = sizes
    changes = {
        "prefill": {"engine": replace(SMALL, block_size=own)},
        "decode": {"engine": replace(SMALL, block_size=theirs), "local_prefill": ALWAYS_REMOTE},
    }
    common = 96  # ends a block of either size; the decode node's last checkpoint of prompt and answer
    async with linked(model, **changes) as nodes:
        first = random_prompt(80)
        generated = await nodes.generate(request(first, replace(GREEDY, max_tokens=common - 80 + 1)))
        prompt = [*first, *generated, *random_prompt(40, seed=1)]
        answer = await nodes.answer(asked(prompt), fetch_source_tokens=common)
        assert answer.tokens == greedy(model, prompt, NUM_TOKENS)
        assert (answer.prefill.fetched_tokens, answer.prefill.computed_tokens) == (common, len(prompt) - common)
        # What was fetched is its own by now.
        again = await nodes.answer(asked([*prompt[:common], *random_prompt(20, seed=2)]))
        assert (again.prefill.resumed_tokens, again.prefill.fetched_tokens) == (common, 0)
        await nodes.settled()


async def test_states_arrive_in_the_dtype_that_the_receiver_asks_for(model: Path) -> None:
    moved = {}
    for dtype in (None, "float32", "bfloat16", "float16", "int8", "fp8"):
        decode = {"state_wire_dtype": dtype, "local_prefill": ALWAYS_REMOTE}
        async with linked(model, decode=decode) as nodes:
            layout = nodes.decode_runtime.layout
            for length in (17, 100):
                prompt = random_prompt(length)
                answer = await nodes.answer(asked(prompt))
                if dtype in (None, "float32"):
                    assert answer.tokens == greedy(model, prompt, NUM_TOKENS)
                assert answer.tokens[0] == greedy(model, prompt, 1)[0], "sampled where the state was computed"
            moved[dtype] = answer.moved.state_bytes
            await nodes.settled()
    assert moved[None] == moved["float32"] == layout.state_bytes
    assert moved["bfloat16"] == moved["float16"] == layout.on_wire("bfloat16").state_bytes
    assert moved["int8"] == moved["fp8"] == layout.on_wire("int8").state_bytes < moved["float16"]


async def test_what_a_prefill_node_fetches_arrives_as_that_node_asks(model: Path) -> None:
    async with linked(model, prefill={"state_wire_dtype": "bfloat16"}) as nodes:
        first = random_prompt(80)
        generated = await nodes.generate(request(first, replace(GREEDY, max_tokens=17)))
        _, report = await nodes.first_token(asked([*first, *generated, 7, 8]), 96)
        assert report.fetched_tokens == 96
        layout = nodes.prefill_runtime.layout
        attention_bytes = 96 // layout.block_size * layout.block_bytes
        expected = attention_bytes + layout.on_wire("bfloat16").state_bytes
        assert nodes.fetches.counters()["fetched_bytes"] == expected
        await nodes.settled()
