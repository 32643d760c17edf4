"""Steps with drafts as a runner's inputs: their places known, or behind a check whose tokens the device alone knows."""

from collections.abc import Iterable
from dataclasses import replace

import torch

from headrace.cache.tails import BehindCheck, Tail
from headrace.engine.runner import ModelRunner
from headrace.forward.sequence_input import SequenceInput
from tests.support.engine.interpreted import blocks_of

LENGTHS_BEFORE = (14, 14, 15)
"""Of the prompts before `behind_a_check`."""


def drafted(sequence: int, tokens: list[int], start: int, written: int | None = None, dst: int = 11) -> SequenceInput:
    """A token and its drafts behind the state in its slot; the state after `written` tokens goes to `dst`."""
    tail, slots = Tail(sequence, start, written), (sequence, sequence if written is None else dst)
    return SequenceInput(tokens, start, blocks_of(sequence), *slots, num_logits=len(tokens), tail=tail)


def behind_a_check(
    runners: Iterable[ModelRunner], ours: ModelRunner
) -> tuple[list[SequenceInput], list[SequenceInput]]:
    """Has the runners run a check behind prompts of LENGTHS_BEFORE; returns the step behind it, unknown and known.

    Behind two accepted drafts that reach a written state, behind none that do, and behind a token without drafts.
    `ours` is told what the check drew, and what was drafted behind it.
    """
    first = [
        drafted(0, [1, 2, 3, 4], 14, written=16, dst=8),
        drafted(1, [5, 6, 7], 14, written=16, dst=9),
        drafted(2, [8], 15, written=16, dst=2),
    ]
    for runner in runners:
        runner.forward(first)
    assert ours._sources is not None
    ours._drawn[:8] = torch.tensor([2, 3, 40, 41, 42, 43, 44, 45])
    ours._sources.num_accepted[:3] = torch.tensor([0, 2, 0])
    ours._sources.drafted[1, :3] = torch.tensor([50, 51, 52])
    behind = [
        SequenceInput([0, 0, 0], 15, blocks_of(0), 0, 10, num_logits=3, future_token=0, future_drafts=1,
                      tail=Tail(0, 14, None), behind=BehindCheck(1, 3, 16, 8)),
        SequenceInput([0, 0], 15, blocks_of(1), 1, 11, num_logits=2, future_token=4, future_drafts=1,
                      tail=Tail(1, 14, None), behind=BehindCheck(0, 2, 16, 9)),
        SequenceInput([0], 16, blocks_of(2), 2, 2, future_token=7, tail=Tail(2, 16, None)),
    ]  # fmt: skip
    known = [
        replace(behind[0], tokens=[40, 50, 51], start=17, src_slot=8, tail=Tail(0, 16, None)),
        replace(behind[1], tokens=[42, 50], start=15, tail=Tail(1, 14, 16)),
        replace(behind[2], tokens=[45]),
    ]
    return behind, [replace(entry, future_token=None, future_drafts=None, behind=None) for entry in known]
