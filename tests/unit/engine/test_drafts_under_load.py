"""Drafts beside prompts that never end, on a device whose steps take a known time."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.pinned_drafts import PinnedDrafts
from headrace.engine.build import build_engine
from headrace.speculation.config import SpeculationConfig
from headrace.step_costs import StepCosts
from tests.support.engine.driving import GREEDY, SMALL, Run, request, submit
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


def answered(path: Path, speculation: SpeculationConfig) -> tuple[int, FakeDevice]:
    """Tokens of the answers that eight clients get, each asking again at once; right drafts are pinned."""
    device = FakeDevice(TRUTH, make_s=8e-3, pass_s=0.33e-3)
    sizes = {"cache_bytes": 256 << 20, "max_running": 8, "max_step_tokens": 1024}
    config = replace(SMALL, speculation=speculation, overlap=True, **sizes)
    built = build_engine(str(path), config, device.clock)
    if speculation.drafter == "mtp":
        capture_layer(built.engine._runner, 8, 2048)
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


def test_drafts_that_pay_beside_prompts_go_on_within_a_gap(path: Path) -> None:
    """While the host takes as long as a step with drafts has room for: no step may wait for it."""
    plain, _ = answered(path, SpeculationConfig())
    drafted, device = answered(path, SpeculationConfig("mtp", "auto", 3))
    last = [shape for shape, _ in device.steps[len(device.steps) // 2 :]]
    assert sum(shape.num_drafts > 0 for shape in last) > len(last) / 3
    assert drafted > 1.05 * plain
