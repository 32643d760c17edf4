"""Masks of the ids that grammars allow in a step's draws, computed while the step itself is. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

from headrace.answer_grammar import AnswerGrammar
from headrace.engine import sequence as engine_sequence
from headrace.grammar import Grammars

NewMasks = Callable[[int], Any]
"""Makes a tensor for the masks of K draws, as `ModelRunner.new_masks` does."""
WaitForMasks = Callable[[], Any]
"""Returns such a tensor, filled. For the time when the step is launched."""

WantedMask = tuple[engine_sequence.Sequence, tuple[int, ...]]
"""The mask of the token after a sequence's own tokens and these drafts."""


class StepMasks:
    """Computes masks in a thread of its own, which leaves the GIL to others. It starts with the first mask.

    unwanted   ids that a sequence takes after so many drafts only if its grammar leaves no other
    """

    def __init__(
        self,
        grammars: Grammars,
        unwanted: Callable[[engine_sequence.Sequence, int], Iterable[int]],
        new_masks: NewMasks,
    ) -> None:
        self._grammars = grammars
        self._unwanted = unwanted
        self._new_masks = new_masks
        self._thread = ThreadPoolExecutor(1, "masks")

    @contextmanager
    def computed(
        self, wanted: Sequence[WantedMask], settle: Callable[[], object] | None
    ) -> Iterator[WaitForMasks | None]:
        """These masks, begun at once; None if there are none.

        With `settle` they are begun when they are asked for: it makes tokens known that are still on the device.
        """
        if not wanted:
            yield None
        elif settle is not None:

            def settle_and_fill() -> Any:
                settle()
                return self._fill(wanted)

            yield settle_and_fill
        else:
            filling = self._thread.submit(self._fill, wanted)
            try:
                yield filling.result
            finally:  # a launch that failed has not waited, and matchers belong to one thread at a time
                wait((filling,))

    def _fill(self, wanted: Sequence[WantedMask]) -> Any:
        masks = self._new_masks(len(wanted))
        answers = [_grammar(sequence) for sequence, _ in wanted]
        drafts = [drafts for _, drafts in wanted]
        unwanted = [self._unwanted(sequence, len(drafts)) for sequence, drafts in wanted]
        self._grammars.fill_masks(answers, drafts, unwanted, masks.numpy())
        return masks


def _grammar(sequence: engine_sequence.Sequence) -> AnswerGrammar:
    assert sequence.grammar is not None, "a sequence without a grammar needs no mask"
    return sequence.grammar
