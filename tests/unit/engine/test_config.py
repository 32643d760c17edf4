"""Engine settings: refusals, and states of another width."""

import pytest
import torch

from headrace.config import ConfigError
from headrace.engine.config import EngineConfig
from headrace.engine.runner import ModelRunner
from headrace.forward.memory import CacheMemory
from headrace.models.weights import load_config, random_model


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"state_dtype": "bfloat16"}, "state_dtype bfloat16 on cpu: use float32"),
        ({"state_dtype": "int8", "device": "cuda"}, "state_dtype 'int8': must be one of float32, bfloat16"),
        ({"load_format": "pickle"}, "load_format 'pickle': must be one of safetensors, dummy"),
    ],
)
def test_settings_that_cannot_work_are_refused(fields: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**fields)


def test_states_of_half_the_width_take_half_the_bytes(tiny_checkpoint) -> None:
    model = random_model(load_config(tiny_checkpoint("granite")))
    asked = EngineConfig(device="cuda:1", state_dtype="bfloat16")
    wide, narrow = model.cache_layout(16), model.cache_layout(16, asked.state_dtype)
    (states,) = wide.state_groups
    assert narrow.rec_bytes(states) * 2 == wide.rec_bytes(states)
    assert narrow.conv_bytes(states) == wide.conv_bytes(states)
    assert ModelRunner(model, CacheMemory(narrow, 1, 1)).memory.states[0].rec.dtype == torch.bfloat16
    assert wide.mismatch(narrow) == "state_dtype float32 != bfloat16"
