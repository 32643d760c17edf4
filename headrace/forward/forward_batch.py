"""The input tensors of one forward pass, made once on the host and shared by all layers.

Rows are ordered decodes first, then prefills: linear layers run on all rows at once, mixers run a kernel for each part.
Decodes are sequences with one new token, behind them those with drafts, by their number.
"""

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from headrace.forward.memory import CacheMemory
from headrace.forward.sequence_input import SequenceInput, tail_fields, written_slots
from headrace.kernels.attention.paged_attention import PagedDecode, PagedPrefill
from headrace.kernels.lib.segments import PrefillSegments, StateSource, StateWrite
from headrace.kernels.lib.sizes import cdiv
from headrace.kernels.lib.tails import TailField, Tails
from headrace.kernels.lib.upload import upload_lists


@dataclass(frozen=True)
class DecodeGroup:
    """Sequences of as many rows each: a token and its drafts, one sequence's after the other's.

    rows       of the batch
    source     the states before, for layers that keep states alone
    dst_slots  int64 [B, T]: where these layers' states after each row go
    tails      for the layers that keep tails
    """

    rows: slice
    source: StateSource
    dst_slots: Tensor
    tails: Tails


@dataclass(frozen=True)
class DecodeRows:
    """The decodes, in groups that follow each other."""

    groups: tuple[DecodeGroup, ...]
    attention: PagedDecode  # of all rows


@dataclass(frozen=True)
class PrefillRows:
    """Sequences of several rows, packed."""

    segments: PrefillSegments
    attention: PagedPrefill


@dataclass(frozen=True)
class ForwardBatch:
    """The packed rows of a forward pass, T of them, and the tables that its kernels read."""

    num_decodes: int  # rows before the first prefill row
    decode: DecodeRows | None
    prefill: PrefillRows | None
    tokens_T: Tensor  # int64
    positions_T: Tensor  # int64, absolute
    block_T: Tensor  # int64, where each row's keys and values go
    offset_T: Tensor  # int64, position inside that block
    logit_rows: Tensor | None  # int64, in the order of the inputs; None: every row in order
    last_token_queries: PagedDecode | None  # attention of `logit_rows` alone, if each is its sequence's last row

    @classmethod
    def build(
        cls,
        inputs: Sequence[SequenceInput],
        block_size: int,
        device: torch.device,
        drawn: Tensor | None = None,
        *,
        tail_places: int = 1,
        with_last_token_queries: bool = False,
    ) -> "ForwardBatch":
        """The batch of these inputs. Raises ValueError for inputs that `check_inputs` refuses.

        drawn                     int64 on the device: the tokens that the launch before drew, for `future_token`s
        tail_places               `CacheMemory.tail_places`
        with_last_token_queries   `HybridModel.uses_last_token_queries`
        """
        check_inputs(inputs, block_size)
        single = [entry for entry in inputs if entry.is_decode]
        drafted = sorted((entry for entry in inputs if entry.has_drafts), key=lambda entry: len(entry.tokens))
        decodes = [*single, *drafted]
        prefills = [entry for entry in inputs if not (entry.is_decode or entry.has_drafts)]
        tokens_T, positions_T, block_T, offset_T = _rows(single, [*drafted, *prefills], block_size, device)
        _fill_future_tokens(tokens_T, single, drawn)
        logit_rows = _logit_rows(inputs, [*decodes, *prefills], device)
        last_token_queries = None
        if with_last_token_queries and logit_rows is not None:
            last_token_queries = _last_token_queries(inputs, block_size, device)
        return cls(
            num_decodes=sum(len(entry.tokens) for entry in decodes),
            decode=_decode_rows(decodes, block_size, tail_places, device) if decodes else None,
            prefill=_prefill_rows(prefills, block_size, device) if prefills else None,
            tokens_T=tokens_T,
            positions_T=positions_T,
            block_T=block_T,
            offset_T=offset_T,
            logit_rows=logit_rows,
            last_token_queries=last_token_queries,
        )

    @property
    def decode_groups(self) -> tuple[DecodeGroup, ...]:
        return () if self.decode is None else self.decode.groups

    def join(self, parts: list[Tensor]) -> Tensor:
        """One tensor [T, ...] from the results of each of `decode_groups`, if any, and of the prefill rows, if any."""
        return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass(frozen=True)
class LayerContext:
    """The inputs that all layers of one forward pass share."""

    batch: ForwardBatch
    memory: CacheMemory
    rotary: tuple[Tensor, Tensor] | None  # cos and sin [T, 1, R]; None without positional encoding


