"""transformers as the decode peer: the bytes that a prefill node hands over over UCX become a `DynamicCache`,
and `generate` goes on from there as if it had computed the prompt itself."""

import asyncio
import contextlib
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from headrace.cache.layout import CacheLayout
from headrace.engine.build import build_engine
from headrace.request import Request, Sampling
from headrace.token_array import TokenArray
from headrace.wire.client import GrpcNodeClient
from headrace.wire.messages import PrefillRequest, Reservation
from node.config import NodeConfig
from node_runtime.sessions import plan_of
from tests.support.cluster.cluster import SMALL, Process
from tests.support.engine.oracle import clear_prompt, greedy, oracle
from transfer.protocol.authentication import new_secret
from transfer.protocol.envelope import new_nonce
from transfer.receiver import TransferReceiver
from transfer.staging import Staging, StagingConfig
from transfer.ucx import UcxConfig, open_transport

NUM_TOKENS = 64
LENGTHS = (17, 300)


async def receive(
    prefill_address: str, layout: CacheLayout, max_message_bytes: int, prompt: list[int]
) -> tuple[int, bytes, bytes]:
    """First token, blocks and state of a prompt, from a prefill node."""
    transport = open_transport(UcxConfig())
    client = GrpcNodeClient("p0", prefill_address)
    blocks, state = bytearray(), bytearray()

    async def land(message, buffer) -> None:
        blocks.extend(buffer.payload[: message.attention_bytes].tobytes())
        state.extend(buffer.payload[message.attention_bytes :].tobytes())

    try:
        reservation = Reservation(
            nonce=new_nonce(),
            attention_hit_tokens=0,
            num_tokens=len(prompt),
            transfer_address=transport.address,
            layout=layout,
            timeout_s=60.0,
            secret=new_secret(),
        )
        receiver = TransferReceiver(transport, Staging(StagingConfig(2, 1 << 20)))
        transfer = receiver.expect(
            plan_of(reservation, max_message_bytes),
            secret=reservation.secret,
            land=land,
            deadline_s=asyncio.get_running_loop().time() + 60,
        )
        sampling = Sampling(max_tokens=NUM_TOKENS, seed=0, temperature=0.0, ignore_eos=True)
        request = Request("r", TokenArray.of(prompt), len(prompt), sampling)
        async with client.prefill(PrefillRequest(request, reservation), timeout_s=60) as call:
            async for _ in call:
                pass
        landed = await transfer.landed()
    finally:
        await client.close()
        await transport.close()
    assert landed.first_token is not None
    return landed.first_token, bytes(blocks), bytes(state)


FAMILIES = (
    "falcon_h1", "granite", "granite_moe", "jamba", "kimi_linear", "lfm2", "lfm2_moe", "nemotron_h",
    "nemotron_h_moe", "olmo_hybrid", "qwen35", "qwen35_moe",
)  # fmt: skip


def as_dynamic_cache(
    model: PreTrainedModel, layout: CacheLayout, length: int, blocks: bytes, state: bytes
) -> DynamicCache:
    """Both groups put where transformers keeps them, layer by layer."""
    (attention,), (states,) = layout.attention_groups, layout.state_groups
    kv = torch.from_numpy(np.frombuffer(blocks, np.float32).copy()).view(
        -1, attention.num_layers, attention.num_planes, layout.block_size, attention.num_heads, attention.head_dim
    )
    values, num_conv = torch.from_numpy(np.frombuffer(state, np.float32).copy()), layout.conv_bytes(states) // 4
    conv = values[:num_conv].view(states.num_layers, *states.conv_shape)
    rec = values[num_conv:].view(states.num_layers, *states.rec_shape)
    with torch.no_grad():
        # A first pass over one token makes layer objects of the right kinds; their contents are replaced.
        cache = model(torch.tensor([[7]]), past_key_values=DynamicCache(config=model.config)).past_key_values
    num_attention = num_state = 0
    for layer in cache.layers:
        if hasattr(layer, "conv_states"):
            (window,) = layer.conv_states.values()
            window.zero_()
            window[0, :, -conv.shape[-1] :] = conv[num_state]  # transformers keeps one column more than is read
            for recurrent in layer.recurrent_states.values():  # none where the window is all
                if recurrent is not None:
                    recurrent.copy_(rec[num_state].to(recurrent.dtype).view_as(recurrent))
            num_state += 1
        if isinstance(layer, DynamicLayer):  # others, Nemotron's feed-forwards, keep nothing
            heads = kv[:, num_attention].permute(1, 3, 0, 2, 4).flatten(2, 3)[:, :, :length]  # [2, KV, length, D]
            if attention.num_planes == 1:  # latents, which transformers keeps in their two parts
                heads = heads.split((model.config.kv_lora_rank, model.config.qk_rope_head_dim), dim=-1)
            else:
                heads = heads.split(1)
            layer.keys, layer.values = (part.clone() for part in heads)
            num_attention += 1
    assert (num_attention, num_state) == (attention.num_layers, states.num_layers)
    return cache


def go_on(model: PreTrainedModel, cache: DynamicCache, prompt: list[int], first: int) -> list[int]:
    known = torch.tensor([[*prompt, first]])
    generated = model.generate(
        known,
        attention_mask=torch.ones_like(known),
        past_key_values=cache,
        max_new_tokens=NUM_TOKENS - 1,
        min_new_tokens=NUM_TOKENS - 1,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return generated[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", FAMILIES)
async def test_transformers_goes_on_from_what_a_prefill_node_hands_over(
    family: str, tiny_checkpoint, tmp_path: Path
) -> None:
    path = tiny_checkpoint(family)
    layout = build_engine(str(path), SMALL, lambda: 0.0).layout
    config = NodeConfig("p0", str(path), engine=SMALL, max_message_bytes=4 * layout.block_bytes)
    node = Process.start("p0", config, tmp_path)
    with contextlib.ExitStack() as undo:
        undo.callback(node.stop)
        for length in LENGTHS:
            prompt = clear_prompt(path, length, NUM_TOKENS)
            first, blocks, state = await receive(node.ready["address"], layout, config.message_bytes, prompt)
            model = oracle(path)
            cache = as_dynamic_cache(model, layout, length, blocks, state)
            assert go_on(model, cache, prompt, first) == greedy(path, prompt, NUM_TOKENS)
