"""Operands that the copy engine of a Hopper GPU takes, and how tiles lie in shared memory."""

import torch

from headrace.kernels.lib.hopper import LAYOUT, SPAN, can_be_copied, tile_layout


class TestWhatTheCopyEngineTakes:
    """Each case has one fault alone."""

    x, weight = torch.zeros(200, 144).bfloat16(), torch.zeros(256, 128).bfloat16()

    def test_columns_of_a_wider_tensor(self):
        assert can_be_copied(self.x[:, :128], self.weight) and can_be_copied(self.x[:, 8:136], self.weight)

    def test_no_other_sizes(self):
        assert not can_be_copied(self.x[:, :64], self.weight)
        assert not can_be_copied(self.x[:, :48], self.weight[:, :48].contiguous())
        assert not can_be_copied(self.x[:0, :128], self.weight)
        assert not can_be_copied(self.x[:, :128], self.weight[:0])

    def test_no_two_dtypes(self):
        assert not can_be_copied(self.x[:, :128], self.weight.half())

    def test_no_odd_addresses(self):
        assert not can_be_copied(self.x[:, 1:129], self.weight)
        assert not can_be_copied(self.x[:, :128], torch.zeros(256 * 128 + 1).bfloat16()[1:].view(256, 128))

    def test_no_odd_strides(self):
        assert not can_be_copied(torch.zeros(200, 132).bfloat16()[:, :128], self.weight)
        assert not can_be_copied(torch.zeros(200, 256).bfloat16()[:, ::2], self.weight)
        assert not can_be_copied(self.x[0, :128].expand(200, 128), self.weight)
        assert not can_be_copied(self.x[:, :64], self.weight[:, :64])


def test_tiles_have_the_widest_swizzle_that_their_rows_fill():
    assert tile_layout(SPAN.value) == tile_layout(2 * SPAN.value) == LAYOUT.value
    assert [tile_layout(columns).swizzle_byte_width for columns in (8, 16, 32, 64, 128)] == [0, 32, 64, 128, 128]
    assert [tile_layout(columns, 8).swizzle_byte_width for columns in (16, 32, 64, 128)] == [0, 32, 64, 128]
