"""Random checkpoints of every supported family, small enough for unit tests, as transformers saves them.

The weights are random but not meaningless: matrices are scaled by their fan-in, so that logits spread
and greedy decoding wanders over many tokens, and the decay parameters cover fast and slow heads, so that
a lost or stale state changes the next token. A byte-level tokenizer with a chat template lies beside the
weights: a router can serve the folder as it is.
"""

import math
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    FalconH1Config,
    GenerationConfig,
    GraniteMoeHybridConfig,
    JambaConfig,
    KimiLinearConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    NemotronHConfig,
    OlmoHybridConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig
from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig

FAMILIES = (
    "falcon_h1",
    "granite",
    "granite_moe",
    "jamba",
    "kimi_linear",
    "lfm2",
    "lfm2_moe",
    "qwen35",
    "qwen35_moe",
    "qwen3_next",
    "nemotron_h",
    "nemotron_h_moe",
    "olmo_hybrid",
)
VOCAB_SIZE = 512
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)  # ids 0, 1, 2
END_OF_TEXT_ID, TURN_END_ID = 0, 2

# What each residual branch ends with: kept small, so that float32 noise does not grow from layer to layer.
BRANCH_OUTPUTS = (
    "out_proj.weight",
    "o_proj.weight",
    "down_proj",
    "down_proj.weight",
    "output_linear.weight",
    "w2.weight",
)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

TOKENIZER_TEXT = """
The code of June is 471. Mia has the red kite. What is the code of June? The answer of the assistant to
the user is that the river turns the wheel of the mill, and the miller tells the children stories about
the water. Between the mountain and the valley a narrow channel carries the stream over stones and under
bridges; where it falls, a turbine spins and lamps begin to glow in every window of the village. Nobody
remembers who first dug the headrace, though grandmothers claim it was finished before winter. Question
and answer, system and prompt, token after token: please write a short poem which mentions seven birds,
three wooden boats and one yellow umbrella.
"""


def make_checkpoint(path: str | Path, family: str, seed: int = 0) -> Path:
    """Writes a checkpoint of `family` (one of FAMILIES), with a tokenizer; `seed` decides the weights."""
    path = Path(path)
    model = build_model(tiny_config(family), seed)
    model.save_pretrained(path)
    build_tokenizer().save_pretrained(path)
    return path


