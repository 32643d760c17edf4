"""Settings of speculation."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.config import at_least, one_of, refuse
from headrace.speculation.draft_count import AutoCount, DraftCount, FixedCount
from headrace.speculation.drafter import DrafterFactory
from headrace.speculation.ngram import NgramDrafter
from headrace.speculation.suffix import TOKEN_BYTES, AnswerStore, SuffixDrafter

NO_DRAFTER = "none"
GRAMMAR = "grammar"
MTP = "mtp"
DRAFTERS = (NO_DRAFTER, GRAMMAR, "ngram", "suffix", MTP)
COUNTS = ("auto", "fixed")


@dataclass(frozen=True)
class SpeculationConfig:
    """Settings of the drafts that a node makes (docs/speculation.md). Answers are the same with any setting.

    drafter           none; grammar: what a request's grammar forces, which the others draft, too; ngram: what followed
                      the last tokens where they occurred before in prompt and answer; suffix: there, or in earlier
                      answers of this node under the same salt; mtp: what the model's own layer for that guesses
                      (Qwen3.5, Qwen3-Next, Nemotron 3 Super), on all nodes of a cluster or on none
    count             auto: as many drafts as pay by measured acceptance and step times, perhaps none; fixed: all there
                      are
    max_drafts        drafts of a request in a step at most. Where layers keep tails, 15 at most; elsewhere each has a
                      slot for a state, of a quarter of the slots at most
    answer_bytes      suffix only: host memory for earlier answers, those that began first are forgotten first
    draft_vocabulary  mtp only: tokens that the layer chooses from at a time, of a larger vocabulary those that occur
                      at this node and the lowest ids; 0: all
    """

    drafter: str = NO_DRAFTER
    count: str = "auto"
    max_drafts: int = 3
    answer_bytes: int = 64 << 20
    draft_vocabulary: int = 1 << 15

    def __post_init__(self) -> None:
        refuse(
            one_of(self, DRAFTERS, "drafter"),
            one_of(self, COUNTS, "count"),
            at_least(self, 1, "max_drafts", remedy="; drafter: none turns it off"),
            at_least(self, TOKEN_BYTES, "answer_bytes", remedy="; drafter: ngram keeps no answers"),
            at_least(self, 0, "draft_vocabulary", remedy="; 0 has the layer choose from all tokens"),
        )

    @property
    def is_on(self) -> bool:
        return self.drafter != NO_DRAFTER


def drafter_factory(config: SpeculationConfig) -> DrafterFactory | None:
    """Returns the maker of the drafters that the config names; None: no sequence has one of its own."""
    if config.drafter == "suffix":
        store = AnswerStore(config.answer_bytes)
        return lambda request: SuffixDrafter(store, request.salt, request.num_prompt_tokens)
    return (lambda request: NgramDrafter()) if config.drafter == "ngram" else None


def draft_count(config: SpeculationConfig, max_step_drafts: int) -> DraftCount:
    """Returns what chooses the number of drafts, of all sequences of a step at most `max_step_drafts`."""
    return AutoCount(max_step_drafts) if config.count == "auto" else FixedCount(max_step_drafts)
