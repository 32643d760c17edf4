"""OLMo-hybrid: gated delta net with beta up to 2, and attention that norms its queries and keys as whole rows.

Delta layers norm what a branch reads, attention layers what it gives. Released checkpoints do not rotate.
"""

import torch
from torch import Tensor

from headrace.kernels.dense.fp8 import stack_rows
from headrace.kernels.dense.linear import LinearWeight
from headrace.kernels.gdn.heads import GdnHeads
from headrace.models.branches import Branch, FeedForwardBranch, MixerBranch
from headrace.models.config import AttentionConfig, GatedDeltaConfig, LayerConfig, ModelConfig
from headrace.models.layers.attention import Attention
from headrace.models.layers.feed_forward import SwiGlu
from headrace.models.layers.gated_delta import GatedDelta, join_projections
from headrace.models.model import Family
from headrace.models.raw_config import RawConfig, even_share
from headrace.models.weight_files import WeightSource

DELTA_NORM_EPS = 1e-5  # of the gated norm, whatever the config gives for the others


def read_olmo_hybrid(raw: RawConfig) -> ModelConfig:
    raw.require("hidden_act", "silu")
    raw.require("attention_bias", False)
    num_layers, hidden, heads = (
        raw.count("num_hidden_layers"),
        raw.count("hidden_size"),
        raw.count("num_attention_heads"),
    )
    last = num_layers - 1 if num_layers < 4 else 3  # a model has one attention layer at least
    mixers = raw.mixers(lambda layer: "attention" if layer % 4 == last else "state")
    head_dim = even_share(hidden, "hidden_size", heads, "num_attention_heads")
    rotates = raw.has_rotary_embedding()
    key_heads = raw.count("linear_num_key_heads", heads)
    key_dim = raw.count("linear_key_head_dim", 3 * hidden // (4 * key_heads))
    return ModelConfig(
        architecture=raw.architecture,
        vocab_size=raw.count("vocab_size"),
        max_position=raw.max_position() if rotates else raw.count("max_position_embeddings"),
        hidden_size=hidden,
        intermediate_size=raw.count("intermediate_size"),
        norm_eps=raw.number("rms_norm_eps", 1e-6),
        tied_embeddings=raw.flag("tie_word_embeddings", False),
        layers=tuple(LayerConfig(mixer, "dense") for mixer in mixers),
        attention=AttentionConfig(
            num_heads=heads,
            num_kv_heads=raw.count("num_key_value_heads", heads),
            head_dim=head_dim,
            scale=head_dim**-0.5,
            rotary_dim=head_dim if rotates else 0,
            rope_theta=raw.rope_theta(),
            rope_scaling=raw.rope_scaling() if rotates else None,
            has_row_norm=True,
        ),
        state=GatedDeltaConfig(
            num_key_heads=key_heads,
            num_value_heads=raw.count("linear_num_value_heads", heads),
            key_dim=key_dim,
            value_dim=raw.count("linear_value_head_dim", 2 * key_dim),
            conv_taps=raw.count("linear_conv_kernel_dim", 4, least=2),
            beta_scale=2.0 if raw.flag("linear_allow_neg_eigval", True) else 1.0,
        ),
        moe=None,
        eos_token_ids=raw.eos_token_ids,
    )


def load_olmo_hybrid_layer(weights: WeightSource, prefix: str, config: ModelConfig, layer: int) -> tuple[Branch, ...]:
    hidden, index = config.hidden_size, config.mixer_index(layer)

    def norm(*names: str) -> Tensor:
        """The norm under the first of these names that the files have."""
        tensors = [f"{prefix}.{name}.weight" for name in names]
        stored = next((tensor for tensor in tensors if tensor in weights.remaining), tensors[0])
        return weights.take(stored, (hidden,), torch.float32)

    feed_forward = SwiGlu.load(weights, f"{prefix}.mlp", hidden, config.intermediate_size)
    if config.layers[layer].mixer == "attention":
        mixer = Attention.load(weights, f"{prefix}.self_attn", config.attention, index, hidden, config.norm_eps)
        # transformers writes the first as if it belonged to a delta layer.
        after_mixer = norm("post_attention_layernorm", "feedforward_layer_norm")
        return (
            MixerBranch(mixer, None, after_mixer),
            FeedForwardBranch(feed_forward, None, norm("post_feedforward_layernorm")),
        )
    assert isinstance(config.state, GatedDeltaConfig)
    return (
        MixerBranch(
            _load_delta(weights, f"{prefix}.linear_attn", config.state, index, hidden),
            norm("attention_layer_norm", "input_layernorm"),
        ),
        FeedForwardBranch(feed_forward, norm("feedforward_layer_norm", "post_attention_layernorm")),
    )


def _load_delta(weights: WeightSource, prefix: str, c: GatedDeltaConfig, index: int, hidden: int) -> GatedDelta:
    """A matrix for each of q, k, v, g (the gate), b and a, a convolution for each of q, k and v."""
    rows = {"q": c.key_size, "k": c.key_size, "v": c.value_size, "g": c.value_size}
    projections = [weights.matrix(f"{prefix}.{n}_proj.weight", (r, hidden)) for n, r in rows.items()]
    beta_decay = torch.cat([weights.take(f"{prefix}.{n}_proj.weight", (c.num_value_heads, hidden)) for n in ("b", "a")])
    convolutions = [weights.take(f"{prefix}.{n}_conv1d.weight", (rows[n], 1, c.conv_taps)) for n in ("q", "k", "v")]
    in_proj, apart = join_projections(stack_rows(projections), beta_decay)
    return GatedDelta(
        config=c,
        index=index,
        norm_eps=DELTA_NORM_EPS,
        in_proj=in_proj,
        beta_decay=apart,
        conv_weight=torch.cat(convolutions).squeeze(1),
        heads=GdnHeads(
            A=-weights.take(f"{prefix}.A_log", (c.num_value_heads,), torch.float32).exp(),
            dt_bias=weights.take(f"{prefix}.dt_bias", (c.num_value_heads,), torch.float32),
            beta_scale=c.beta_scale,
        ),
        norm_D=weights.take(f"{prefix}.o_norm.weight", (c.value_dim,), torch.float32),
        out_proj=LinearWeight(weights.matrix(f"{prefix}.o_proj.weight", (hidden, c.value_size))),
    )


OLMO_HYBRID = Family(read_olmo_hybrid, load_olmo_hybrid_layer)
