"""The two architectures, and their weights before training.

    python -m tiny_models.train.architectures --granite tiny_models/headrace-tiny-granite-h \
        --qwen tiny_models/headrace-tiny-qwen3.5

Both have 8 layers in the pattern LLLA LLLA (L: recurrent state, A: attention), hidden 192, MLP 512, 6 query heads on
2 KV heads of 32, and tie the output to the embedding. Granite's multipliers are not 1, so that an engine which forgets
one of them fails on this model too.
"""

import math
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import nn
from transformers import (
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

from tiny_models.train.tokenizer import MAX_TOKENS, VOCAB_SIZE

HIDDEN = 192
MLP = 512
NUM_LAYERS = 8
LAYER_TYPES = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 2
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 6, 2, 32
EOS_ID, PAD_ID = 0, 1
INITIAL_STD = 0.05
SEED = 0


def granite_config() -> GraniteMoeHybridConfig:
    """Granite 4 H, dense: Mamba2 with 12 heads of 32 and a state of 64; attention without positions."""
    return GraniteMoeHybridConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN,
        shared_intermediate_size=MLP,
        intermediate_size=MLP,
        num_local_experts=0,
        num_experts_per_tok=0,
        num_hidden_layers=NUM_LAYERS,
        layer_types=LAYER_TYPES,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_KV_HEADS,
        attention_multiplier=HEAD_DIM**-0.5,
        embedding_multiplier=4.0,
        residual_multiplier=0.5,
        logits_scaling=2.0,
        mamba_n_heads=2 * HIDDEN // HEAD_DIM,
        mamba_d_head=HEAD_DIM,
        mamba_d_state=64,
        mamba_n_groups=1,
        mamba_chunk_size=64,
        position_embedding_type=None,
        max_position_embeddings=MAX_TOKENS,
        tie_word_embeddings=True,
        initializer_range=INITIAL_STD,
        rms_norm_eps=1e-6,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )


def qwen_config() -> Qwen3_5TextConfig:
    """Qwen3.5, text only, dense: gated delta net, 6 heads of 32x32; gated attention, rotary positions; an MTP layer."""
    return Qwen3_5TextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN,
        intermediate_size=MLP,
        num_hidden_layers=NUM_LAYERS,
        layer_types=LAYER_TYPES,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        linear_num_key_heads=NUM_HEADS,
        linear_num_value_heads=NUM_HEADS,
        linear_key_head_dim=HEAD_DIM,
        linear_value_head_dim=HEAD_DIM,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
        max_position_embeddings=MAX_TOKENS,
        mtp_num_hidden_layers=1,
        tie_word_embeddings=True,
        initializer_range=INITIAL_STD,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )


def initialise_state_mixers(model: PreTrainedModel) -> None:
    """Start each head at its own time scale: dt log-uniform in [1e-3, 1e-1], A uniform in [1, 16] (Mamba2, sec. 7).

    transformers starts with dt near 1.3, a state that forgets within a few tokens.
    """
    for module in model.modules():
        if isinstance(getattr(module, "dt_bias", None), nn.Parameter):
            with torch.no_grad():
                dt = torch.exp(torch.empty_like(module.dt_bias).uniform_(math.log(1e-3), math.log(1e-1)))
                module.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))
                module.A_log.copy_(torch.empty_like(module.A_log).uniform_(1, 16).log())


def initial_granite() -> GraniteMoeHybridForCausalLM:
    torch.manual_seed(SEED)
    model = GraniteMoeHybridForCausalLM(granite_config())
    initialise_state_mixers(model)
    return model


def initial_qwen() -> Qwen3_5ForCausalLM:
    torch.manual_seed(SEED)
    model = Qwen3_5ForCausalLM(qwen_config())
    initialise_state_mixers(model)
    return model


def main(granite: Annotated[Path, typer.Option()], qwen: Annotated[Path, typer.Option()]) -> None:
    """Writes both models with their weights before training."""
    for model, folder in ((initial_granite(), granite), (initial_qwen(), qwen)):
        model.save_pretrained(folder)
        print(f"{folder}: {model.num_parameters():,} parameters")


if __name__ == "__main__":
    typer.run(main)
