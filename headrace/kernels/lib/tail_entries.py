"""Entries of a ring, and states that are written, as torch's forms of the tail kernels handle them.

Legend    B sequences, E entries of the one that has most
"""

import torch
from torch import Tensor

from headrace.kernels.lib.tails import TailField, Tails


def num_entries(tails: Tails) -> int:
    """E, those of the step's own rows among them. Waits for the device."""
    return int(tails.fields[:, TailField.KEPT].max()) + tails.rows_each


def add_entries(ring: Tensor, tails: Tails, new: Tensor) -> None:
    """Writes entries new [B * rows_each, ...] of the step's rows to ring [rows, places, ...]; of rows of -1 none."""
    if not tails.rows_each:
        return
    row, places = tails.column(TailField.ROW), tails.column(TailField.START)[:, None] + tails.rows
    is_live = row >= 0
    by_sequence = new.unflatten(0, (len(row), tails.rows_each))
    ring[row[is_live][:, None], places[is_live] % ring.shape[1]] = by_sequence[is_live].to(ring.dtype)


def read_entries(ring: Tensor, tails: Tails, num: int) -> Tensor:
    """The first entries after each base [B, num, ...], with zeros behind those that are there."""
    row, place = tails.column(TailField.ROW), torch.arange(num, device=ring.device)
    places = (tails.column(TailField.START)[:, None] + place) % ring.shape[1]
    entries = ring[row.clamp(min=0)[:, None], places]
    is_there = place < (tails.column(TailField.KEPT) + tails.rows_each).masked_fill(row < 0, 0)[:, None]
    # Not a product with zero: what nobody has written may be NaN.
    return entries.masked_fill_(~is_there.view(*is_there.shape, *[1] * (entries.dim() - 2)), 0)


def decays(log_decay: Tensor, until: Tensor) -> tuple[Tensor, Tensor]:
    """Decays of states at the bases and of entries, until a number of tokens after the bases.

    log_decay   [B, E, H] float32, of each entry's token
    until       [B, R] int64, tokens after the base
    Returns     [B, R, H], of the state, and [B, R, E, H], of each entry: 0 of those that come later
    """
    upto = torch.nn.functional.pad(log_decay.cumsum(1), (0, 0, 1, 0))  # [B, E + 1, H] of the first tokens
    total = upto.gather(1, until[..., None].expand(-1, -1, upto.shape[2]))
    is_before = torch.arange(log_decay.shape[1], device=until.device) < until[..., None]
    since = (total[:, :, None] - upto[:, None, 1:]).masked_fill_(~is_before[..., None], -torch.inf)
    return total.exp(), since.exp_()


def write_states(pool: Tensor, tails: Tails, states: Tensor) -> None:
    """Writes states [B, ...] to pool [S, ...], of those sequences that have a destination."""
    dst = tails.column(TailField.DST)
    is_written = dst >= 0
    pool.index_copy_(0, dst[is_written], states[is_written].to(pool.dtype))
