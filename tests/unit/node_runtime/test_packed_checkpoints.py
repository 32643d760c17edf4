"""Checkpoints that are packed in a node's cache, sent to nodes that keep and ask for states in other formats."""

from dataclasses import replace

import pytest

from decode_node.config import LocalPrefillConfig
from tests.support.engine.driving import GREEDY, SMALL, request
from tests.support.engine.oracle import clear_prompt, greedy
from tests.support.node.linked_roles import linked

ALWAYS_REMOTE = LocalPrefillConfig(max_tokens=0)
ANSWER = replace(GREEDY, max_tokens=17)


@pytest.mark.parametrize("wire", [None, "float16", "int8"])
@pytest.mark.parametrize("checkpoint_dtypes", [("int8", "int8"), (None, "int8"), ("float16", None)], ids=str)
@pytest.mark.parametrize("family", ["granite", "qwen35"])
async def test_a_packed_checkpoint_is_fetched_and_handed_over_in_any_format(
    family: str, checkpoint_dtypes: tuple[str | None, str | None], wire: str | None, tiny_checkpoint
) -> None:
    path = tiny_checkpoint(family)
    prefill, decode = (replace(SMALL, checkpoint_dtype=each) for each in checkpoint_dtypes)
    changes = {
        "prefill": {"engine": prefill, "state_wire_dtype": wire},
        "decode": {"engine": decode, "local_prefill": ALWAYS_REMOTE},
    }
    first = clear_prompt(path, 80, ANSWER.max_tokens)
    async with linked(path, **changes) as nodes:
        generated = await nodes.generate(request(first, ANSWER))
        assert generated == greedy(path, first, ANSWER.max_tokens)
        # The decode node's checkpoint at 96 goes to the prefill node, and the state there back to the decode node.
        chat = clear_prompt(path, 9, ANSWER.max_tokens, after=[*first, *generated])
        answer = await nodes.answer(request(chat, ANSWER), fetch_source_tokens=96)
        assert answer.tokens == greedy(path, chat, ANSWER.max_tokens)
        assert (answer.prefill.fetched_tokens, answer.prefill.computed_tokens) == (96, len(chat) - 96)
        layout = nodes.prefill_runtime.layout
        state_bytes = nodes.fetches.counters()["fetched_bytes"] - 96 // layout.block_size * layout.block_bytes
        assert state_bytes == layout.on_wire(wire).state_bytes
        again = clear_prompt(path, 5, ANSWER.max_tokens, after=chat[:96])
        answer = await nodes.answer(request(again, ANSWER))
        assert answer.tokens == greedy(path, again, ANSWER.max_tokens)
        assert (answer.prefill.resumed_tokens, answer.prefill.fetched_tokens) == (96, 0)
        await nodes.settled()
