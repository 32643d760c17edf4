"""Settings of a node, and the passes that it captures at its start: a changed setting captures anew what depends on it.

Captures are faked and the model has no layers: compared are the batches that would have been captured.
"""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.engine import runner as runner_module
from headrace.engine.graphs.captured_passes import Captured
from headrace.engine.runner import ModelRunner
from headrace.engine.warm_up import warm_up
from headrace.forward.forward_batch import ForwardBatch
from headrace.forward.memory import CacheMemory
from headrace.kernels.attention.prefill import PagedChunks
from headrace.models.model import HybridModel
from headrace.models.weights import load_model
from tests.support.engine.mtp_checkpoints import add_mtp

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="its captures are no CUDA graphs")

SETTINGS: dict[str, Any] = {
    "max_step_tokens": 32,
    "max_running": 4,
    "max_tokens": 64,
    "max_drafts": 2,
    "graphs": True,
    "with_mtp": True,
}
KINDS = {"decode", "prefill", "mixed", "draft check", "mixed draft check", "draft"}

Shape = tuple[int, ...]


class Passes:
    """Shapes of the captured passes by kind, in the order of their captures."""

    def __init__(self) -> None:
        self.captured: dict[str, list[Shape]] = {}
        self._capturing: list[Shape] | None = None

    def see(self, batch: ForwardBatch) -> None:
        """Notes rows, decodes among them, and for both sorts of rows how long their block tables are."""
        if self._capturing is None:
            return
        shape = [len(batch.tokens_T), batch.num_decodes]
        if batch.decode is not None:
            contexts = batch.decode.attention.contexts
            shape += [contexts.rows_each, contexts.table_NM.shape[1]]
        if batch.prefill is not None:
            chunks = batch.prefill.attention.chunks
            assert isinstance(chunks, PagedChunks)
            shape.append(chunks.table_NM.shape[1])
        self._capturing.append(tuple(shape))

    def capture(self, kind: str, work: Callable[[], Tensor]) -> Captured:
        self._capturing = self.captured.setdefault(kind, [])
        logits = work()
        self._capturing = None
        return Captured(lambda: None, logits)


@pytest.fixture
def captured(tiny_checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, list[Shape]]]:
    """`captured(max_running=8)`: the passes of a node with the changed setting, all in this process."""
    path = Path(shutil.copytree(tiny_checkpoint("qwen35"), tmp_path / "mtp"))
    add_mtp(path)
    passes = Passes()

    def hidden(model: HybridModel, batch: ForwardBatch, *_: object) -> Tensor:
        passes.see(batch)
        rows = batch.tokens_T if batch.logit_rows is None else batch.logit_rows
        return torch.zeros(len(rows), model.config.hidden_size)

    monkeypatch.setattr(HybridModel, "hidden", hidden)
    monkeypatch.setattr(HybridModel, "draft_hidden", hidden)
    monkeypatch.setattr(runner_module, "CudaCapture", lambda kind, num_graphs: partial(passes.capture, kind))

    def of_a_node(**changes: Any) -> dict[str, list[Shape]]:
        settings = SETTINGS | changes
        model = load_model(str(path), torch.float32, "cpu", with_mtp=settings.pop("with_mtp"))
        passes.captured = {}
        warm_up(ModelRunner(model, CacheMemory(model.cache_layout(16), 16, 12)), **settings)
        return passes.captured

    return of_a_node


def test_a_node_captures_every_kind_of_pass_for_each_size(captured) -> None:
    passes = captured()
    assert passes.keys() == KINDS
    for kind in KINDS - {"draft"}:
        assert len(set(passes[kind])) == len(passes[kind]), kind
    a_pass_each_and_both_behind_a_check = 2 + 2
    assert [rows for rows, *_ in passes["draft"]] == [
        rows for rows in (4, 2, 1) for _ in range(a_pass_each_and_both_behind_a_check)
    ]
    assert [rows for rows, *_ in passes["decode"]] == [4, 2, 1]
    assert [(rows, each) for rows, _, each, _ in passes["draft check"]] == [
        *((12, 3), (6, 3), (3, 3)),
        *((8, 2), (4, 2), (2, 2)),
    ]
    assert [(rows, each) for rows, _, each, *_ in passes["mixed draft check"]] == [(12 + 32, 3), (8 + 32, 2)]


CHANGES: tuple[tuple[dict[str, Any], set[str]], ...] = (
    ({"max_running": 8}, {"decode", "mixed", "draft check", "mixed draft check", "draft"}),
    ({"max_step_tokens": 64}, {"prefill", "mixed", "mixed draft check"}),
    ({"max_tokens": 1024}, KINDS),  # block tables are longer
    ({"max_drafts": 3}, {"draft check", "mixed draft check", "draft"}),
    ({"max_drafts": 1}, {"draft check", "mixed draft check", "draft"}),
    ({"max_drafts": 0}, {"draft check", "mixed draft check", "draft"}),
    ({"with_mtp": False}, {"draft"}),
    ({"graphs": False}, KINDS),
    ({}, set()),
)


@pytest.mark.parametrize(("changes", "kinds"), CHANGES, ids=[str(changes) for changes, _ in CHANGES])
def test_a_changed_setting_captures_anew_what_depends_on_it(changes: dict[str, Any], kinds: set[str], captured) -> None:
    before = captured()
    after = captured(**changes)
    assert {kind for kind in KINDS if before.get(kind) != after.get(kind)} == kinds
