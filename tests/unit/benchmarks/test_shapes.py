"""A folder of a shape reads as that shape, by the engine, the router and transformers."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.shapes import SHAPES, write_shape, write_weights
from headrace.models.config import LayerConfig
from headrace.models.weights import load_config, load_model
from router.text.tokens import ModelTokens

LAYERS = (LayerConfig("state", "dense"), LayerConfig("attention", "dense"))


@pytest.mark.parametrize("name", SHAPES)
def test_the_engine_and_the_router_read_the_shape_back(name: str, tmp_path: Path) -> None:
    folder = write_shape(SHAPES[name], tmp_path / name)
    assert load_config(folder) == SHAPES[name]
    tokens = ModelTokens(folder)
    assert (tokens.vocab_size, tokens.max_model_tokens) == (SHAPES[name].vocab_size, SHAPES[name].max_position)
    assert tokens.decode([SHAPES[name].vocab_size - 1]) == ""


@pytest.mark.parametrize("name", SHAPES)
def test_weights_written_for_a_shape_load(name: str, tmp_path: Path) -> None:
    small = replace(SHAPES[name], vocab_size=64, intermediate_size=32, layers=LAYERS)
    folder = write_shape(small, tmp_path / name)
    write_weights(folder, "cpu")
    model = load_model(folder, torch.bfloat16)
    assert model.config == small
