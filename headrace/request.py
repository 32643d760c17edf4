"""A generation request and the tokens of its answer, as router, engine and wire messages share them.

Frozen dataclasses; counts are in tokens, logprobs are natural logarithms.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from headrace.token_array import TokenArray


@dataclass(frozen=True)
class BadWord:
    """Tokens that must not follow each other in an answer; at least one."""

    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of a request. The router validates their ranges; nodes do not check them again.

    seed             always set: seed and position fix the random draw on any node
    top_k            0: no limit
    logprobs         alternatives to report beside each chosen token; None: no logprobs at all
    prompt_logprobs  the same for the prompt's tokens
    bias_ids         tokens to whose logits `bias_values`, one for each, are added before all else
    allowed_token_ids  no other token is drawn; empty: any may be
    grammar          what the answer must obey, as `headrace.grammar` has it; None: nothing
    """

    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    bias_ids: tuple[int, ...] = ()
    bias_values: tuple[float, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[BadWord, ...] = ()

    @property
    def has_bias(self) -> bool:
        """True if some logits are changed in the same way at each draw."""
        return bool(self.bias_ids or self.allowed_token_ids or any(len(word.tokens) == 1 for word in self.bad_words))

    grammar: str | None = None

    @cached_property
    def has_penalty(self) -> bool:
        """True if a token's chance depends on the tokens before it."""
        return self.repetition_penalty != 1.0 or bool(self.presence_penalty or self.frequency_penalty)


@dataclass(frozen=True)
class Request:
    """One prompt with its sampling parameters.

    tokens             the prompt, then the tokens that another node generated before a migration
    num_prompt_tokens  how many of `tokens` are the prompt
    salt               separates tenants: prefixes are shared only under the same salt
    boundaries         positions in the prompt that are good places for a checkpoint
    is_resumable       its client chose `request_id`, and may ask for the rest of the answer at another router
    age_s              seconds since the router admitted the request: nodes serve their waiting lines in that order
    token_gap_s        wanted between two tokens of the answer: bounds the prompts in a step beside it; None: no bound
    client             a number for the client that asks, the same at every router: nodes share their steps by it
    """

    request_id: str
    tokens: TokenArray
    num_prompt_tokens: int
    sampling: Sampling
    salt: bytes = b""
    boundaries: tuple[int, ...] = ()
    age_s: float = 0.0
    is_resumable: bool = False
    token_gap_s: float | None = None
    client: int = 0


@dataclass(frozen=True)
class Alternative:
    """A token that could have been chosen at a position."""

    id: int
    logprob: float


@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities at one position, before temperature and penalties; `top` is sorted, most likely first."""

    logprob: float
    top: tuple[Alternative, ...] = ()


@dataclass(frozen=True, slots=True)
class Token:
    """One token of a prompt or an answer."""

    id: int
    logprobs: Logprobs | None = None


@dataclass(frozen=True)
class PromptLogprobs:
    """Logprobs of consecutive tokens of a prompt, in flat arrays. A prompt's first token has none.

    start         position in the prompt of the first of them, at least 1
    logprobs      one for each token
    top_ids       alternatives, as many for each token, most likely first: those of the first token, then the next's
    top_logprobs  one for each of `top_ids`
    """

    start: int
    logprobs: tuple[float, ...]
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()

    @property
    def end(self) -> int:
        """Position behind its last token: with this part, so many leading tokens of the prompt are known."""
        return self.start + len(self.logprobs)

    @property
    def num_top(self) -> int:
        """Alternatives a token."""
        return len(self.top_ids) // len(self.logprobs) if self.logprobs else 0

    def of(self, index: int) -> Logprobs:
        """Logprobs of its token `index`."""
        top = slice(index * self.num_top, (index + 1) * self.num_top)
        return Logprobs(self.logprobs[index], tuple(map(Alternative, self.top_ids[top], self.top_logprobs[top])))

    def between(self, start: int, end: int) -> PromptLogprobs:
        """The part of it for the tokens at `start` to `end` - 1, all of which it has."""
        tokens = slice(start - self.start, end - self.start)
        top = slice(tokens.start * self.num_top, tokens.stop * self.num_top)
        return PromptLogprobs(start, self.logprobs[tokens], self.top_ids[top], self.top_logprobs[top])


class FinishReason(Enum):
    """Why generation ended: a stop token or stop string, or the limit on tokens."""

    STOP = "stop"
    LENGTH = "length"
