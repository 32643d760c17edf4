"""Floors and targets of `gpu-engine`: the chip's least time for a row, vLLM's milliseconds, and those that are asked.

vLLM 0.26's are of shared/anchors/h200.md, on one H200; what is asked is of the same page and of issue 18.
"""

from typing import Literal, NamedTuple

from benchmarks.engine.works import BLOCK_SIZE, Decode, Prefill
from benchmarks.timing import BYTES_A_SECOND, FLOPS_A_SECOND, FP8_FLOPS_A_SECOND
from headrace.cache.tails import tail_interval
from headrace.models.config import GatedDeltaConfig, Mamba2Config, ModelConfig
from headrace.models.flops import num_weights, num_weights_met

WeightFormat = Literal["bf16", "fp8"]


class Target(NamedTuple):
    """One row's; None where neither page has a figure for that shape and format."""

    reach_ms: float | None = None
    vllm_ms: float | None = None
    reach_floors: float | None = None  # asked as a multiple of the floor

    def ms(self, floor: float) -> float | None:
        """The milliseconds that are asked."""
        return self.reach_ms if self.reach_floors is None else self.reach_floors * floor


TARGETS: dict[tuple[str, WeightFormat], dict[str, Target]] = {
    ("granite-h-micro", "bf16"): {
        "prefill 2,048": Target(30.0, 52.6),
        "prefill 8,192": Target(90.0, 111.5),
        "prefill 32,768": Target(380.0, 473.0),
        "prefill 16 x 4,096": Target(65536 / 90.0, 65536 / 71.5),
        "decode batch 1": Target(2.2, 3.49),
        "decode batch 16": Target(2.8, 3.88),
        "decode batch 64": Target(3.5, 6.13),
        "decode batch 256": Target(7.3, 17.28),
        "decode batch 64, context 8,192": Target(4.6, 8.69),
    },
    ("granite-h-micro", "fp8"): {
        "prefill 8,192": Target(62.0, 77.6),
        "prefill 16 x 4,096": Target(460.0, 568.0),
        "decode batch 1": Target(1.5, 3.91),
        "decode batch 16": Target(None, 3.83),
        "decode batch 64": Target(3.3, 7.77),
    },
    ("qwen35-4b", "bf16"): {  # asked of prefills: granite-h-micro's multiples of the floor
        "prefill 2,048": Target(39.54, 42.5),
        "prefill 8,192": Target(118.62, 132.0),
        "prefill 32,768": Target(500.84),
        "prefill 16 x 4,096": Target(959.73, 1023.0),
        "decode batch 1": Target(2.88, 3.57),
        "decode batch 16": Target(3.43),
        "decode batch 64": Target(3.9),
        "decode batch 256": Target(7.5),
        "decode batch 64, context 8,192": Target(11.12, 9.16),
    },
    ("qwen35-4b", "fp8"): {
        "prefill 2,048": Target(None, 59.9),
        "prefill 8,192": Target(78.0, 107.0),
        "prefill 16 x 4,096": Target(600.0, 782.0),
        "decode batch 1": Target(1.9, 2.94),
        "decode batch 64": Target(3.6, 4.18),
    },
    ("granite-4.0-h-tiny", "bf16"): {
        "prefill 8,192": Target(None, 82.7, reach_floors=1.5),
        "prefill 16 x 4,096": Target(None, 633.0, reach_floors=1.5),
        "decode batch 1": Target(None, 3.84),
        "decode batch 16": Target(None, 5.04),
        "decode batch 64": Target(None, 8.81),
        "decode batch 256": Target(None, 12.28),
    },
    ("qwen3.5-35b-a3b", "bf16"): {
        "prefill 8,192": Target(None, 151.0, reach_floors=1.5),
        "prefill 16 x 4,096": Target(None, 1157.0, reach_floors=1.5),
        "decode batch 1": Target(None, 4.03),
        "decode batch 64": Target(None, 17.2),
        "decode batch 256": Target(None, 27.8),
        "decode batch 64, context 8,192": Target(17.0, 18.2),
    },
    ("qwen3.5-35b-a3b", "fp8"): {
        "prefill 8,192": Target(None, 133.0, reach_floors=1.5),
        "prefill 16 x 4,096": Target(None, 1026.0, reach_floors=1.5),
        "decode batch 1": Target(None, 3.98),
        "decode batch 64": Target(11.0, 13.9),
        "decode batch 256": Target(None, 27.3),
    },
    ("nemotron-3-nano-30b-a3b", "bf16"): {
        "prefill 8,192": Target(reach_floors=1.5),
        "prefill 16 x 4,096": Target(reach_floors=1.5),
    },
}


def floor_ms(work: Prefill | Decode, config: ModelConfig, weight_format: WeightFormat = "bf16") -> float:
    """The least milliseconds that the chip needs: FLOPs over the matrix rates, or bytes over the copy rate.

    Every weight meets every token of a prefill, those of experts only the tokens that chose them. Every weight that any
    token meets, every state and every cached token is read once, and every state written once, or with tails once in an
    interval; states and blocks are bfloat16. Tails, attention and launch gaps are left out: a bound, not a plan.
    """
    kept, met = num_kept_weights(config), num_weights(config)
    weight_bytes, flops_a_second = (2, FLOPS_A_SECOND) if weight_format == "bf16" else (1, FP8_FLOPS_A_SECOND)
    weights_s = 2 * kept / FLOPS_A_SECOND + 2 * (met - kept) / flops_a_second
    layout = config.cache_layout("", "bfloat16", BLOCK_SIZE, "bfloat16")
    context = work.num_cached if isinstance(work, Prefill) else work.context
    has_tails = isinstance(work, Decode) and isinstance(config.state, Mamba2Config | GatedDeltaConfig)
    num_writes = 1 / tail_interval(BLOCK_SIZE) if has_tails else 1
    cached_bytes = (1 + num_writes) * layout.state_bytes + context * layout.block_bytes / BLOCK_SIZE
    read_bytes = 2 * kept + weight_bytes * (num_weights_met(config, work.num_rows) - kept)
    moving_s = (read_bytes + work.num_sequences * cached_bytes) / BYTES_A_SECOND
    return 1e3 * max(moving_s, work.num_rows * weights_s)


def num_kept_weights(config: ModelConfig) -> int:
    """Weights, of those that a token meets, which `quantization: fp8` leaves in 16 bits: those of the head, of routers
    and of the delta rule's beta and decay."""
    routers = config.moe.num_experts if config.moe is not None else 0
    beta_decay = 2 * config.state.num_value_heads if isinstance(config.state, GatedDeltaConfig) else 0
    num_moe_layers = sum(layer.feed_forward == "moe" for layer in config.layers)
    rows = config.vocab_size + num_moe_layers * routers + config.num_state_layers * beta_decay
    return rows * config.hidden_size
