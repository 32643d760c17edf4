"""Softplus inside a Triton kernel against float64."""

import torch
import triton
import triton.language as tl

from headrace.kernels.lib.exponentials import softplus as softplus_triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@triton.jit
def _softplus_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    tl.store(y_ptr + place, softplus_triton(tl.load(x_ptr + place)))


def test_softplus_is_exact_where_it_is_small():
    x = torch.linspace(-30, 30, 256, device=DEVICE)
    y = torch.empty_like(x)
    _softplus_kernel[(1,)](x, y, BLOCK=256)
    torch.testing.assert_close(y.double(), torch.log1p(x.double().exp()), atol=0, rtol=5e-6)
