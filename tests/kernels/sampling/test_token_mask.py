"""The kernel that applies grammars' masks against its reference, and that against single bits."""

import pytest
import torch

from headrace.kernels.sampling.token_mask import mask_tokens, mask_tokens_torch, mask_tokens_triton
from tests.support.kernels.compiled import Launch, compile_for_h200

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def inputs(V: int) -> tuple[torch.Tensor, ...]:
    """Logits of five rows, and the masks of three of them."""
    generator = torch.Generator().manual_seed(V)
    words = torch.randint(-(2**31), 2**31, (3, -(-V // 32)), generator=generator).int()
    return tuple(each.to(DEVICE) for each in (torch.randn(5, V, generator=generator), words, torch.tensor([3, 1, 0])))


@pytest.mark.parametrize("V", [1, 31, 32, 50, 1000])
def test_a_clear_bit_refuses_its_id_and_nothing_else(V: int):
    logits, masks, rows = inputs(V)
    expected = logits.clone()
    for mask, row in zip(masks.tolist(), rows.tolist(), strict=True):
        for token_id in range(V):
            if not mask[token_id // 32] >> token_id % 32 & 1:
                expected[row, token_id] = -torch.inf
    by_torch, by_triton = logits.clone(), logits.clone()
    mask_tokens_torch(by_torch, masks, rows)
    mask_tokens_triton(by_triton, masks, rows, block=64)
    assert torch.equal(by_torch, expected)
    assert torch.equal(by_triton, expected)


def test_no_rows():
    logits, masks, rows = inputs(8)
    before = logits.clone()
    mask_tokens_triton(logits, masks[:0], rows[:0])
    assert torch.equal(logits, before)


def test_shapes_must_agree():
    logits, masks, rows = inputs(64)
    with pytest.raises(ValueError, match="disagree"):
        mask_tokens(logits, masks[:, :1], rows)
    with pytest.raises(ValueError, match="disagree"):
        mask_tokens(logits, masks.long(), rows)


def test_it_compiles_for_an_h200():
    types = {"logits_ptr": "*fp32:16", "masks_ptr": "*i32:16", "rows_ptr": "*i64:16", "V": "i32:16", "W": "i32"}
    kernel = "headrace.kernels.sampling.token_mask:_mask_tokens_kernel"
    [report] = compile_for_h200([Launch(kernel, types | {"stride_logits": "i32:16"}, {"BLOCK": 2048})])
    assert report.stack_bytes == 0
