"""Checks of drafts and chunks of prompts in one pass: rows and states in Triton's interpreter, answers in torch.

CUDA has its own tests.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path

import pytest
import torch

from headrace.cache.tails import Tail
from headrace.engine.graphs.mixed_inputs import MixedInputs
from headrace.engine.graphs.verify_inputs import VerifyInputs
from headrace.engine.runner import ModelRunner
from headrace.forward.memory import CacheMemory
from headrace.forward.sequence_input import SequenceInput
from headrace.models.model import HybridModel
from headrace.models.weights import load_config, load_model, random_model
from headrace.request import Request
from headrace.speculation.config import SpeculationConfig
from headrace.speculation.draft_count import FixedCount, Offer, StepPrice
from tests.support.engine.checks import LENGTHS_BEFORE, behind_a_check, drafted
from tests.support.engine.drafters import ANSWER, MTP_DRAFTS, RANDOM, ROOMY, together
from tests.support.engine.driving import request, small_engine
from tests.support.engine.interpreted import (
    BLOCKS_EACH,
    assert_same_memory,
    capture_all,
    forget_all,
    step,
    triton_on_the_cpu,
)
from tests.support.engine.mtp_checkpoints import add_mtp
from tests.support.engine.oracle import random_prompt

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU it is test_cuda.py that does this")
MAX_TOKENS = BLOCKS_EACH * 16
NGRAMS = SpeculationConfig("ngram", "fixed", 3)


@pytest.fixture(scope="module")
def with_layer(tiny_checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`with_layer("qwen35")`: a checkpoint of that family with an MTP layer."""

    def made(family: str) -> Path:
        path = Path(shutil.copytree(tiny_checkpoint(family), tmp_path_factory.mktemp("mtp") / family))
        add_mtp(path)
        return path

    return made


@pytest.fixture
def model(request: pytest.FixtureRequest, tiny_checkpoint, with_layer) -> HybridModel:
    """Of a family, with an MTP layer or, "attention last", without one."""
    if request.param != "attention last":
        return load_model(str(with_layer(request.param)), torch.float32, "cpu", with_mtp=True)
    config = load_config(str(tiny_checkpoint("granite")))
    layers = tuple(sorted(config.layers, key=lambda layer: layer.mixer == "attention"))
    return random_model(replace(config, layers=layers))


def runners_behind(lengths: tuple[int, ...], model: HybridModel) -> tuple[ModelRunner, ModelRunner]:
    """Two runners behind prompts of these lengths; the second one has captured its passes."""
    plain, ours = (ModelRunner(model, CacheMemory(model.cache_layout(16), 6 * BLOCKS_EACH, 14)) for _ in range(2))
    prompts = [random_prompt(n, seed=n) for n in lengths]
    for runner in (plain, ours):
        forget_all(runner)
        runner.forward([step(i, prompt, 0, len(prompt), None, i) for i, prompt in enumerate(prompts)])
    capture_all(ours, 4, 16, MAX_TOKENS, forms=triton_on_the_cpu)
    return plain, ours


def assert_same_step(
    ours: ModelRunner, inputs: list[SequenceInput], plain: ModelRunner, known: list[SequenceInput]
) -> None:
    """`ours` replays `inputs` in one pass as `plain` computes `known`: the same logits, draws, entries and states."""
    [(passes, _)] = ours._graphs._replays(inputs)
    assert passes in ours._graphs.mixed_checks
    replayed = ours._graphs.run(inputs)
    assert replayed is not None and replayed.is_drawn
    expected = plain.forward(known).rows
    torch.testing.assert_close(replayed.logits, expected, atol=2e-3, rtol=1e-3)
    assert ours._drawn[: len(expected)].tolist() == expected.argmax(-1).tolist()
    assert_same_memory(ours, plain)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["qwen35", "nemotron_h_moe", "attention last"], indirect=True)