def build_model(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A transformers model in float32 with useful random weights."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        randomize_weights(model, seed)
    model.generation_config = GenerationConfig(
        eos_token_id=[END_OF_TEXT_ID, TURN_END_ID], bos_token_id=END_OF_TEXT_ID, pad_token_id=END_OF_TEXT_ID
    )
    return model


def load_oracle(path: str | Path) -> PreTrainedModel:
    """The checkpoint as transformers runs it: float32 on CPU."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def randomize_weights(model: PreTrainedModel, seed: int) -> None:
    """Fan-in scaled matrices, norms near their identity, decay rates from fast to slow."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in [*model.named_parameters(), *correction_biases(model)]:
        noise = torch.randn(weight.shape, generator=generator)
        if name.endswith("A_log"):
            weight.copy_(torch.linspace(math.log(0.05), math.log(4.0), weight.numel()).view_as(weight))
        elif name.endswith(("dt_bias", "dt_proj.bias")):
            weight.copy_(noise * 0.5 - 2.0)
        elif name.endswith((".D", "norm.weight")) or "layernorm" in name:
            weight.add_(noise * 0.1)
        elif name.endswith("bias"):
            weight.copy_(noise * 0.1)
        elif name.endswith(BRANCH_OUTPUTS):
            weight.copy_(noise * 0.5 * weight.shape[-1] ** -0.5)
        elif weight.dim() >= 2:
            weight.copy_(noise * weight.shape[-1] ** -0.5)


def correction_biases(model: PreTrainedModel) -> list[tuple[str, torch.Tensor]]:
    """Routers' biases, which are buffers in some families."""
    return [
        (name, buffer) for name, buffer in model.named_buffers() if name.endswith(("correction_bias", "expert_bias"))
    ]


def tiny_config(family: str) -> PreTrainedConfig:
    """A config of four layers, three of them recurrent; no ratio that code could get wrong (heads, groups) is one."""
    match family:
        case "granite":
            return granite_config(num_local_experts=0, mamba_n_groups=1)
        case "granite_moe":
            return granite_config(num_local_experts=6, num_experts_per_tok=2, mamba_n_groups=2)
        case "falcon_h1":
            return falcon_h1_config()
        case "jamba":
            return jamba_config()
        case "kimi_linear":
            return kimi_linear_config()
        case "lfm2":
            return Lfm2Config(**lfm2_fields(), block_ff_dim=200, block_multiple_of=24)
        case "lfm2_moe":
            return Lfm2MoeConfig(
                **lfm2_fields(),
                num_dense_layers=1,
                num_experts=6,
                num_experts_per_tok=3,
                moe_intermediate_size=48,
                intermediate_size=96,
                routed_scaling_factor=1.5,
            )
        case "qwen35":
            return Qwen3_5TextConfig(**qwen_fields(), intermediate_size=96, tie_word_embeddings=True)
        case "qwen35_moe":
            return Qwen3_5MoeTextConfig(**qwen_fields(), **qwen_moe_fields())
        case "qwen3_next":
            return Qwen3NextConfig(**qwen_fields(), **qwen_moe_fields(), intermediate_size=96, mlp_only_layers=[1])
        case "nemotron_h":
            return nemotron_h_config(layers_block_type=pattern("M-M*M"), intermediate_size=80)
        case "nemotron_h_moe":
            return nemotron_h_config(
                layers_block_type=pattern("MEM*EM-"), intermediate_size=80, **nemotron_moe_fields()
            )
        case "olmo_hybrid":
            return olmo_hybrid_config()
    raise ValueError(f"family {family!r} is not one of {', '.join(FAMILIES)}")


def granite_config(**fields: object) -> GraniteMoeHybridConfig:
    return GraniteMoeHybridConfig(
        **common_fields(),
        intermediate_size=48,
        shared_intermediate_size=96,
        layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        tie_word_embeddings=True,
        mamba_n_heads=8,
        mamba_d_head=16,
        mamba_d_state=24,
        mamba_expand=2,
        embedding_multiplier=0.8,
        residual_multiplier=0.8,
        attention_multiplier=0.2,
        logits_scaling=2.0,
        **fields,
    )


def nemotron_h_config(**fields: object) -> NemotronHConfig:
    sizes: dict[str, object] = {
        "head_dim": 48,
        "mamba_num_heads": 6,
        "mamba_head_dim": 24,
        "ssm_state_size": 16,
        "n_groups": 3,
        "conv_kernel": 4,
        "time_step_min": 1e-9,  # transformers raises the time steps of prompts to it, not those of answers
    }
    common = common_fields()
    del common["num_hidden_layers"]
    return NemotronHConfig(**common | sizes | fields)


def nemotron_moe_fields() -> dict[str, object]:
    return {
        "n_routed_experts": 12,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
        "moe_intermediate_size": 48,
        "moe_shared_expert_intermediate_size": 32,
        "moe_latent_size": 48,
    }


def pattern(letters: str) -> list[str]:
    """Nemotron's layers, a letter each."""
    kinds = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
    return [kinds[letter] for letter in letters]


def olmo_hybrid_config(**fields: object) -> OlmoHybridConfig:
    """transformers saves the convolutions of keys and values right only if these are of one size."""
    sizes: dict[str, object] = {
        "intermediate_size": 96,
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 16,
        "rope_parameters": None,
    }
    return OlmoHybridConfig(**common_fields() | sizes | fields)


def kimi_linear_config(**fields: object) -> KimiLinearConfig:
    """Heads of 24 and 20 values, latents of 48 and 8, three delta heads, six experts in two groups."""
    common = {**common_fields(), "vocab_size": 517, "hidden_size": 80, "num_key_value_heads": 4}
    sizes: dict[str, object] = {
        "intermediate_size": 96,
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
        "kv_lora_rank": 48,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 8,
        "v_head_dim": 20,
        "linear_num_heads": 3,
        "linear_head_dim": 24,
        "num_experts": 6,
        "num_experts_per_token": 2,
        "num_shared_experts": 2,
        "num_expert_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 48,
        "routed_scaling_factor": 1.5,
    }
    return KimiLinearConfig(**common | sizes | fields)


def lfm2_fields() -> dict[str, object]:
    """Heads of 48 and a vocabulary that is no multiple of 8."""
    fields = {"vocab_size": 517, "hidden_size": 144, "num_attention_heads": 3, "num_key_value_heads": 1}
    return {**common_fields(), **fields, "layer_types": ["conv", "conv", "full_attention", "conv"]}


def falcon_h1_config() -> FalconH1Config:
    """Heads of 80 and of 24, three groups, each factor another number."""
    return FalconH1Config(
        **{**common_fields(), "hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1, "vocab_size": 515},
        head_dim=80,
        intermediate_size=112,
        mamba_d_ssm=144,
        mamba_n_heads=6,
        mamba_d_head=24,
        mamba_n_groups=3,
        mamba_d_state=16,
        mamba_chunk_size=32,
        lm_head_multiplier=1.3,
        embedding_multiplier=1.7,
        mlp_multipliers=[0.9, 0.8],
        key_multiplier=1.2,
        attention_out_multiplier=0.85,
        attention_in_multiplier=1.1,
        ssm_multipliers=[1.15, 0.95, 1.25, 0.75, 1.05],
        ssm_in_multiplier=1.4,
        ssm_out_multiplier=0.7,
        rope_parameters={"rope_type": "default", "rope_theta": 1e11},
    )


def jamba_config(**fields: object) -> JambaConfig:
    """Heads of 48, states of 6 numbers, experts in the second and fourth layer."""
    sizes: dict[str, object] = {
        "hidden_size": 96,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 515,
        "intermediate_size": 80,
        "attn_layer_period": 4,
        "attn_layer_offset": 2,
        "num_experts": 5,
        "mamba_d_state": 6,
        "mamba_dt_rank": 7,
    }
    return JambaConfig(**common_fields() | sizes | fields)


def qwen_fields() -> dict[str, object]:
    return {
        **common_fields(),
        "head_dim": 32,
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
    }


def qwen_moe_fields() -> dict[str, object]:
    return {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 32,
    }


def common_fields() -> dict[str, object]:
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "bos_token_id": END_OF_TEXT_ID,
        "eos_token_id": END_OF_TEXT_ID,
        "pad_token_id": END_OF_TEXT_ID,
    }


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of at most VOCAB_SIZE tokens, so every string has an encoding."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TOKENIZER_TEXT], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=TURN_END, pad_token=END_OF_TEXT
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast
