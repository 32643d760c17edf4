"""This router's work on each node, from the moment it is sent until it is seen finished, and the hits to come. Pure.

Events in, values out; `router/requests/` reports what becomes of each decision by its number.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from headrace.cache.types import PrefixKey
from headrace.wire.node_messages import NodeInfo, NodeStatus
from router.routing.candidates import Candidate, Load
from router.routing.coming_hits import ComingHits
from router.routing.node_book import Answer, NodeBook, Prompt
from router.routing.plan import Plan, RoutedRequest
from router.routing.reuse import Reuses

HITS_TTL_S = 2.0
"""How long a computed prompt counts as cached before the node's own report: events take milliseconds, longer if the
node is busy."""


@dataclass(slots=True)
class _Sent:
    """A decision in progress: who computes the prompt, who generates."""

    prefill: str | None
    decode: str | None
    num_tokens: int


class Ledger:
    """The books of all nodes, by name."""

    def __init__(self, hits_ttl_s: float = HITS_TTL_S) -> None:
        self._books: dict[str, NodeBook] = {}
        self._sent: dict[int, _Sent] = {}
        self.coming = ComingHits(hits_ttl_s)
        self.reuses = Reuses()

    def heartbeat(self, info: NodeInfo, status: NodeStatus, now_s: float) -> None:
        """Takes over a node's own figures; the node may be new."""
        book = self._books.setdefault(info.name, NodeBook())
        book.heartbeat(status, info.layout.block_size, info.max_step_tokens, now_s)

    def forget(self, name: str) -> None:
        """Drops the book of a node that is gone, or of its earlier process."""
        self._books.pop(name, None)
        self.coming.forget(name)

    def load(self, name: str, now_s: float) -> Load:
        """A node's work now."""
        return self._books[name].load(now_s)

    def loads(self, names: Iterable[str], now_s: float) -> Sequence[Load]:
        """The work of these nodes now; of one about which nothing has changed, the same object."""
        books = self._books
        return [books[name].load(now_s) for name in names]

    # ------------------------------------------------------------ the course of a decision

    def sent(
        self,
        request: RoutedRequest,
        plan: Plan,
        candidates: Sequence[Candidate],
        keys: Mapping[int, Sequence[PrefixKey]],
        boundaries: Collection[int] = (),
    ) -> None:
        """The request goes where the plan says: counts from now on.

        keys         the prompt's, for each block size
        boundaries   the request's hints where to leave checkpoints
        """
        prefill = next(each for each in candidates if each.name == plan.prefill)
        number, num_tokens = request.number, request.num_tokens
        start = 0 if request.is_scored else min(prefill.hit.resumable_tokens, num_tokens - 1)
        if plan.fetch_from is not None:
            source = next(each for each in candidates if each.name == plan.fetch_from)
            start = max(start, min(source.hit.state_tokens, num_tokens - 1))
        self._sent[number] = _Sent(plan.prefill, plan.decode, num_tokens)
        is_alone, prompt, answer = plan.decode == plan.prefill, Prompt(start, num_tokens), None
        if plan.decode is not None:
            answer = Answer(
                num_tokens,
                is_alone,
                expected_tokens=request.answer_tokens,
                token_gap_s=request.objectives.token_gap_s,
                first_token_s=plan.prediction.first_token_s or 0.0,
            )
        if (book := self._books.get(plan.prefill)) is not None:
            book.add(number, prompt, answer if is_alone else None)
        if answer is not None and not is_alone and (book := self._book(plan.decode)) is not None:
            book.add(number, None, answer)
        known = keys.get(prefill.block_size, ())
        positions = _positions(len(known), prefill.block_size, start, num_tokens, boundaries)
        self.coming.expect(number, plan.prefill, known, positions)
        if answer is not None:  # a prompt without one takes no room where answers are generated
            size = min(keys, default=prefill.block_size)  # one for all nodes: each size has keys of its own
            self.reuses.began(number, keys.get(size, ()), size)

    def reserved(self, number: int) -> None:
        """The node that will generate has reserved what it needs."""
        if (sent := self._sent.get(number)) is not None and (book := self._book(sent.decode)) is not None:
            book.admitted(number)

    def started(self, number: int, now_s: float) -> None:
        """The prompt's turn has come."""
        if (sent := self._sent.get(number)) is not None and (book := self._book(sent.prefill)) is not None:
            book.started(number, now_s)

    def prefills_itself(self, number: int, resumed_tokens: int, now_s: float) -> None:
        """The node that generates computes the prompt, whatever was planned."""
        sent = self._sent.get(number)
        if sent is None or sent.decode is None:
            return
        if sent.prefill != sent.decode:
            self._end_prompt(number, sent, now_s)
            self.coming.given_up(number)
        sent.prefill = sent.decode
        if (book := self._book(sent.decode)) is not None:
            book.add(number, Prompt(min(resumed_tokens, sent.num_tokens), sent.num_tokens))
            book.started(number, now_s)

    def prompt_computed(self, number: int, now_s: float) -> None:
        """The first token is there."""
        if (sent := self._sent.get(number)) is None:
            return
        if (book := self._book(sent.prefill)) is not None:
            book.computed(number, now_s)
        self._end_prompt(number, sent, now_s)
        self.coming.computed(number, now_s)
        if (book := self._book(sent.decode)) is not None:
            book.generating(number)

    def ended(self, number: int, now_s: float) -> None:
        """Nothing of the request is left on these nodes: it is done, or goes on under another number."""
        if (sent := self._sent.pop(number, None)) is None:
            return
        self._end_prompt(number, sent, now_s)
        self.coming.given_up(number)
        self.reuses.ended(number)
        if (book := self._book(sent.decode)) is not None:
            book.end_answer(number)

    def _end_prompt(self, number: int, sent: _Sent, now_s: float) -> None:
        if (book := self._book(sent.prefill)) is not None:
            book.end_prompt(number, now_s)
        sent.prefill = None

    def _book(self, name: str | None) -> NodeBook | None:
        return None if name is None else self._books.get(name)


def _positions(num_keys: int, block_size: int, start: int, end: int, boundaries: Collection[int]) -> Iterator[int]:
    """The checkpoints that a prefill from `start` up to `end` leaves by the default policy: at the last boundary before
    the last token, and at the request's hints."""
    ends = {(end - 1) // block_size, *(hint // block_size for hint in boundaries if start < hint < end)}
    return (position for position in ends if start < position * block_size and position <= num_keys)
