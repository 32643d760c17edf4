"""How far answers have come in their grammars, by llguidance, and the processor time that they take. No torch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from weakref import WeakSet

from llguidance import LLMatcher

ANSWER_ALLOWANCE_S, TOKEN_LIMIT_S = 0.5, 0.005
"""Processor time of an answer: the allowance, and so much for each mask. Of a vocabulary of 151,936 the dearest mask of
benchmarks/engine/structured_output.py takes 1.5 ms. What allows a token is looked at again when it is taken, so that
this bounds that as well."""
NOT_DRAFTED = "// of a client: not drafted"
"""In a grammar: nothing is looked up ahead of its masks. llguidance computes masks without the GIL, but keeps it while
it follows tokens or finds what is forced: a grammar of 800 rules took it 55 s for that, in one call."""


@dataclass
class GrammarTime:
    """Processor time that one answer's masks and looks at its drafts have taken."""

    num_masks: int = 0
    seconds: float = 0.0
    is_spent: bool = False

    def add(self, seconds: float, num_masks: int = 1) -> None:
        """More of it, for so many masks."""
        self.num_masks += num_masks
        self.seconds += seconds
        allowed_s = ANSWER_ALLOWANCE_S + TOKEN_LIMIT_S * self.num_masks
        self.is_spent = self.is_spent or self.seconds > allowed_s


class CompiledGrammar:
    """A grammar as llguidance compiled it. The matchers of its answers share a lexer, which is locked while one of them
    computes a mask or follows a token; who waits for it may hold the GIL.

    answers       those that follow it, while they live
    is_given_up   a thread that was left behind may hold the lock: no matcher of them is touched again
    """

    def __init__(self, text: str, matcher: LLMatcher) -> None:
        self.text = text
        self.answers: WeakSet[AnswerGrammar] = WeakSet()
        self.is_given_up = False
        self._matcher = matcher

    def answer(self) -> AnswerGrammar:
        """An answer that has yet to begin."""
        answer = AnswerGrammar(self, self._matcher.deep_copy())
        self.answers.add(answer)
        return answer


class AnswerGrammar:
    """How far one answer has come in its grammar. One thread at a time may use it.

    time   spent on it; once that is too much, the matcher is not touched again
    """

    def __init__(self, compiled: CompiledGrammar, matcher: LLMatcher) -> None:
        self.compiled = compiled
        self.matcher = matcher
        self.time = GrammarTime()

    @property
    def is_spent(self) -> bool:
        """True if it took too much time, or another answer by the same grammar did for one mask."""
        return self.time.is_spent or self.compiled.is_given_up

    @cached_property
    def takes_drafts(self) -> bool:
        """False for a client's own grammar: to look ahead in it may take a minute, in which no other thread runs."""
        return NOT_DRAFTED not in self.compiled.text

    def copied_for(self, drafts: Sequence[int]) -> LLMatcher:
        """The matcher, or where drafts are to follow a copy that they may change."""
        return self.matcher.deep_copy() if drafts else self.matcher

    def append(self, token_ids: Sequence[int]) -> None:
        """The answer's next tokens; afterwards `error` is set if the grammar does not allow them."""
        if not self.is_spent:
            self.matcher.consume_tokens(list(token_ids))

    def allowed(self, token_ids: Sequence[int]) -> Sequence[int]:
        """The leading ones of these tokens after which the grammar allows another one, up to one that takes long."""
        if self.is_spent or not self.takes_drafts:
            return ()
        began_s, looked_s = time.thread_time(), time.perf_counter()
        further, num_allowed = self.matcher.deep_copy(), 0
        for token_id in token_ids:
            # A layer drafts NO_TOKEN from a hidden vector of NaN.
            is_allowed = token_id >= 0 and further.consume_token(token_id) and not further.is_stopped()
            before_s, looked_s = looked_s, time.perf_counter()
            if not is_allowed or looked_s - before_s > TOKEN_LIMIT_S:
                break
            num_allowed += 1
        self.time.add(time.thread_time() - began_s, num_masks=0)
        return token_ids[:num_allowed]

    def forced(self) -> list[int]:
        """Tokens of the only text that the grammar leaves next; none where it leaves a choice."""
        if self.is_spent or not self.takes_drafts:
            return []
        began_s = time.thread_time()
        tokens = self.matcher.compute_ff_tokens()
        self.time.add(time.thread_time() - began_s, num_masks=0)
        return tokens

    @property
    def is_complete(self) -> bool:
        """True if the answer is whole and nothing may follow it."""
        return not self.is_spent and self.matcher.is_stopped() and not self.matcher.is_error()

    @property
    def error(self) -> str | None:
        """Why the grammar can be followed no further; None: it can."""
        if self.is_spent:
            return f"it takes more than {TOKEN_LIMIT_S * 1e3:g} ms a token: let fewer parts match the same text"
        return first_line(self.matcher.get_error()) if self.matcher.is_error() else None


def first_line(message: str) -> str:
    return message.partition("\n")[0]
