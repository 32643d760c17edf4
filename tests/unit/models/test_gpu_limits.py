"""Models that a GPU's kernels do not take."""

import pytest

from headrace.models.config import UnsupportedModel
from headrace.models.weights import load_config, load_model, random_model
from tests.support.engine.checkpoint_edits import edit_config


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_experts": 1, "head_dim": 320}, "attention heads of 320: at most 256 are supported on a GPU"),
        ({"intermediate_size": 72}, "experts' inner size of 72: only multiples of 16 are supported on a GPU"),
        ({"hidden_size": 100}, "experts' inputs of 100: only multiples"),
    ],
)
def test_sizes_that_a_gpu_does_not_take_are_refused_before_weights_are_read(fields: dict, message: str, copy_of):
    path = copy_of("jamba")
    edit_config(path, **fields)
    (path / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModel, match=message):
        load_model(path, device="cuda")
    with pytest.raises(UnsupportedModel, match=message):
        random_model(load_config(path), device="cuda")


def test_latents_that_a_gpu_does_not_take_are_refused_before_weights_are_read(copy_of):
    (path := copy_of("kimi_linear")).joinpath("model.safetensors").unlink()
    with pytest.raises(UnsupportedModel, match="latents of 48 and 8 values: only powers of two of at least 16"):
        load_model(path, device="cuda")
