"""The input tensors of one forward pass, made once on the host and shared by all layers.

Rows are ordered decodes first (sequences with one new token), then prefills: linear layers run on all rows at once,
mixers run a kernel for each of the two parts.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.forward.memory import CacheMemory
from headrace.forward.sequence_step import SequenceStep
from headrace.kernels.attention.paged_attention import PagedDecode, PagedPrefill
from headrace.kernels.lib.segments import PrefillSegments, StateSource, StateWrite
from headrace.kernels.lib.sizes import cdiv
from headrace.kernels.lib.upload import upload_lists


@dataclass(frozen=True)
class DecodeRows:
    """Sequences of one row each."""

    source: StateSource
    dst_slots: Tensor  # int64 [B]
    attention: PagedDecode


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
    logit_rows: Tensor | None  # int64, in the order of the steps; None: every row in order
    last_token_queries: PagedDecode | None  # attention of `logit_rows` alone, if each is its sequence's last row

    @classmethod
    def build(
        cls,
        steps: Sequence[SequenceStep],
        block_size: int,
        device: torch.device,
        drawn: Tensor | None = None,
        *,
        with_last_token_queries: bool = False,
    ) -> "ForwardBatch":
        """The batch of these steps. Raises ValueError for steps that `check_steps` refuses.

        drawn                     int64 on the device: the tokens that the launch before drew, for `future_token`s
        with_last_token_queries   `HybridModel.uses_last_token_queries`
        """
        check_steps(steps, block_size)
        decodes = [step for step in steps if step.is_decode]
        prefills = [step for step in steps if not step.is_decode]
        tokens_T, positions_T, block_T, offset_T = _rows(decodes, prefills, block_size, device)
        _fill_future_tokens(tokens_T, decodes, drawn)
        logit_rows = _logit_rows(steps, len(decodes), device)
        last_token_queries = None
        if with_last_token_queries and logit_rows is not None:
            last_token_queries = _last_token_queries(steps, block_size, device)
        return cls(
            num_decodes=len(decodes),
            decode=_decode_rows(decodes, block_size, device) if decodes else None,
            prefill=_prefill_rows(prefills, block_size, device) if prefills else None,
            tokens_T=tokens_T,
            positions_T=positions_T,
            block_T=block_T,
            offset_T=offset_T,
            logit_rows=logit_rows,
            last_token_queries=last_token_queries,
        )

    def join(self, decoded: Tensor | None, prefilled: Tensor | None) -> Tensor:
        """One tensor [T, ...] from the results of the decode rows and of the prefill rows."""
        parts = [part for part in (decoded, prefilled) if part is not None]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass(frozen=True)
class LayerContext:
    """The inputs that all layers of one forward pass share."""

    batch: ForwardBatch
    memory: CacheMemory
    rotary: tuple[Tensor, Tensor] | None  # cos and sin [T, 1, R]; None without positional encoding


def _rows(
    decodes: list[SequenceStep], prefills: list[SequenceStep], block_size: int, device: torch.device
) -> tuple[Tensor, ...]:
    """Tokens, positions, blocks and offsets in one copy: the first launch of a prompt waits for nothing else.

    Each begins at a multiple of 16 bytes, as in `upload_lists`.
    """
    num_rows = len(decodes) + sum(len(step.tokens) for step in prefills)
    packed = torch.empty(4, num_rows + num_rows % 2, dtype=torch.int64, pin_memory=device.type == "cuda")
    if decodes:
        starts = [step.start for step in decodes]
        blocks = [step.block_ids[step.start // block_size] for step in decodes]
        tokens, offsets = [step.tokens[0] for step in decodes], [start % block_size for start in starts]
        packed[:, : len(decodes)] = torch.tensor([tokens, starts, blocks, offsets])
    first = len(decodes)
    for step in prefills:
        tokens_R, positions_R, block_R, offset_R = packed[:, first : first + len(step.tokens)]
        first_block, end_block = step.start // block_size, cdiv(step.end, block_size)
        # A fifth of the time of torch.tensor, which inspects each number.
        tokens_R.copy_(torch.frombuffer(array("q", step.tokens), dtype=torch.int64))
        torch.arange(step.start, step.end, out=positions_R)
        block_R.copy_(torch.tensor(step.block_ids[first_block:end_block])[positions_R // block_size - first_block])
        torch.remainder(positions_R, block_size, out=offset_R)
        first += len(step.tokens)
    return packed.to(device, non_blocking=True)[:, :num_rows].unbind()


def _fill_future_tokens(tokens_T: Tensor, decodes: list[SequenceStep], drawn: Tensor | None) -> None:
    """Overwrites, in the first rows, the stand-ins of tokens that the host does not know yet."""
    futures = [(row, step.future_token) for row, step in enumerate(decodes) if step.future_token is not None]
    if not futures:
        return
    if drawn is None:
        raise ValueError(f"{len(futures)} steps continue from drawn tokens, and nothing was drawn before")
    rows, indices = upload_lists(list(zip(*futures, strict=True)), tokens_T.device)
    tokens_T.index_copy_(0, rows, drawn.index_select(0, indices))


def _decode_rows(steps: list[SequenceStep], block_size: int, device: torch.device) -> DecodeRows:
    src_slots, dst_slots = upload_lists(
        [[-1 if step.src_slot is None else step.src_slot for step in steps], [step.dst_slot for step in steps]], device
    )
    return DecodeRows(
        source=StateSource(src_slots, any_fresh=any(step.src_slot is None for step in steps)),
        dst_slots=dst_slots,
        attention=PagedDecode.build(
            [step.end for step in steps], [step.block_ids for step in steps], block_size, device
        ),
    )


def _prefill_rows(steps: list[SequenceStep], block_size: int, device: torch.device) -> PrefillRows:
    lengths = [len(step.tokens) for step in steps]
    writes = [
        StateWrite(sequence, num_tokens - step.start, slot)
        for sequence, step in enumerate(steps)
        for num_tokens, slot in (*step.emit, (step.end, step.dst_slot))
    ]
    return PrefillRows(
        segments=PrefillSegments.build(lengths, [step.src_slot for step in steps], writes, device),
        attention=PagedPrefill.build(
            lengths, [step.start for step in steps], [step.block_ids for step in steps], block_size, device
        ),
    )


def _last_token_queries(steps: Sequence[SequenceStep], block_size: int, device: torch.device) -> PagedDecode | None:
    wanted = [step for step in steps if step.num_logits]
    if not wanted or any(step.num_logits > 1 for step in wanted):
        return None
    return PagedDecode.build([step.end for step in wanted], [step.block_ids for step in wanted], block_size, device)


def _logit_rows(steps: Sequence[SequenceStep], num_decodes: int, device: torch.device) -> Tensor | None:
    rows: list[int] = []
    next_decode, next_prefill = 0, num_decodes
    for step in steps:
        if step.is_decode:
            end = next_decode = next_decode + 1
        else:
            end = next_prefill = next_prefill + len(step.tokens)
        rows.extend(range(end - step.num_logits, end))
    if len(rows) == next_prefill and rows == list(range(next_prefill)):
        return None
    return upload_lists([rows], device)[0]


def check_steps(steps: Sequence[SequenceStep], block_size: int) -> None:
    """Raises ValueError for steps that would let one sequence's state or tokens reach another."""
    written: set[int] = set()
    for step in steps:
        if len(step.block_ids) * block_size < step.end:
            raise ValueError(f"{len(step.block_ids)} blocks of {block_size} do not cover {step.end} tokens")
        for slot in (step.dst_slot, *(slot for _, slot in step.emit)):
            if slot in written:
                raise ValueError(f"slot {slot} is written twice in one step")
            written.add(slot)
    for step in steps:
        if step.src_slot in written and step.src_slot != step.dst_slot:
            raise ValueError(f"slot {step.src_slot} is read by one sequence and written for another")
