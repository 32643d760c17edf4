"""The seconds that a step of an engine takes, as a linear function of its contents. Pure.

    seconds = step_s
            + decode_s * decoding sequences + context_s * tokens of their contexts
            + check_s, if any has drafts, + draft_s * drafts
            + chunk_s, if any prompt is computed, + token_s * tokens of prompts + depth_s * (their positions, summed)

Each node fits the eight coefficients to its own steps and reports them, and by how much its steps come late; the router
predicts with them, and the scheduler of a node bounds the prompts of a step by them.
"""

from __future__ import annotations

from dataclasses import dataclass

TIMED_STEPS = "timed_steps"
"""The counter in a node's status with the number of steps to which its costs are fitted."""

PROMPT_SECONDS = "prompt_seconds"
"""The counter with the work on prompts that the node has done, as `StepCosts.prompt_work_s` says."""

KEPT_SHARE = 0.95
"""Share of a wanted gap that a step may take: its tokens travel after it."""

MOST_LATE_SHARE = 0.2
"""Share of a wanted gap that is left for late steps at the most: shorter steps mend nothing of what a host delays."""

SHORT_SHARE = 2 / 3
"""Share of the prompts' part of a step that short ones get at the most while a longer one waits, which has the rest."""

LONG_BESIDE_SHORT = (1 - SHORT_SHARE) / SHORT_SHARE
"""Work on a longer prompt beside short ones, as a share of the work on these."""


def overtakes(num_tokens: float, earlier: float) -> bool:
    """True if a prompt of `num_tokens` goes before one of `earlier` tokens that arrived first: nodes have this rule for
    places in steps and in the cache, and the router predicts by it."""
    return 2 * num_tokens < earlier


@dataclass(frozen=True, slots=True)
class StepShape:
    """The contents of a step.

    num_decoding     sequences that get one token
    context_tokens   tokens that these attend to, all together
    prefill_tokens   tokens of prompts
    prefill_depths   the positions of these tokens, summed: what their attention costs
    num_drafts       drafts behind the newest tokens of the decoding sequences
    """

    num_decoding: int = 0
    context_tokens: int = 0
    prefill_tokens: int = 0
    prefill_depths: int = 0
    num_drafts: int = 0

    @classmethod
    def prefill(cls, start: int, end: int) -> StepShape:
        """The tokens from `start` up to `end` of one prompt."""
        return cls(prefill_tokens=end - start, prefill_depths=(end * (end - 1) - start * (start - 1)) // 2)

    def __add__(self, other: StepShape) -> StepShape:
        return StepShape(
            self.num_decoding + other.num_decoding,
            self.context_tokens + other.context_tokens,
            self.prefill_tokens + other.prefill_tokens,
            self.prefill_depths + other.prefill_depths,
            self.num_drafts + other.num_drafts,
        )


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds; the default is roughly a model of 3 B parameters on an H200 (docs/routing.md).

    step_s      of a step that decodes, whatever is in it
    decode_s    more for each decoding sequence
    context_s   more for each token that these attend to
    chunk_s     more for a step that computes prompts, whatever their length
    token_s     more for each token of a prompt
    depth_s     more for each token of a prompt and each position before it
    check_s     more for a step with drafts, however many: making them, and what the host does while the device waits
    draft_s     more for each draft
    late_s      nearly all steps with prompts beside answers take at most so much longer: no part of what a step costs
    """

    step_s: float = 2.1e-3
    decode_s: float = 28e-6
    context_s: float = 2.2e-9
    chunk_s: float = 2.0e-3
    token_s: float = 10.2e-6
    depth_s: float = 35e-12
    check_s: float = 1.0e-3
    draft_s: float = 28e-6
    late_s: float = 0.0

    def seconds(self, shape: StepShape) -> float:
        """A step of this shape; 0 for an empty one."""
        return self.decode_part_s(shape) + self.prefill_part_s(shape)

    def decode_part_s(self, shape: StepShape) -> float:
        if not shape.num_decoding:
            return 0.0
        plain_s = self.step_s + self.decode_s * shape.num_decoding + self.context_s * shape.context_tokens
        return plain_s + self.draft_part_s(shape.num_drafts)

    def draft_part_s(self, num_drafts: int) -> float:
        return self.check_s + self.draft_s * num_drafts if num_drafts else 0.0

    def prefill_part_s(self, shape: StepShape) -> float:
        if not shape.prefill_tokens:
            return 0.0
        return self.chunk_s + self.prompt_work_s(shape)

    def prompt_work_s(self, shape: StepShape) -> float:
        """The tokens of prompts alone: the same however many steps they are spread over."""
        return self.token_s * shape.prefill_tokens + self.depth_s * shape.prefill_depths

    def longest_s(self, gap_s: float) -> float:
        """The seconds that a step with prompts may be planned for, to keep a gap although steps come late."""
        return KEPT_SHARE * gap_s - min(self.late_s, MOST_LATE_SHARE * gap_s)

    def prefill_s(self, start: int, end: int, *, chunk_tokens: int) -> float:
        """A prompt's tokens from `start` up to `end`, alone, in chunks of at most `chunk_tokens`."""
        if end <= start:
            return 0.0
        num_chunks = -(-(end - start) // chunk_tokens)
        return self.prefill_part_s(StepShape.prefill(start, end)) + (num_chunks - 1) * self.chunk_s

    def line_s(self, prompts: StepShape, beside: StepShape, *, chunk_tokens: int) -> float:
        """Time to compute all these tokens of prompts, `chunk_tokens` in a step that also decodes `beside`."""
        if not prompts.prefill_tokens:
            return 0.0
        num_steps = -(-prompts.prefill_tokens // chunk_tokens)
        return self.prefill_part_s(prompts) + (num_steps - 1) * self.chunk_s + num_steps * self.decode_part_s(beside)
