"""Drafts beside prompts that never end, on a device whose steps take a known time."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.pinned_drafts import PinnedDrafts
from headrace.engine.build import BuiltEngine, build_engine
from headrace.speculation.config import SpeculationConfig
from headrace.speculation.draft_count import AutoCount
from headrace.step_costs import StepCosts
from tests.support.engine.driving import GREEDY, SMALL, Run, request, serve, submit
from tests.support.engine.fake_device import FakeDevice
from tests.support.engine.interpreted import capture_layer
from tests.support.engine.mtp_checkpoints import add_mtp
from tests.support.engine.oracle import random_prompt

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="passes are captured on a GPU, and take their time")
# Eight answers cost what 24 of qwen35-4b do at 20,000 tokens, and prompts of 1,200 tokens what 9,600 do.
TRUTH = StepCosts(2.2e-3, 0.6e-3, 0.0, 1.0e-3, 107e-6, 0.0, check_s=2.0e-3, draft_s=60e-6)
GAP_S, SECONDS = 17e-3, 6.0


@pytest.fixture(scope="module")
def path(tiny_checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = Path(shutil.copytree(tiny_checkpoint("qwen35"), tmp_path_factory.mktemp("mtp") / "load"))
    add_mtp(path)
    return path


def engine_on(device: FakeDevice, path: Path, speculation: SpeculationConfig) -> BuiltEngine:
    """An engine for eight requests at once, of overlapped steps."""
    sizes = {"cache_bytes": 256 << 20, "max_running": 8, "max_step_tokens": 1024}
    config = replace(SMALL, speculation=speculation, overlap=True, **sizes)
    built = build_engine(str(path), config, device.clock)
    if speculation.drafter == "mtp":
        capture_layer(built.engine._runner, 8, 2048)
    return built


def answered(path: Path, speculation: SpeculationConfig) -> tuple[int, FakeDevice]:
    """Tokens of the answers that eight clients get, each asking again at once; accepted drafts are pinned."""
    device = FakeDevice(TRUTH, make_s=8e-3, pass_s=0.33e-3)
    built = engine_on(device, path, speculation)
    PinnedDrafts(built.engine._runner)
    device.compute_for(built)
    asked: list[Run] = []
    running: list[Run] = []
    end_s = device.now_s + SECONDS
    while device.now_s < end_s:
        while len(running) < 8:
            sampling = replace(GREEDY, max_tokens=128)
            run = submit(built, request(random_prompt(1200, seed=len(asked)), sampling, token_gap_s=GAP_S))
            asked.append(run)
            running.append(run)
        built.engine.admit()
        built.engine.step()
        for run in [each for each in running if each.is_finished]:
            built.engine.release(run.sequence)
            running.remove(run)
    return sum(len(run.tokens) for run in asked), device


@pytest.mark.slow
def test_drafts_that_pay_beside_prompts_go_on_within_a_gap(path: Path) -> None:
    """While the host takes as long as a step with drafts has room for: no step may wait for it."""
    plain, _ = answered(path, SpeculationConfig())
    drafted, device = answered(path, SpeculationConfig("mtp", "auto", 3))
    last = [shape for shape, _ in device.steps[len(device.steps) // 2 :]]
    assert sum(shape.num_drafts > 0 for shape in last) > len(last) / 3
    assert drafted > 1.05 * plain


class CountingProbes(AutoCount):
    """Counts the probes that it has proposed, and those that were timed."""

    def __init__(self) -> None:
        super().__init__(max_step_drafts=64)
        self.num_proposed = self.num_timed = 0

    def drafted(self, num_drafts: int) -> bool:
        is_probe = super().drafted(num_drafts)
        self.num_proposed += is_probe
        return is_probe

    def took(self, seconds, predicted_s, *, has_drafts, has_prompts, is_probe=False) -> None:
        self.num_timed += is_probe
        super().took(seconds, predicted_s, has_drafts=has_drafts, has_prompts=has_prompts, is_probe=is_probe)


@pytest.mark.parametrize("has_blocks", [True, False], ids=["made", "for which there are no blocks"])
def test_probes_are_timed_as_such_if_they_are_made(has_blocks: bool, path: Path) -> None:
    """Hardly a draft of an untrained layer is right, so that drafting ends and only probes go on."""
    device = FakeDevice(replace(TRUTH, step_s=4e-3, decode_s=0.1e-3), make_s=1e-3, pass_s=0.3e-3)
    built = engine_on(device, path, SpeculationConfig("mtp", "auto", 3))
    device.compute_for(built)
    engine, drafting = built.engine, built.engine.drafting
    assert drafting is not None
    drafting.count = count = CountingProbes()
    extend = engine._has_blocks
    engine._has_blocks = lambda chunk, *rest: (has_blocks or not chunk.sequence.drafts) and extend(chunk, *rest)
    prompts = [random_prompt(20, seed=seed) for seed in range(4)]
    serve(built, *(submit(built, request(prompt, replace(GREEDY, max_tokens=400))) for prompt in prompts))
    if has_blocks:
        assert count.num_timed == count.num_proposed > 1
    else:
        assert count.num_timed == 0
