"""Warm-up before the first request: kernels are compiled, CUDA graphs captured, memory touched."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from headrace.cache.tails import Tail
from headrace.config import ConfigError
from headrace.engine.drafts.passes import DraftStart
from headrace.engine.graphs.captured_passes import Capture, Captured
from headrace.engine.runner import ModelRunner
from headrace.engine.sampling.draw import Draw, PromptRows
from headrace.forward.sequence_input import SequenceInput
from headrace.kernels.dense import one_round_hopper, small_linear
from headrace.kernels.lib.compile_ahead import compiling_ahead
from headrace.kernels.lib.sizes import cdiv
from headrace.kernels.sampling.argmax import NO_TOKEN
from headrace.request import Sampling

log = logging.getLogger(__name__)

_GREEDY = Draw(Sampling(max_tokens=1, seed=0, temperature=0.0), 0)
_RANDOM = Draw(Sampling(max_tokens=1, seed=0, temperature=1.0), 0)
_PENALISED = Draw(Sampling(max_tokens=1, seed=0, temperature=0.0, repetition_penalty=1.1), 0, banned=(0,))
_MOST_TOP = 20  # alternatives that the router allows
_FEW_ROWS = sorted({16, 32, small_linear.MOST_ROWS, *one_round_hopper.ROWS_OF_KERNELS})
"""Rows that meet each tile of the small product, and each kernel of the product in one round."""


def warm_up(
    runner: ModelRunner, *, max_step_tokens: int, max_running: int, max_tokens: int, max_drafts: int = 0, graphs: bool
) -> None:
    """Runs the steps that requests will run, on blocks and slots still unused: only before the first request.

    max_tokens   of the longest sequence
    max_drafts   of a sequence in a step
    graphs       capture decodes of up to `max_running` sequences, with and without drafts, prefills, and both of these
                 decodes and short prefills in one pass
    """
    started_s = time.monotonic()
    on_gpu = runner.memory.device.type == "cuda"

    def run(runner: ModelRunner, capture: Capture | None) -> None:
        steps = _steps(runner, max_step_tokens)
        penalised = _PENALISED._replace(counts_row=runner.token_counts.row("warm-up", [1], 1), mask_row=0)
        draws, tokens = (_GREEDY, _RANDOM, penalised), set[int]()
        for i, step in enumerate(steps):
            drawn = [draws[(i + row) % 3] for row in range(len(step))]
            masks = runner.new_masks(drawn.count(penalised)).fill_(-1)  # everything is allowed
            launched = runner.launch(step, list(enumerate(drawn)), (), lambda masks=masks: masks)
            launched.drawn.tokens()
            if capture is None:
                tokens.update(launched.drawn.ids())
                log.info("warm-up: step %d of %d after %.1f s", i + 1, len(steps), time.monotonic() - started_s)
        if tokens == {NO_TOKEN}:  # one prompt may overflow, a model of numbers does not for all
            raise ConfigError(
                f"the model's logits are not numbers (NaN) in {runner.model.dtype}: its weights are damaged, or its "
                "activations overflow; check them, or set engine.dtype to float32 or bfloat16"
            )
        if runner.model.mtp is not None:
            newest = steps[1][-1]
            start = DraftStart(1, newest.start, newest.block_ids, newest.dst_slot, num_drafts=1)
            runner.draft_tokens([start])
            if runner.model.draft_head is not None and runner.model.draft_head.ids is not None:
                runner.change_draft_head([0], [0])  # which it stands for
        if runner.model.has_tails:  # as a halt does
            newest = steps[1][-1]
            runner.write_states([(newest.dst_slot, newest.dst_slot, Tail(newest.dst_slot, newest.start), newest.end)])
        if runner.memory.num_packed_slots:
            runner.memory.pack(0, runner.memory.num_slots)
            runner.memory.unpack(runner.memory.num_slots, 0)
        if graphs:
            free_bytes = _free_bytes(on_gpu)
            runner.capture_decodes(max_running, max_tokens, capture)
            runner.capture_prefills(max_step_tokens, max_tokens, capture)
            runner.capture_mixes(capture)
            if max_drafts:
                runner.capture_checks(max_running, max_drafts, max_tokens, capture)
                runner.capture_mixed_checks(capture)
            log.info("warm-up: the captured passes take %d MiB", (free_bytes - _free_bytes(on_gpu)) >> 20)
        _score_longest(runner, steps[0][0])  # behind all else that stays in memory
        runner.keep_rows(())

    if on_gpu:
        log.info("warm-up: a rehearsal, to know the kernels")
        with compiling_ahead():  # on a runner of its own, whose captures are dropped with it
            run(ModelRunner(runner.model, runner.memory), _rehearsed)
        log.info("warm-up: all kernels compiled after %.1f s", time.monotonic() - started_s)
    run(runner, None)
    if on_gpu:
        torch.cuda.synchronize(runner.memory.device)
    log.info("warm-up took %.1f s", time.monotonic() - started_s)


def _free_bytes(on_gpu: bool) -> int:
    return torch.cuda.mem_get_info()[0] if on_gpu else 0


def _score_longest(runner: ModelRunner, prompt: SequenceInput) -> None:
    """Scores the longest chunk, which takes more memory than any other step: what is missing shows at the start."""
    num_rows = len(prompt.tokens)
    rows = PromptRows(0, 1, [1] * (num_rows - 1), _MOST_TOP)
    launched = runner.launch([replace(prompt, num_logits=num_rows)], [(num_rows - 1, _GREEDY)], [rows])
    launched.scores[0].parts()


def _rehearsed(work: Callable[[], Tensor]) -> Captured:
    """A capture that is never replayed."""
    return Captured(lambda: None, work())


def _steps(runner: ModelRunner, max_step_tokens: int) -> list[list[SequenceInput]]:
    """The steps to run: fresh prompts, one of a whole step's budget; a resumed chunk that emits a state, and a decode;
    then prompts as short as the matrix products' smaller kernels take, which decodes reach only in large batches, with
    logits of all rows: a narrow head is such a product, too."""
    size = runner.memory.layout.block_size
    blocks = range(runner.memory.num_blocks)
    at_end = blocks[-cdiv(3, size) :]  # blocks of the short prompt and of the token behind it
    # One more block stays for the chunk that follows the long prompt.
    length = min(max_step_tokens - 2, (len(blocks) - len(at_end) - 1) * size)
    first = [SequenceInput([1] * 2, 0, at_end, None, 1)]
    if length > 1:
        first.insert(0, SequenceInput([1] * length, 0, blocks, None, 0))
    chunk = min(2 * size, (len(blocks) - len(at_end)) * size - length, max_step_tokens - 1) if length > 1 else 0
    second = [SequenceInput([1], 2, at_end, 1, 1)]
    if chunk > 1:
        second.insert(0, SequenceInput([1] * chunk, length, blocks, 0, 0, emit=((length + 1, 2),)))
    few = [rows for rows in _FEW_ROWS if rows <= length]
    short = [SequenceInput([1] * rows, 0, blocks, None, 0, num_logits=rows) for rows in few]
    return [first, second, *([step] for step in short)]
