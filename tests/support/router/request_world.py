"""One request, its driver, a decode node, a prefill node and the network between them, as a value to explore.

`RequestLifecycle` is real. The nodes are models that send what the protocol allows: each call delivers its events in
order, calls overtake each other, and the transfer takes a way of its own. A mishap is a node that dies or is busy, a
transfer that breaks, is lost or comes late, or a call that finds no node. Every step asserts that the client sees the
answer's tokens in order, none lost and none doubled, and that the request ends once.
"""

import copy
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace
from typing import Self

from headrace.request import FinishReason, Request, Sampling, Token
from headrace.token_array import TokenArray
from headrace.wire import messages as m
from headrace.wire.errors import NodeBusy, NodeCrashed, NodeError, NodeLost, TransferBroken
from router.requests import events as ev
from router.requests.lifecycle import RequestLifecycle
from router.requests.states import Completed, Failed
from tests.support.router.fake_nodes import reservation

ANSWER = (101, 102, 103)  # whichever node computes it, the token at place k is ANSWER[k]
MAX_ATTEMPTS = 2
CAUSES = {"lost": NodeLost, "crashed": NodeCrashed, "busy": NodeBusy, "broken": TransferBroken}


@dataclass(frozen=True)
class DecodeNode:
    """`place`: of its next token. `nonce`: of the session that it expects, or expected last."""

    stage: str = "admitting"  # receiving, interrupted, running, done
    place: int = 0
    nonce: int = 0


@dataclass(frozen=True)
class PrefillNode:
    nonce: int | None
    place: int
    stage: str = "waiting"  # computing, sampled, sent


@dataclass(frozen=True)
class Attempt:
    """One try of the driver: calls, the events on their way to the router, and the commands on their way back."""

    place: int  # tokens shown before it
    decode: DecodeNode | None = None
    prefill: PrefillNode | None = None
    wanted: tuple[int] | None = None  # the nonce to open a prefill call for
    from_decode: tuple[tuple, ...] = ()
    from_prefill: tuple[tuple, ...] = ()
    commands: tuple[tuple, ...] = ()
    in_flight: frozenset[int] = frozenset()  # nonces of transfers that may still land
    unlanded: int | None = None  # the nonce that the driver's landing timeout watches


def new_life(life_type: type[RequestLifecycle], max_tokens: int, token_gap_s: float | None = None) -> RequestLifecycle:
    request = Request("r", TokenArray.of((1, 2)), 2, Sampling(max_tokens=max_tokens, seed=0))
    return life_type(request, max_attempts=MAX_ATTEMPTS, now_s=0.0, token_gap_s=token_gap_s)


