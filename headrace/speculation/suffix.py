"""Drafts from the sequence itself and from earlier answers of this node under the same salt.

Source: G. Oliaro et al., SuffixDecoding, 2024: agents say again what they said before. Here occurrences are found by
chains, as for n-grams, instead of a suffix tree.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.speculation.ngram import (
    INDEXED_A_CALL,
    MAX_MATCH_TOKENS,
    MIN_MATCH_TOKENS,
    TRIED_OCCURRENCES,
    NgramDrafter,
    agreeing,
    periodic,
)

TOKEN_BYTES = 300
"""Host memory that a token of a kept answer is taken for; tests/unit/speculation/test_suffix.py holds it to that."""


FOLLOWED_PLACES = 4 * TRIED_OCCURRENCES
"""Places of a chain that are looked at, those in the request's own answer included, which are not compared."""


@dataclass(eq=False)
class Answer:
    """An answer's tokens, and for each where it and its predecessors occurred before: an answer, and the end there."""

    tokens: array[int] = field(default_factory=lambda: array("i"))
    previous: list[tuple[Answer, int] | None] = field(default_factory=list)
    is_forgotten: bool = False


class AnswerIndex:
    """The answers under one salt, with the latest occurrence of all `MIN_MATCH_TOKENS` successive tokens."""

    def __init__(self) -> None:
        self._latest: dict[tuple[int, ...], tuple[Answer, int]] = {}
        self.num_answers = 0

    def append(self, answer: Answer, token_id: int) -> None:
        """Adds an answer's next token."""
        answer.tokens.append(token_id)
        gram, end = _gram(answer.tokens), len(answer.tokens)
        answer.previous.append(self._latest.get(gram) if gram else None)
        if gram:
            self._latest[gram] = (answer, end)

    def remove(self, answer: Answer) -> None:
        """Forgets an answer; chains that led through it end there."""
        for end in range(MIN_MATCH_TOKENS, len(answer.tokens) + 1):
            gram = tuple(answer.tokens[end - MIN_MATCH_TOKENS : end])
            if (latest := self._latest.get(gram)) is not None and latest[0] is answer:
                del self._latest[gram]
        answer.is_forgotten = True
        del answer.tokens[:], answer.previous[:]

    def occurrences(self, tokens: Sequence[int], own: Answer) -> list[tuple[int, Answer, int]]:
        """Occurrences of the last tokens in answers but `own`, latest first: how many agree, and where they end."""
        found: list[tuple[int, Answer, int]] = []
        place = self._latest.get(_gram(tokens))
        for _ in range(FOLLOWED_PLACES):
            if place is None or place[0].is_forgotten or len(found) == TRIED_OCCURRENCES:
                break
            answer, end = place
            if answer is not own and end < len(answer.tokens):
                found.append((agreeing(tokens, answer.tokens, end, MAX_MATCH_TOKENS), answer, end))
            place = answer.previous[end - 1]
        return found


class AnswerStore:
    """Answers of one node, for drafts of later ones: those under another salt are as if they did not exist.

    max_bytes   host memory for them, about; the answers that began first are forgotten first
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_tokens = max_bytes // TOKEN_BYTES
        self._indices: dict[bytes, AnswerIndex] = {}
        self._kept: OrderedDict[Answer, bytes] = OrderedDict()
        self.num_tokens = 0

    def extend(self, salt: bytes, answer: Answer, tokens: Sequence[int]) -> None:
        """Adds tokens to an answer, unless it has been forgotten since it began."""
        if answer.is_forgotten or not tokens:
            return
        index = self._indices.setdefault(salt, AnswerIndex())
        if answer not in self._kept:
            self._kept[answer] = salt
            index.num_answers += 1
        for token_id in tokens:
            index.append(answer, token_id)
        self.num_tokens += len(tokens)
        while self.num_tokens > self._max_tokens:
            self._forget(*self._kept.popitem(last=False))

    def occurrences(self, salt: bytes, tokens: Sequence[int], own: Answer) -> list[tuple[int, Answer, int]]:
        """Occurrences of the last tokens in answers under this salt; see `AnswerIndex`."""
        index = self._indices.get(salt)
        return [] if index is None else index.occurrences(tokens, own)

    @property
    def salts(self) -> set[bytes]:
        """Salts under which there are answers."""
        return set(self._indices)

    def _forget(self, answer: Answer, salt: bytes) -> None:
        self.num_tokens -= len(answer.tokens)
        index = self._indices[salt]
        index.remove(answer)
        index.num_answers -= 1
        if not index.num_answers:
            del self._indices[salt]


class SuffixDrafter:
    """Proposes what followed the longest earlier occurrence of the last tokens: here, or in answers under this salt.

    store              the node's answers, to which this one is added as it grows
    num_prompt_tokens  tokens before the answer, which are not added
    """

    def __init__(self, store: AnswerStore, salt: bytes, num_prompt_tokens: int) -> None:
        self._store = store
        self._salt = salt
        self._num_stored = num_prompt_tokens
        self._answer = Answer()
        self._within = NgramDrafter()

    def propose(self, tokens: Sequence[int], max_drafts: int) -> list[int]:
        """Drafts by the longest match, the request's own before others; of other answers no more than agree."""
        here = self._within.match(tokens)
        elsewhere = self._store.occurrences(self._salt, tokens, self._answer)
        new = tokens[self._num_stored : self._num_stored + INDEXED_A_CALL]
        self._store.extend(self._salt, self._answer, new)
        self._num_stored += len(new)
        longest = max((length for length, _, _ in elsewhere), default=0)
        if here is not None and here.length >= longest:
            return periodic(tokens, here.end, max_drafts)
        same = [(answer.tokens, end) for length, answer, end in elsewhere if length == longest]
        return _most_frequent(same, min(longest, max_drafts))


def _most_frequent(places: list[tuple[array[int], int]], max_drafts: int) -> list[int]:
    """The tokens that follow at most of these places, as long as more than half of those that go on agree."""
    drafts: list[int] = []
    while len(drafts) < max_drafts:
        going_on = [(tokens, end) for tokens, end in places if end < len(tokens)]
        counts = Counter(tokens[end] for tokens, end in going_on)
        if not counts:
            break
        ((token_id, count),) = counts.most_common(1)
        if 2 * count <= len(going_on):
            break
        drafts.append(token_id)
        places = [(tokens, end + 1) for tokens, end in going_on if tokens[end] == token_id]
    return drafts


def _gram(tokens: Sequence[int]) -> tuple[int, ...]:
    return tuple(tokens[-MIN_MATCH_TOKENS:]) if len(tokens) >= MIN_MATCH_TOKENS else ()
