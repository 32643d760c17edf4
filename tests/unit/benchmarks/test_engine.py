"""The GPU benchmark's floors are the anchor's, and its prefills do the engine's work; tried on the CPU."""

import pytest
import torch

from benchmarks.engine.gpu import prefill_steps
from benchmarks.engine.targets import TARGETS, Target, floor_ms, num_kept_weights
from benchmarks.engine.works import WORKS, Decode, Prefill, named, shrunk_works
from benchmarks.shapes import GRANITE_H_MICRO, MOE_SHAPES, QWEN35_35B_A3B, SHAPES, shrunk
from benchmarks.timing import BYTES_A_SECOND
from headrace.forward.forward_batch import check_inputs
from headrace.forward.sequence_input import SequenceInput
from headrace.models.flops import num_weights
from headrace.models.random_weights import RandomWeights
from headrace.models.weights import FAMILIES

ALL_SHAPES = SHAPES | MOE_SHAPES

ANCHOR_FLOORS_MS = {  # shared/anchors/h200.md
    "prefill 2,048": 17,
    "prefill 8,192": 67,
    "prefill 32,768": 270,
    "prefill 16 x 4,096": 65536 / 123,
    "decode batch 1": 1.5,
    "decode batch 16": 1.8,
    "decode batch 64": 2.7,
    "decode batch 256": 6.5,
    "decode batch 64, context 8,192": 3.6,
}


@pytest.mark.parametrize("work", [work for work in WORKS if work.name in ANCHOR_FLOORS_MS], ids=lambda work: work.name)
def test_floors_are_those_of_the_anchor(work: Prefill | Decode) -> None:
    """But for decodes' states, which the anchor writes in each step, and tails once in 16."""
    layout = GRANITE_H_MICRO.cache_layout("", "bfloat16", 16, "bfloat16")
    saved_ms = 1e3 * 15 / 16 * work.num_sequences * layout.state_bytes / BYTES_A_SECOND
    floor = floor_ms(work, GRANITE_H_MICRO) + (saved_ms if isinstance(work, Decode) else 0)
    assert floor == pytest.approx(ANCHOR_FLOORS_MS[work.name], rel=0.05)


@pytest.mark.parametrize(("name", "floor"), [("granite-4.0-h-tiny", 31), ("qwen3.5-35b-a3b", 61)])
def test_a_mixtures_prefill_is_charged_for_the_experts_that_tokens_choose(name: str, floor: float) -> None:
    (work,) = named(["prefill 8,192"])
    assert floor_ms(work, MOE_SHAPES[name]) == pytest.approx(floor, rel=0.03)  # shared/anchors/h200.md


def test_a_mixtures_decode_reads_the_experts_that_any_sequence_reaches() -> None:
    alone, many = (floor_ms(work, QWEN35_35B_A3B) for work in named(["decode batch 1", "decode batch 64"]))
    expert_ms = 1e3 * 40 * 2 * 3 * 512 * 2048 / BYTES_A_SECOND  # one of each layer
    reached = 222.4  # of 256, by 64 tokens that choose 8 each
    assert 8 * expert_ms < alone < reached * expert_ms / 5
    assert reached * expert_ms < many < 1.2 * reached * expert_ms


@pytest.mark.parametrize("shape", ALL_SHAPES)
def test_fp8s_floors_take_16_bits_for_the_weights_that_stay_in_them(shape: str) -> None:
    config = shrunk(ALL_SHAPES[shape])
    family, source = FAMILIES[config.architecture], _Recorder()
    for i in range(len(config.layers)):
        family.load_layer(source, f"layers.{i}", config, i)
    head = config.vocab_size * config.hidden_size
    shared_gates = sum(name.endswith("shared_expert_gate.weight") for name in source.kept) * config.hidden_size
    assert num_kept_weights(config) == head + sum(source.kept.values()) - shared_gates  # these are left out: tiny
    if config.moe is None:
        assert num_weights(config) - num_kept_weights(config) == sum(source.quantised.values())


class _Recorder(RandomWeights):
    """Sizes of the matrices that a family loads: those that are quantised at load, and those that are kept."""

    def __init__(self) -> None:
        super().__init__(torch.float32, torch.device("cpu"))
        self.quantised: dict[str, int] = {}
        self.kept: dict[str, int] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        tensor = super().take(name, shape, dtype)
        if len(shape) == 2:
            self.kept[name] = tensor.numel()
        return tensor

    def matrix(self, name: str, shape: tuple[int, int]) -> torch.Tensor:
        self.quantised[name] = shape[0] * shape[1]
        return super().take(name, shape)

    def experts(self, name: str, shape: tuple[int, int, int]) -> torch.Tensor:
        return super().take(name, shape)


def test_fp8_halves_the_floors_but_for_heads_states_and_blocks() -> None:
    for config in ALL_SHAPES.values():
        for work in WORKS:
            assert 0.5 < floor_ms(work, config, "fp8") / floor_ms(work, config) < 1


def test_targets_are_of_rows_that_exist() -> None:
    names = {work.name for work in WORKS}
    for (shape, _), rows in TARGETS.items():
        assert shape in ALL_SHAPES
        assert rows.keys() <= names


def test_a_target_may_be_a_multiple_of_the_floor() -> None:
    assert Target(reach_floors=1.5).ms(20.0) == 30.0
    assert Target(17.0).ms(20.0) == 17.0
    assert Target(vllm_ms=17.0).ms(20.0) is None


def test_rows_are_picked_by_their_whole_names() -> None:
    picked = named(["decode batch 1", "prefill 16 x*"])
    assert [work.name for work in picked] == ["prefill 16 x 4,096", "decode batch 1"]
    assert named([]) == list(WORKS)
    with pytest.raises(ValueError, match="no row is named decode batch: prefill 2,048; "):
        named(["decode batch"])


@pytest.mark.parametrize("work", [work for work in WORKS if isinstance(work, Prefill)], ids=lambda work: work.name)
@pytest.mark.parametrize("chunk", [1024, 8192])
def test_prefills_compute_every_uncached_token_once_and_leave_their_checkpoints(work: Prefill, chunk: int) -> None:
    steps = prefill_steps(work, chunk)
    for step in steps:
        check_inputs(step, 16)
        assert sum(len(share.tokens) for share in step) <= chunk
    shares: list[SequenceInput] = [share for step in steps for share in step]
    assert sum(len(share.tokens) for share in shares) == work.num_rows
    assert min(share.start for share in shares) == work.num_cached
    assert sum(share.num_logits for share in shares) == work.num_sequences
    at_ends = sum(0 < share.end < work.num_tokens for share in shares)
    kept = sum(len(share.emit) for share in shares)
    spread = (work.num_checkpoints - 1) * work.num_sequences
    assert kept <= spread <= kept + at_ends  # a boundary where a chunk ends needs no emission


def test_the_trial_shapes_are_whole_models() -> None:
    for shape in ALL_SHAPES.values():
        assert set(shrunk(shape).layers) == set(shape.layers)


def test_the_trial_works_are_the_same_rows_with_fewer_tokens() -> None:
    for small, work in zip(shrunk_works(WORKS), WORKS, strict=True):
        assert small.name == work.name
        assert small.num_rows <= work.num_rows / 32 + 16
