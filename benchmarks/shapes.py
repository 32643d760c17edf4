"""The model shapes that benchmarks speak of: real sizes, no weights."""

from headrace.models.config import AttentionConfig, GatedDeltaConfig, LayerConfig, Mamba2Config, ModelConfig

_ATTENTION, _STATE = LayerConfig("attention", "dense"), LayerConfig("state", "dense")

GRANITE_H_MICRO = ModelConfig(
    architecture="GraniteMoeHybridForCausalLM",
    vocab_size=100352,
    max_position=131072,
    hidden_size=2048,
    intermediate_size=8192,
    norm_eps=1e-5,
    tied_embeddings=True,
    layers=tuple(_ATTENTION if layer in (5, 15, 25, 35) else _STATE for layer in range(40)),
    attention=AttentionConfig(num_heads=32, num_kv_heads=8, head_dim=64, scale=0.015625),
    state=Mamba2Config(num_heads=64, head_dim=64, state_size=128, num_groups=1, conv_taps=4, has_conv_bias=True),
    moe=None,
    embedding_multiplier=12,
    residual_multiplier=0.22,
    logits_divisor=8,
)

QWEN35_4B = ModelConfig(
    architecture="Qwen3_5ForConditionalGeneration",
    vocab_size=248320,
    max_position=262144,
    hidden_size=2560,
    intermediate_size=9216,
    norm_eps=1e-6,
    tied_embeddings=True,
    layers=(_STATE, _STATE, _STATE, _ATTENTION) * 8,
    attention=AttentionConfig(
        num_heads=16,
        num_kv_heads=4,
        head_dim=256,
        scale=256**-0.5,
        rotary_dim=64,
        rope_theta=1e7,
        has_qk_norm=True,
        has_output_gate=True,
    ),
    state=GatedDeltaConfig(num_key_heads=16, num_value_heads=32, key_dim=128, value_dim=128, conv_taps=4),
    moe=None,
)

SHAPES = {"qwen35-4b": QWEN35_4B, "granite-h-micro": GRANITE_H_MICRO}
