"""Every order of what engine, session, router and call may do to one request on a decode node."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from decode_node.events import (
    Adopted,
    CancelSending,
    CancelSession,
    DecodeInput,
    DecodeInstruction,
    DecodeState,
    FinishAnswer,
    HaltAnswer,
    OpenSession,
    Orphaned,
    Receiving,
    ReplyDecoded,
    ResumeAnswer,
    RouterLost,
    RunDecode,
    Running,
    SendRequest,
    SessionLanded,
    StateSent,
)
from decode_node.lifecycle import DecodeLifecycle
from headrace.cache.hits import PrefixHit
from headrace.cache.layout import AttentionGroup, CacheLayout, StateGroup
from headrace.engine.sequence import AdmissionTimedOut, Admitted, Computed, Finished, Halted
from headrace.request import FinishReason, Token
from headrace.wire.messages import GoOn, Halt, HandOver, Renew, Reservation, SessionFailed, Stop, Tokens, TransferReport
from node_runtime.lifecycle import Admitting, CallBroken, CallEnded, Fail, Refuse, Release, Reply
from tests.support.transfer.exploration import Violation, explore

REMOTE = Admitted(PrefixHit(64, 16, 16), reused_tokens=64, state_arrives=True)
LOCAL = Admitted(PrefixHit(64, 48, 48), reused_tokens=48, state_arrives=False)
LAYOUT = CacheLayout("f", "float32", "float32", 16, (AttentionGroup(2, 2, 8),), (StateGroup(3, (10, 3), (2, 4, 4)),))
RESERVED = Reservation(9, 64, 64, "there", LAYOUT, 60.0, b"secret")
MOVED = TransferReport(36, 12_288, 744, 0.002)


@dataclass(frozen=True)
class World:
    """One request, and what surrounds it. Events wait in `inbox` while other things happen.

    engine    waiting, expecting a state, running, halted, finished or released
    sending   blocks and state are on their way to another node
    session   the nonce of the one that may still land, if any
    call      open, answered, failed, lost with its router, or ended
    halt      what the engine has been told and not done yet: halt, go on, or nothing
    """

    lifecycle: type[DecodeLifecycle] = DecodeLifecycle
    state: DecodeState = field(default_factory=Admitting)
    inbox: tuple[DecodeInput, ...] = ()
    engine: str = "waiting"
    session: int | None = None
    num_sessions: int = 0
    call: str = "open"
    num_renewals: int = 2
    num_stops: int = 1
    num_tokens: int = 2
    num_losses: int = 1
    num_moves: int = 0
    halt: str = ""
    sending: bool = False

    def key(self) -> World:
        return self

    def enabled(self) -> list[tuple]:
        actions: list[tuple] = []
        if self.engine == "waiting":
            actions += [("admits", REMOTE, "expecting"), ("admits", LOCAL, "running"), ("refuses",)]
        if self.halt:
            actions.append(("obeys",))
        if self.sending:
            actions += [("sent",), ("sending_fails",)]
        if self.engine == "running":
            actions += [("finishes",)] + [("samples",)] * (self.num_tokens > 0)
        if self.session is not None:
            actions += [("lands",), ("fails",)]
        if self.call == "open":
            nonces = range(1, self.num_sessions + 1) if self.num_renewals else ()
            actions += [("renews", nonce) for nonce in nonces]
            actions += [("stops",)] * (self.num_stops > 0) + [("is_taken",)] * bool(self.inbox)
            actions += [("moves", command) for command in (Halt(), HandOver(RESERVED), GoOn()) if self.num_moves]
            actions += [("is_lost",)] * (self.num_losses > 0)
        if self.call == "lost":
            actions.append(("adopts",))
        if self.call != "ended":
            actions.append(("leaves",))
        return actions

    def after(self, action: tuple) -> World:
        world = self._after(action)
        assert world.session is None or world.engine == "expecting", "blocks of an open session are nobody else's"
        return world

    def _after(self, action: tuple) -> World:
        match action:
            case ("admits", admitted, engine):
                return replace(self, engine=engine)._arrived(admitted)
            case ("refuses",):
                return replace(self, engine="finished")._arrived(AdmissionTimedOut("late"))
            case ("samples",):
                return replace(self, num_tokens=self.num_tokens - 1)._arrived(Tokens((Token(1),)))
            case ("finishes",):
                return replace(self, engine="finished")._arrived(Finished(FinishReason.LENGTH))
            case ("lands",):
                return self._session_over(SessionLanded(self.session or 0, 5, MOVED))
            case ("fails",):
                return self._session_over(SessionFailed(self.session or 0, "peer_lost: eof"))
            case ("renews", nonce):
                return replace(self, num_renewals=self.num_renewals - 1)._arrived(Renew(nonce))
            case ("stops",):
                return replace(self, num_stops=self.num_stops - 1)._arrived(Stop())
            case ("moves", command):
                return replace(self, num_moves=self.num_moves - 1)._arrived(command)
            case ("obeys",):
                return self._engine_obeys()
            case ("sent",):
                return self._sending_over(StateSent())
            case ("sending_fails",):
                return self._sending_over(CallBroken(ConnectionError()))
            case ("is_lost",):
                world = replace(self, num_losses=self.num_losses - 1, call="ended")._fed(RouterLost())
                return replace(world, call="lost") if isinstance(world.state, Orphaned) else world
            case ("adopts",):
                return replace(self, call="open")._fed(Adopted(64, Tokens((Token(1),))))
            case ("leaves",):
                return replace(self, call="ended")._fed(CallEnded())
            case ("is_taken",):
                return replace(self, inbox=self.inbox[1:])._fed(self.inbox[0])
        raise AssertionError(action)

    def _arrived(self, event: DecodeInput) -> World:
        return self if self.call == "ended" else replace(self, inbox=(*self.inbox, event))

    def _session_over(self, event: DecodeInput) -> World:
        released = self.call == "ended"  # which waits for the session's end
        return replace(self, session=None, engine="released" if released else self.engine)._arrived(event)

    def _engine_obeys(self) -> World:
        """As `Engine.halt` and `unhalt`: without effect on what does not run, or is not halted."""
        world = replace(self, halt="")
        if self.halt == "halt" and self.engine == "running":
            return replace(world, engine="halted")._arrived(Halted(Computed(64)))
        if self.halt == "go on" and self.engine == "halted":
            return replace(world, engine="running")
        return world

    def _sending_over(self, event: DecodeInput) -> World:
        released = self.call == "ended"
        return replace(self, sending=False, engine="released" if released else self.engine)._arrived(event)

    def _fed(self, event: DecodeInput) -> World:
        lifecycle = self.lifecycle(lambda: self.num_sessions + 1)
        lifecycle.state = self.state
        instructions = lifecycle.on(event)
        world = replace(self, state=lifecycle.state)
        for instruction in instructions:
            world = world._obeyed(instruction)
        return world

    def _obeyed(self, instruction: DecodeInstruction) -> World:
        match instruction:
            case OpenSession(_, nonce):
                assert self.session is None, "two sessions would land in the same blocks"
                assert self.engine == "expecting"
                return replace(self, session=nonce, num_sessions=nonce)
            case CancelSession():
                assert self.num_sessions, "nothing was opened"
            case RunDecode():
                assert self.session is None and self.engine == "expecting"
                return replace(self, engine="running")
            case FinishAnswer() if self.engine in ("running", "halted"):
                return replace(self, engine="finished")._arrived(Finished(FinishReason.STOP))
            case HaltAnswer():
                return replace(self, halt="halt")
            case ResumeAnswer():
                return replace(self, halt="go on")
            case SendRequest():
                assert self.engine in ("halted", "finished"), "its state would change while it is sent"
                assert not self.sending
                return replace(self, sending=True)
            case CancelSending():
                assert self.engine in ("halted", "finished"), "the blocks of an open transfer are nobody else's"
            case Fail():
                return replace(self, call="failed", inbox=())
            case Reply():
                assert self.call == "open", "a reply after the last one"
            case ReplyDecoded():
                assert self.call == "open"
                return replace(self, call="answered", inbox=())
            case Refuse():
                return replace(self, call="failed", inbox=())
            case Release():
                is_free = self.session is None and not self.sending
                return replace(self, inbox=(), halt="", engine="released" if is_free else self.engine)
        return self


def test_every_run_ends_with_everything_given_back() -> None:
    explored = explore(World())
    assert explored.num_states > 1_000
    ends = {(world.engine, world.session, world.sending, world.call) for world, _ in explored.ends}
    assert ends == {("released", None, False, "ended")}


def test_a_request_that_is_told_to_move_and_to_stay_in_any_order_ends_with_everything_given_back() -> None:
    running = World(state=Running(LOCAL), engine="running", num_renewals=0, num_losses=0, num_tokens=1, num_moves=3)
    explored = explore(running)
    assert explored.num_states > 1_000
    ends = {(world.engine, world.sending, world.call) for world, _ in explored.ends}
    assert ends == {("released", False, "ended")}


class Hasty(DecodeLifecycle):
    """Opens the next session while the one before may still land."""

    def _renew(self, failed_nonce: int) -> list[DecodeInstruction]:
        match self.state:
            case Receiving(admitted, nonce) if nonce == failed_nonce:
                return [CancelSession(), *self._open_session(admitted)]
        return super()._renew(failed_nonce)


def test_a_lifecycle_that_does_not_wait_for_a_cancelled_session_is_found_out() -> None:
    with pytest.raises(Violation, match="two sessions would land in the same blocks"):
        explore(World(lifecycle=Hasty))


class Forgetful(DecodeLifecycle):
    """Takes it for granted that a session which is cancelled fails."""

    def on(self, event: DecodeInput) -> list[DecodeInstruction]:
        if isinstance(event, SessionLanded) and not isinstance(self.state, Receiving):
            raise self._illegal(event)
        return super().on(event)


def test_a_lifecycle_that_rules_out_that_a_cancelled_session_lands_is_found_out() -> None:
    with pytest.raises(Violation, match="got SessionLanded"):
        explore(World(lifecycle=Forgetful))