@torch.inference_mode()
def test_a_check_and_chunks_in_one_pass_equal_a_plain_step_row_for_row_and_state_for_state(model: HybridModel) -> None:
    """Three drafts, one and none, and padding; chunks with logits, without, and one that leaves a state on its way."""
    plain, ours = runners_behind((17, 31, 15), model)
    fourth, fifth = random_prompt(20, seed=4), random_prompt(30, seed=5)
    checked = [
        drafted(0, [1, 2, 3, 4], 17),
        drafted(1, [5], 31, written=32, dst=1),
        drafted(2, [6, 7], 15, written=16),
    ]
    first = [*checked, step(3, fourth, 0, 6, None, 3, num_logits=0), step(4, fifth, 0, 5, None, 4)]
    assert_same_step(ours, first, plain, first)
    # Fewer rows want logits in a pass of the same size.
    second = [
        replace(drafted(0, [7, 8], 20), tail=Tail(0, 17, None)),
        replace(drafted(2, [8, 9, 1], 17), src_slot=11, tail=Tail(2, 16, None)),
        step(4, fifth, 5, 18, 4, 4, emit=((16, 12),)),
    ]
    assert_same_step(ours, second, plain, second)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["qwen35", "nemotron_h_moe"], indirect=True)
@torch.inference_mode()
def test_a_check_behind_another_one_and_a_chunk_in_one_pass_find_their_places(model: HybridModel) -> None:
    plain, ours = runners_behind(LENGTHS_BEFORE, model)
    behind, known = behind_a_check((plain, ours), ours)
    chunk = step(3, random_prompt(20, seed=4), 0, 9, None, 3)
    assert_same_step(ours, [*behind, chunk], plain, [*known, chunk])


# ------------------------------------------------------------ answers


@dataclass(frozen=True)
class Replay:
    """A mixed pass with a check: rows of its sequences, and its chunks."""

    lengths: tuple[int, ...]
    num_behind: int
    wants_logits: tuple[bool, ...]


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[Replay]:
    noted: list[Replay] = []
    load = MixedInputs.load

    def load_and_note(inputs: MixedInputs, entries: list[SequenceInput], num_rows: int) -> None:
        if isinstance(inputs._singles, VerifyInputs):
            single = [entry for entry in entries if not entry.is_prompt]
            chunks = entries[len(single) :]
            noted.append(
                Replay(
                    tuple(len(entry.tokens) for entry in single),
                    sum(entry.behind is not None for entry in single),
                    tuple(bool(entry.num_logits) for entry in chunks),
                )
            )
        load(inputs, entries, num_rows)

    monkeypatch.setattr(MixedInputs, "load", load_and_note)
    return noted


class Varied(FixedCount):
    """Drafts of one token up to as many as there may be, in turn."""

    def __init__(self) -> None:
        super().__init__(max_step_drafts=64)
        self._numbers = cycle((3, 1, 2, 3, 2))

    def counts(self, offers: list[Offer], price: StepPrice, now_s: float) -> list[int]:
        return [min(offer.most, next(self._numbers)) for offer in offers]


def asked() -> list[Request]:
    """More than run at once, so that prompts come beside drafts, some of several chunks and some of few tokens."""
    lengths = (5, 40, 9, 17, 70, 6, 7, 33, 4, 90, 12, 3, 60, 5, 5, 21)
    return [
        request(random_prompt(n, seed=n), replace((ANSWER, RANDOM)[i % 3 == 2], max_tokens=21 + 7 * (i % 4)))
        for i, n in enumerate(lengths)
    ]


def answers(path: Path, speculation: SpeculationConfig, *, is_captured: bool) -> list[list[int]]:
    settings = {"overlap": True, "max_running": 6, "max_step_tokens": 40, "cache_bytes": ROOMY}
    built = small_engine(path, speculation=speculation, **settings)
    if built.engine.drafting is not None:
        built.engine.drafting.count = Varied()
    if is_captured:
        capture_all(built.engine._runner, 6, 40, 256)
    runs = together(built, asked())
    return [run.tokens for run in runs]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen35", "nemotron_h_moe"])
@pytest.mark.parametrize("speculation", [MTP_DRAFTS, NGRAMS], ids=["mtp", "ngram"])
def test_drafts_beside_prompts_change_nobodys_tokens(
    speculation: SpeculationConfig, family: str, with_layer, replays: list[Replay]
) -> None:
    path = with_layer(family)
    plain = answers(path, SpeculationConfig(), is_captured=False)
    assert answers(path, speculation, is_captured=False) == plain and not replays
    assert answers(path, speculation, is_captured=True) == plain
    assert {length for each in replays for length in each.lengths} >= {2, 3, 4}
    assert {wants for each in replays for wants in each.wants_logits} == {False, True}
    if speculation is MTP_DRAFTS:  # where matches in the text are rare, so is what else is beside them
        assert any(len(each.wants_logits) > 1 for each in replays)
        assert any(each.num_behind for each in replays)
