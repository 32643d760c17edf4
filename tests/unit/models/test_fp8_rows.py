"""Models whose products run in FP8, as on a Hopper GPU: rows reach them in FP8, whatever computes these."""

import pytest
import torch

from headrace.kernels.dense import linear
from headrace.kernels.dense.fp8_linear import fp8_linear_torch
from headrace.kernels.dense.fp8_rows import Fp8Format
from headrace.models.branches import MixerBranch
from headrace.models.layers.gated_delta import GatedDelta
from headrace.models.weights import load_model
from tests.support.engine.checkpoint_edits import logits_of
from tests.support.engine.fp8_checkpoints import quantise_checkpoint


@pytest.fixture
def runs_in_fp8(monkeypatch: pytest.MonkeyPatch):
    """Every FP8 matrix has a product, the reference's: the library's needs the GPU."""
    monkeypatch.setattr(linear, "has_product", lambda weight: True)
    monkeypatch.setattr(linear, "fp8_linear", fp8_linear_torch)


FAMILIES = ["granite", "granite_moe", "qwen35", "qwen35_moe", "nemotron_h", "falcon_h1", "lfm2", "kimi_linear", "jamba"]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_as_if_each_product_had_quantised_its_rows(
    family: str, load_family, prompt, runs_in_fp8, monkeypatch: pytest.MonkeyPatch
):
    tokens = prompt(40)
    model = load_model(load_family(family).path, quantization="fp8")
    assert any(branch.reads is not None for branch in model.chain.branches)
    logits = logits_of(model, tokens)
    monkeypatch.setattr(linear.LinearWeight, "reads", None)
    assert torch.equal(logits, logits_of(load_model(load_family(family).path, quantization="fp8"), tokens))
    assert (logits - load_family(family).oracle_logits(tokens)).abs().max() > 1e-3  # it did multiply in FP8


def test_branches_ask_for_what_their_products_read(copy_of, runs_in_fp8):
    """The delta rule's beta and decay are in 16 bits: what reads them and the FP8 projection gets both."""
    model = load_model(quantise_checkpoint(copy_of("qwen35"), "channels", dequantised=False))
    alone = Fp8Format(by_block=False)
    for branch in model.chain.branches:
        is_delta = isinstance(branch, MixerBranch) and isinstance(branch.mixer, GatedDelta)
        assert branch.reads == alone._replace(keeps_plain=is_delta)


def test_rows_stay_in_16_bits_for_weights_that_are_no_fp8(load_family):
    assert all(branch.reads is None for branch in load_family("qwen35").model.chain.branches)
