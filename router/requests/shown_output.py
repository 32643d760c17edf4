"""Output that a request's client has been shown: tokens of the answer, log-probabilities of the prompt. Pure.

Attempts repeat one another: a node that takes over scores the prompt again and computes behind the tokens that were
shown. Here each of them counts once.
"""

from __future__ import annotations

from dataclasses import replace

from headrace.request import PromptLogprobs, Request, Token
from router.requests.events import Show


class ShownOutput:
    """Tokens and scores in the order in which the client gets them.

    first_may_stand_alone   False: a prefill node's token is shown with the decode node's first one
    held_first              that token, while it waits
    generated               ids of the tokens shown so far
    """

    def __init__(self, request: Request, *, first_may_stand_alone: bool) -> None:
        self._request = request
        self._first_may_stand_alone = first_may_stand_alone
        self.held_first: tuple[Token, ...] = ()
        self._num_scored = 0
        self.generated: list[int] = []

    @property
    def request_so_far(self) -> Request:
        """The request for the next attempt: the tokens shown so far follow the prompt."""
        sampling = self._request.sampling
        if self._num_scored == self._request.num_prompt_tokens:
            sampling = replace(sampling, prompt_logprobs=None)
        return replace(self._request, tokens=self._request.tokens.followed_by(self.generated), sampling=sampling)

    def show(self, tokens: tuple[Token, ...]) -> Show:
        """These tokens, behind the one that was held back."""
        if self.held_first:
            tokens, self.held_first = (*self.held_first, *tokens), ()
        self.generated += [token.id for token in tokens]
        return Show(tokens)

    def show_or_hold(self, token: Token) -> list[Show]:
        """A prefill node's token: shown at once, or with what the next `show` brings."""
        if self._first_may_stand_alone:
            return [self.show((token,))]
        self.held_first = (token,)
        return []

    def has_gap_before(self, logprobs: PromptLogprobs) -> bool:
        """True if the scores of positions before these are missing. The first part scores the first token, too."""
        return logprobs.start > max(self._num_scored, 1)

    def new_scores(self, logprobs: PromptLogprobs) -> PromptLogprobs | None:
        """The part that an earlier attempt, which broke off, has not shown; None: it has shown all of it."""
        if logprobs.end <= self._num_scored:
            return None
        new = logprobs.between(max(logprobs.start, self._num_scored), logprobs.end)
        self._num_scored = logprobs.end
        return new
