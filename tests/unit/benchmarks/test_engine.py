"""The GPU benchmark's floors are the anchor's, and its prefills do the engine's work; tried on the CPU."""

from dataclasses import replace

import pytest

from benchmarks.engine.gpu import WORKS, Decode, Prefill, floor_ms, prefill_steps, reach_ms, shrunk, shrunk_works
from benchmarks.shapes import GRANITE_H_MICRO, QWEN35_4B, SHAPES
from headrace.forward.forward_batch import check_inputs
from headrace.forward.sequence_input import SequenceInput

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
    assert floor_ms(work, GRANITE_H_MICRO) == pytest.approx(ANCHOR_FLOORS_MS[work.name], rel=0.05)


def test_another_shape_has_to_reach_the_same_fraction_of_its_floor() -> None:
    for work in WORKS:
        if work.reach_ms is not None:
            target = reach_ms(work, QWEN35_4B)
            assert target is not None
            assert target / floor_ms(work, QWEN35_4B) == pytest.approx(work.reach_ms / floor_ms(work, GRANITE_H_MICRO))


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
    for shape in SHAPES.values():
        mixers = {layer.mixer for layer in shrunk(shape).layers}
        assert mixers == {"attention", "state"}
    assert any(isinstance(work, Decode) for work in shrunk_works(WORKS))
    assert replace(WORKS[0], num_tokens=64) in shrunk_works(WORKS)
