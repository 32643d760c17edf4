"""Rotary embedding against complex rotation, and its angles against float64."""

import pytest
import torch

from headrace.kernels.attention.rotary import inverse_frequencies, rotary_angles, rotary_angles_triton, rotate_
from tests.kernels.attention.paged import DEVICE


@pytest.mark.parametrize(("rows", "factor"), [(0, 1.0), (1, 1.0), (5, 1.0), (5, 1.25)])
def test_angles_are_exact_at_any_position(rows: int, factor: float):
    positions = torch.tensor([262143, 131071, 70, 1, 0], device=DEVICE)[:rows]
    frequencies = inverse_frequencies(24, 1e7, DEVICE)
    cos, sin = rotary_angles_triton(positions, frequencies, factor)
    angles = (positions.float()[:, None, None] * frequencies).double()
    torch.testing.assert_close(cos.double(), factor * angles.cos(), atol=1e-6, rtol=0)
    torch.testing.assert_close(sin.double(), factor * angles.sin(), atol=1e-6, rtol=0)


def test_rotation_turns_pairs_and_leaves_the_rest():
    x = torch.randn(5, 2, 12)
    before = x.clone()
    positions = torch.tensor([0, 1, 7, 100, 4000])
    rotate_(x, *rotary_angles(positions, inverse_frequencies(8, 10000.0, x.device)))
    frequencies = torch.tensor([10000.0 ** (-2 * i / 8) for i in range(4)], dtype=torch.float64)
    turn = torch.polar(torch.ones(5, 4, dtype=torch.float64), positions[:, None] * frequencies)[:, None]
    expected = torch.complex(before[..., :4].double(), before[..., 4:8].double()) * turn
    torch.testing.assert_close(x[..., :4].double(), expected.real, atol=1e-3, rtol=0)
    torch.testing.assert_close(x[..., 4:8].double(), expected.imag, atol=1e-3, rtol=0)
    assert torch.equal(x[..., 8:], before[..., 8:])
    assert torch.equal(x[0], before[0])