@dataclass
class RequestWorld:
    """`mishaps`: how many may still happen. `may_stop`: the client's text may contain a stop string. `token_gap_s`: as
    the client asks for it.

    `ended`: "completed" or "failed" once the request has ended.
    """

    mishaps: int
    may_stop: bool = False
    max_tokens: int = len(ANSWER)
    token_gap_s: float | None = None
    life_type: type[RequestLifecycle] = RequestLifecycle
    has_stopped: bool = False
    num_nonces: int = 0
    ended: str = ""
    shown: tuple[int, ...] = ()
    attempt: Attempt = field(default_factory=lambda: Attempt(0))
    life: RequestLifecycle = field(init=False)

    def __post_init__(self) -> None:
        self.life = new_life(self.life_type, self.max_tokens, self.token_gap_s)

    # ------------------------------------------------------------ a world to explore

    def key(self) -> Hashable:
        life = self.life
        state = type(life.state).__name__ if isinstance(life.state, Failed) else life.state
        told = (life.failures, life._is_prefilling, life._has_decoded, life.shown.held_first)
        return state, told, self.shown, self.attempt, self.mishaps, self.has_stopped, self.num_nonces, self.ended

    def after(self, action: tuple) -> Self:
        world = copy.copy(self)
        world.life = copy.copy(self.life)
        world.life.shown = copy.copy(self.life.shown)
        world.life.shown.generated = list(self.life.generated)
        world.life.report = copy.copy(self.life.report)
        name, *arguments = action
        getattr(world, name)(*arguments)
        return world

    def enabled(self) -> Iterator[tuple]:
        if not self.ended:
            yield from self._driver_actions()
            yield from self._decode_actions()
        yield from self._prefill_actions()

    def assert_over(self) -> None:
        state = self.life.state
        assert self.life.is_over, f"the request hangs in {state}"
        assert self.shown == tuple(self.life.generated)
        if isinstance(state, Completed):
            whole = self.shown == ANSWER[: self.max_tokens]
            assert whole if state.finish is FinishReason.LENGTH else self.has_stopped

    # ------------------------------------------------------------ what may happen

    def _driver_actions(self) -> Iterator[tuple]:
        attempt = self.attempt
        if self.life.failures.await_judgement:
            for outlived in (frozenset(), frozenset(self.life.failures.unproven)):
                yield "judge", outlived
        elif (
            attempt.decode is None and attempt.prefill is None and not attempt.from_decode and not attempt.from_prefill
        ):
            yield ("open_decode",) if self.life.needs_decode else ("open_prefill", None)
            if self.mishaps:
                for cause in ("lost", "busy"):
                    yield ("fail_to_open", cause)
        if attempt.wanted is not None:
            (nonce,) = attempt.wanted
            yield ("open_prefill", nonce)
            if self.mishaps:
                yield ("find_no_prefill_node", nonce)
        if attempt.unlanded is not None and (self.mishaps or attempt.unlanded not in attempt.in_flight):
            yield ("landing_timeout", attempt.unlanded)
        if attempt.from_decode:
            yield ("deliver_from_decode",)
        if self.may_stop and not self.has_stopped and self.shown:
            yield ("find_stop",)

    def _decode_actions(self) -> Iterator[tuple]:
        attempt, node = self.attempt, self.attempt.decode
        if node is None:
            return
        if node.stage == "admitting":
            yield ("admit", "remote")
            yield ("admit", "local")
        if node.stage == "receiving" and node.nonce in attempt.in_flight:
            yield ("land",)
        if node.stage == "running":
            yield ("decode",)
        if attempt.commands:
            yield ("obey_router",)
        if self.mishaps and node.stage != "done":
            yield ("lose_decode_node", "lost", "queued events arrive")
            if attempt.from_decode:
                yield ("lose_decode_node", "lost", "queued events are lost")
            if node.stage == "running":
                yield ("lose_decode_node", "crashed", "queued events arrive")
            if node.stage == "receiving":
                yield ("break_session",)

    def _prefill_actions(self) -> Iterator[tuple]:
        attempt, node = self.attempt, self.attempt.prefill
        if attempt.from_prefill:
            yield ("deliver_from_prefill",)
        if node is None:
            return
        if node.stage == "waiting":
            yield ("compute",)
        if node.stage == "computing":
            yield ("sample",)
        if node.stage == "sampled":
            yield ("send", "whole")
            if self.mishaps and node.nonce is not None:
                yield ("send", "lost")
        if node.stage == "sent":
            yield ("report_prefill",)
        if self.mishaps:
            causes = {"waiting": ("lost", "busy"), "computing": ("lost", "broken", "crashed")}
            for cause in causes.get(node.stage, ("lost",)):
                yield ("fail_prefill", cause, "queued events arrive")
                if attempt.from_prefill:
                    yield ("fail_prefill", cause, "queued events are lost")

    # ------------------------------------------------------------ the driver

    def open_decode(self) -> None:
        self._set(decode=DecodeNode(place=self.attempt.place))
        self._tell(ev.DecodeStarted("d0"))

    def fail_to_open(self, cause: str) -> None:
        self.mishaps -= 1
        error = CAUSES[cause]("node", cause)
        self._tell(ev.DecodeLost(error) if self.life.needs_decode else ev.PrefillFailed(None, error))

    def open_prefill(self, nonce: int | None) -> None:
        self._set(prefill=PrefillNode(nonce, self.attempt.place), wanted=None)
        self._tell(ev.PrefillStarted("p0", nonce))

    def find_no_prefill_node(self, nonce: int) -> None:
        self.mishaps -= 1
        self._set(wanted=None)
        self._tell(ev.PrefillFailed(nonce, None))

    def landing_timeout(self, nonce: int) -> None:
        self.mishaps -= nonce in self.attempt.in_flight
        self._set(unlanded=None)
        self._tell(ev.PrefillFailed(nonce, NodeError("p0", "did not land")))

    def judge(self, outlived: frozenset[str]) -> None:
        self._tell(ev.Judged(outlived))

    def find_stop(self) -> None:
        self.has_stopped = True
        self._tell(ev.StopFound())

    def deliver_from_decode(self) -> None:
        (kind, *values), *later = self.attempt.from_decode
        self._set(from_decode=tuple(later))
        match kind, *values:
            case "reservation", nonce:
                self._tell(reservation(nonce))
            case ("local",):
                self._tell(m.LocalPrefill(0))
            case "session failed", nonce:
                self._tell(m.SessionFailed(nonce, "digest"))
            case ("landed",):
                self._tell(m.TransferReport(8, 100, 200, 0.5))
            case "token", place:
                is_last = place + 1 == self.max_tokens
                self._tell(m.Tokens((Token(ANSWER[place]),), FinishReason.LENGTH if is_last else None))
            case "done", finish:
                self._tell(m.DecodeDone(finish, m.DecodeReport("d0", 0, 0, "received", 0)))
            case "lost", cause:
                self._tell(ev.DecodeLost(CAUSES[cause]("d0", cause)))
            case other:
                raise TypeError(f"unknown event {other}")

    def deliver_from_prefill(self) -> None:
        (kind, *values), *later = self.attempt.from_prefill
        self._set(from_prefill=tuple(later))
        match kind, *values:
            case ("computing",):
                self._tell(m.ComputeStarted())
            case "first token", place:
                is_last = place + 1 == self.max_tokens
                self._tell(m.FirstToken(Token(ANSWER[place]), FinishReason.LENGTH if is_last else None))
            case "done", nonce:
                self._set(unlanded=nonce)
                self._tell(m.PrefillDone(m.PrefillReport("p0", 0, 0, 0, 0)))
            case "failed", nonce, cause:
                self._tell(ev.PrefillFailed(nonce, CAUSES[cause]("p0", cause)))
            case other:
                raise TypeError(f"unknown event {other}")

    def _tell(self, event: ev.Event) -> None:
        """What `RequestDriver` does with an event: nothing once the attempt is over, but for a late report."""
        if self.ended and not (self.ended == "completed" and isinstance(event, m.PrefillDone)):
            return
        for instruction in self.life.on(event, 1.0):
            self._obey(instruction)

    def _obey(self, instruction: ev.Instruction) -> None:
        attempt = self.attempt
        assert not self.ended, f"{instruction} after the end"
        match instruction:
            case ev.Show(tokens):
                assert tokens, "nothing to show"
                self.shown += tuple(token.id for token in tokens)
                assert self.shown == ANSWER[: len(self.shown)], f"the client sees {self.shown}"
            case ev.StartPrefill(reserved, first_token):
                assert first_token is None or self.shown[attempt.place] == first_token
                self._set(wanted=(reserved.nonce,))
            case ev.SendRenew(nonce):
                renew = ("renew", nonce)
                self._set(prefill=None, from_prefill=(), wanted=None, commands=(*attempt.commands, renew))
            case ev.SendStop():
                self._set(commands=(*attempt.commands, ("stop",)))
            case ev.StartOver():
                self.attempt = Attempt(len(self.shown))
            case ev.FinishRequest():
                self.ended = "completed"
                self._set(decode=None, from_decode=(), commands=(), wanted=None)
            case ev.FailRequest():
                self.ended = "failed"
                self.attempt = Attempt(len(self.shown))

    def _set(self, **changes: object) -> None:
        self.attempt = replace(self.attempt, **changes)

    # ------------------------------------------------------------ the decode node

    def admit(self, way: str) -> None:
        if way == "local":
            self._decode("running")
            self._send(("local",))
        else:
            self._reserve()

    def _reserve(self) -> None:
        self.num_nonces += 1
        self._decode("receiving", nonce=self.num_nonces)
        self._send(("reservation", self.num_nonces))

    def land(self) -> None:
        assert self.attempt.decode is not None
        self._decode("running", place=self.attempt.decode.place + 1)
        self._send(("landed",))

    def decode(self) -> None:
        assert self.attempt.decode is not None
        place = self.attempt.decode.place
        if place < self.max_tokens:
            self._decode("running", place=place + 1)
            self._send(("token", place))
        else:
            self._decode("done")
            self._send(("done", FinishReason.LENGTH))

    def obey_router(self) -> None:
        node, (command, *later) = self.attempt.decode, self.attempt.commands
        assert node is not None
        self._set(commands=tuple(later))
        if command == ("stop",) and node.stage == "running":
            self._decode("done")
            self._send(("done", FinishReason.STOP))
        elif command == ("renew", node.nonce) and node.stage in ("receiving", "interrupted"):
            self._reserve()

    def break_session(self) -> None:
        assert self.attempt.decode is not None
        self.mishaps -= 1
        self._decode("interrupted")
        self._send(("session failed", self.attempt.decode.nonce))

    def lose_decode_node(self, cause: str, how: str) -> None:
        self.mishaps -= 1
        if how == "queued events are lost":
            self._set(from_decode=())
        self._send(("lost", cause))
        self._set(decode=None, commands=())

    def _decode(self, stage: str, **changes: int) -> None:
        assert self.attempt.decode is not None
        self._set(decode=replace(self.attempt.decode, stage=stage, **changes))

    def _send(self, event: tuple) -> None:
        self._set(from_decode=(*self.attempt.from_decode, event))

    # ------------------------------------------------------------ the prefill node

    def compute(self) -> None:
        self._prefill("computing", ("computing",))

    def sample(self) -> None:
        assert self.attempt.prefill is not None
        self._prefill("sampled", ("first token", self.attempt.prefill.place))

    def send(self, how: str) -> None:
        assert self.attempt.prefill is not None
        self._prefill("sent")
        if how == "lost":
            self.mishaps -= 1
        elif (nonce := self.attempt.prefill.nonce) is not None:
            self._set(in_flight=self.attempt.in_flight | {nonce})

    def report_prefill(self) -> None:
        assert self.attempt.prefill is not None
        self._prefill("sent", ("done", self.attempt.prefill.nonce))
        self._set(prefill=None)

    def fail_prefill(self, cause: str, how: str) -> None:
        assert self.attempt.prefill is not None
        self.mishaps -= 1
        if how == "queued events are lost":
            self._set(from_prefill=())
        self._prefill("failed", ("failed", self.attempt.prefill.nonce, cause))
        self._set(prefill=None)

    def _prefill(self, stage: str, *events: tuple) -> None:
        assert self.attempt.prefill is not None
        prefill = replace(self.attempt.prefill, stage=stage)
        self._set(prefill=prefill, from_prefill=(*self.attempt.from_prefill, *events))
