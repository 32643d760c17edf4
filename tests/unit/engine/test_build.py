"""An engine's config reaches what it sets for the process."""

from collections.abc import Iterator

import pytest
import torch

from headrace.kernels.lib import dispatch
from tests.support.engine.driving import small_engine


@pytest.fixture
def on_a_hopper_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(dispatch, "is_hopper", lambda device: True)
    yield
    dispatch.set_hopper_kernels(True)


def test_hopper_kernels_are_used_unless_the_config_forbids_them(tiny_checkpoint, on_a_hopper_gpu) -> None:
    x = torch.zeros(1, dtype=torch.bfloat16)
    small_engine(tiny_checkpoint("granite"), hopper_kernels=False)
    assert not dispatch.runs_hopper(x)
    small_engine(tiny_checkpoint("granite"))
    assert dispatch.runs_hopper(x)