def _rows(
    single: list[SequenceInput], longer: list[SequenceInput], block_size: int, device: torch.device
) -> tuple[Tensor, ...]:
    """Tokens, positions, blocks and offsets in one copy: the first launch of a prompt waits for nothing else.

    Each begins at a multiple of 16 bytes, as in `upload_lists`.
    """
    num_rows = len(single) + sum(len(entry.tokens) for entry in longer)
    packed = torch.empty(4, num_rows + num_rows % 2, dtype=torch.int64, pin_memory=device.type == "cuda")
    if single:
        starts = [entry.start for entry in single]
        blocks = [entry.block_ids[entry.start // block_size] for entry in single]
        tokens, offsets = [entry.tokens[0] for entry in single], [start % block_size for start in starts]
        packed[:, : len(single)] = torch.tensor([tokens, starts, blocks, offsets])
    first = len(single)
    for entry in longer:
        tokens_R, positions_R, block_R, offset_R = packed[:, first : first + len(entry.tokens)]
        first_block, end_block = entry.start // block_size, cdiv(entry.end, block_size)
        # A fifth of the time of torch.tensor, which inspects each number.
        tokens_R.copy_(torch.frombuffer(array("q", entry.tokens), dtype=torch.int64))
        torch.arange(entry.start, entry.end, out=positions_R)
        block_R.copy_(torch.tensor(entry.block_ids[first_block:end_block])[positions_R // block_size - first_block])
        torch.remainder(positions_R, block_size, out=offset_R)
        first += len(entry.tokens)
    return packed.to(device, non_blocking=True)[:, :num_rows].unbind()


def _fill_future_tokens(tokens_T: Tensor, single: list[SequenceInput], drawn: Tensor | None) -> None:
    """Overwrites, in the first rows, the stand-ins of tokens that the host does not know yet."""
    futures = [(row, entry.future_token) for row, entry in enumerate(single) if entry.future_token is not None]
    if not futures:
        return
    if drawn is None:
        raise ValueError(f"{len(futures)} sequences continue from drawn tokens, and nothing was drawn before")
    rows, indices = upload_lists(list(zip(*futures, strict=True)), tokens_T.device)
    tokens_T.index_copy_(0, rows, drawn.index_select(0, indices))


def _decode_rows(inputs: list[SequenceInput], block_size: int, tail_places: int, device: torch.device) -> DecodeRows:
    """`inputs`: those of as many tokens follow each other."""
    groups, first_row = [], 0
    for num_rows, entries in groupby(inputs, key=lambda entry: len(entry.tokens)):
        group = _decode_group([*entries], num_rows, first_row, tail_places, device)
        groups.append(group)
        first_row = group.rows.stop
    ends = [end for entry in inputs for end in range(entry.start + 1, entry.end + 1)]
    blocks = [entry.block_ids for entry in inputs for _ in entry.tokens]
    return DecodeRows(tuple(groups), PagedDecode.build(ends, blocks, block_size, device))


def _decode_group(
    inputs: list[SequenceInput], rows_each: int, first_row: int, tail_places: int, device: torch.device
) -> DecodeGroup:
    fields = tail_fields(inputs, tail_places)
    src_slots = fields[:, TailField.SRC].tolist()
    dst_slots = [slot for entry in inputs for slot in written_slots(entry)]
    src, dst, tails = upload_lists([src_slots, dst_slots, fields.reshape(-1).tolist()], device)
    return DecodeGroup(
        rows=slice(first_row, first_row + len(dst_slots)),
        source=StateSource(src, any_fresh=-1 in src_slots),
        dst_slots=dst.view(-1, rows_each),
        tails=Tails(tails.view(-1, len(TailField)).int(), rows_each),
    )


def _prefill_rows(inputs: list[SequenceInput], block_size: int, device: torch.device) -> PrefillRows:
    lengths = [len(entry.tokens) for entry in inputs]
    writes = [
        StateWrite(sequence, num_tokens - entry.start, slot)
        for sequence, entry in enumerate(inputs)
        for num_tokens, slot in (*entry.emit, (entry.end, entry.dst_slot))
    ]
    return PrefillRows(
        segments=PrefillSegments.build(lengths, [entry.src_slot for entry in inputs], writes, device),
        attention=PagedPrefill.build(
            lengths, [entry.start for entry in inputs], [entry.block_ids for entry in inputs], block_size, device
        ),
    )


def _last_token_queries(inputs: Sequence[SequenceInput], block_size: int, device: torch.device) -> PagedDecode | None:
    wanted = [entry for entry in inputs if entry.num_logits]
    if not wanted or any(entry.num_logits > 1 for entry in wanted):
        return None
    return PagedDecode.build([entry.end for entry in wanted], [entry.block_ids for entry in wanted], block_size, device)


def _logit_rows(
    inputs: Sequence[SequenceInput], in_order: Sequence[SequenceInput], device: torch.device
) -> Tensor | None:
    """`in_order`: the inputs in the order of their rows."""
    ends, end = {}, 0
    for entry in in_order:
        end += len(entry.tokens)
        ends[id(entry)] = end
    rows = [row for entry in inputs for row in range(ends[id(entry)] - entry.num_logits, ends[id(entry)])]
    if rows == list(range(end)):
        return None
    return upload_lists([rows], device)[0]


def check_inputs(inputs: Sequence[SequenceInput], block_size: int) -> None:
    """Raises ValueError for inputs that would let one sequence's state or tokens reach another."""
    for entry in inputs:
        if len(entry.block_ids) * block_size < entry.end_at_most:
            raise ValueError(f"{len(entry.block_ids)} blocks of {block_size} do not cover {entry.end_at_most} tokens")
    written = [entry.dst_slot for entry in inputs]
    written += [slot for entry in inputs if entry.emit for _, slot in entry.emit]
    if twice := _repeated(written):
        raise ValueError(f"slot {twice[0]} is written twice in one step")
    if twice := _repeated([entry.tail.row for entry in inputs if entry.tail is not None]):
        raise ValueError(f"row {twice[0]} of the ring: two sequences share it")
    read = [entry.src_slot for entry in inputs if entry.src_slot != entry.dst_slot]
    for slot in set(written).intersection(read):
        raise ValueError(f"slot {slot} is read by one sequence and written for another")


def _repeated(numbers: list[int]) -> list[int]:
    """Numbers that come more than once."""
    return [] if len(set(numbers)) == len(numbers) else [n for n, count in Counter(numbers).items() if count > 1]
