"""Every order of what engine, fetch, transfer and call may do to one request on a prefill node."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from headrace.cache.hits import PrefixHit
from headrace.cache.layout import AttentionGroup, CacheLayout, StateGroup
from headrace.engine.sequence import AdmissionTimedOut, Admitted, Computed, Finished, Sampled, Started
from headrace.request import FinishReason, Token
from headrace.step_costs import StepCosts
from node_runtime.config import FetchConfig
from node_runtime.fetch_policy import FetchCosts, FetchPolicy
from node_runtime.lifecycle import Admitting, CallBroken, CallEnded, Fail, Refuse, Release, Reply
from prefill_node.lifecycle import (
    CancelFetch,
    CancelTransfer,
    FetchGivenUp,
    FetchLanded,
    OpenTransfer,
    PrefillInput,
    PrefillInstruction,
    PrefillLifecycle,
    PrefillLocally,
    PrefillState,
    ReplyPrefilled,
    ResumePrefill,
    SendComputed,
    SendState,
    StartFetch,
    TransferSent,
)
from tests.support.transfer.exploration import Violation, explore
from transfer.protocol.errors import TransferFailed

LAYOUT = CacheLayout("f", "float32", "float32", 16, (AttentionGroup(2, 2, 8),), (StateGroup(3, (10, 3), (2, 4, 4)),))
POLICY = FetchPolicy(FetchConfig(), FetchCosts(), StepCosts(), 1024, LAYOUT, num_tokens=400, fetch_source_tokens=320)
TO_FETCH = Admitted(PrefixHit(64, 48, 48), reused_tokens=64, state_arrives=True)
TO_COMPUTE = Admitted(PrefixHit(64, 48, 48), reused_tokens=48, state_arrives=False)
BROKEN = CallBroken(TransferFailed("peer_lost", "eof"))


@dataclass(frozen=True)
class World:
    """One request, and what surrounds it. Events wait in `inbox` while other things happen.

    engine    waiting, expecting a state, waiting again, ready, running, sampled, finished or released
    fetch     none, open, cancelled or over
    transfer  none, open since the first chunk (with as many tokens as were sent), sending the state, or over
    call      open, answered, failed or ended
    """

    lifecycle: type[PrefillLifecycle] = PrefillLifecycle
    is_sent: bool = True
    first_token: int | None = None
    state: PrefillState = field(default_factory=Admitting)
    inbox: tuple[PrefillInput, ...] = ()
    engine: str = "waiting"
    num_computed: int = 48
    num_sent: int = 0
    fetch: str = "none"
    transfer: str = "none"
    call: str = "open"

    def key(self) -> World:
        return self

    def enabled(self) -> list[tuple]:
        actions: list[tuple] = []
        if self.engine == "waiting":
            actions += [("admits", TO_FETCH, "expecting"), ("admits", TO_COMPUTE, "ready"), ("refuses",)]
        if self.engine == "waiting again":
            actions.append(("admits", TO_COMPUTE, "ready"))
        if self.engine == "ready":
            actions.append(("starts",))
        if self.engine == "running":
            actions += [("computes",)] if self.num_computed < 400 else [("samples", None), ("samples", "stop")]
        if self.fetch in ("open", "cancelled"):
            actions += [("fetches",), ("gives_up",)] if self.fetch == "open" else [("gives_up",)]
        if self.is_sent and self.transfer in ("open", "sending"):
            actions += [("breaks",)] + [("sends",)] * (self.transfer == "sending")
        if self.call == "open" and self.inbox:
            actions.append(("is_taken",))
        if self.call != "ended":
            actions.append(("leaves",))
        return actions

    def after(self, action: tuple) -> World:
        world = self._after(action)
        assert world.fetch not in ("open", "cancelled") or world.engine == "expecting", "a fetch lands in used blocks"
        return world

    def _after(self, action: tuple) -> World:
        match action:
            case ("admits", admitted, engine):
                return replace(self, engine=engine)._arrived(admitted)
            case ("refuses",):
                return replace(self, engine="finished")._arrived(AdmissionTimedOut("late"))
            case ("starts",):
                return replace(self, engine="running")._arrived(Started())
            case ("computes",):
                num_computed = 320 if self.num_computed < 320 else 400
                return replace(self, num_computed=num_computed)._arrived(Computed(num_computed))
            case ("samples", None):
                return replace(self, engine="sampled")._arrived(Sampled(Token(5), None))
            case ("samples", "stop"):
                last = Sampled(Token(5), FinishReason.STOP)
                return replace(self, engine="finished")._arrived(last)._arrived(Finished(FinishReason.STOP))
            case ("fetches",):
                return replace(self, fetch="over")._arrived(FetchLanded(320))
            case ("gives_up",):
                return replace(self, fetch="over")._released()._arrived(FetchGivenUp())
            case ("sends",):
                return replace(self, transfer="over")._released()._arrived(TransferSent())
            case ("breaks",):
                return replace(self, transfer="over")._released()._arrived(BROKEN)
            case ("leaves",):
                return replace(self, call="ended", inbox=())._fed(CallEnded())
            case ("is_taken",):
                return replace(self, inbox=self.inbox[1:])._fed(self.inbox[0])
        raise AssertionError(action)

    def _arrived(self, event: PrefillInput) -> World:
        return self if self.call == "ended" else replace(self, inbox=(*self.inbox, event))

    def _released(self) -> World:
        """A release waits for fetch and transfer."""
        is_used = self.fetch in ("open", "cancelled") or self.transfer in ("open", "sending")
        return self if self.call != "ended" or is_used else replace(self, engine="released")

    def _fed(self, event: PrefillInput) -> World:
        lifecycle = self.lifecycle(POLICY, is_sent=self.is_sent, first_token=self.first_token)
        lifecycle.state = self.state
        instructions = lifecycle.on(event)
        world = replace(self, state=lifecycle.state)
        for instruction in instructions:
            world = world._obeyed(instruction)
        return world

    def _obeyed(self, instruction: PrefillInstruction) -> World:
        match instruction:
            case StartFetch():
                assert (self.engine, self.fetch) == ("expecting", "none")
                return replace(self, fetch="open")
            case ResumePrefill(num_tokens):
                assert (self.engine, self.fetch) == ("expecting", "over")
                return replace(self, engine="ready", num_computed=num_tokens)
            case PrefillLocally():
                assert (self.engine, self.fetch) == ("expecting", "over")
                return replace(self, engine="waiting again")
            case OpenTransfer():
                assert self.is_sent and self.transfer == "none" and self.engine not in ("waiting", "ready")
                return replace(self, transfer="open")
            case SendComputed(computed):
                assert self.transfer != "none" and self.num_sent <= computed.num_tokens <= self.num_computed
                return replace(self, num_sent=computed.num_tokens)
            case SendState():
                assert self.is_sent and self.num_sent == 400, "the state goes last"
                return replace(self, transfer="sending" if self.transfer == "open" else self.transfer)
            case Reply() | ReplyPrefilled():
                assert self.call == "open", "a reply after the last one"
                return replace(self, call="answered") if isinstance(instruction, ReplyPrefilled) else self
            case Refuse() | Fail():
                return replace(self, call="failed", inbox=())
            case CancelFetch():
                return replace(self, fetch="cancelled" if self.fetch == "open" else self.fetch)
            case CancelTransfer():
                return replace(self, transfer="none" if self.transfer == "none" else "over")
            case Release():
                assert self.fetch != "open" and (self.transfer in ("none", "over")), "it would wait for long"
                return self._released()
        return self


@pytest.mark.parametrize("first_token", [None, 3])
@pytest.mark.parametrize("is_sent", [True, False])
def test_every_run_ends_with_everything_given_back(is_sent: bool, first_token: int | None) -> None:
    explored = explore(World(is_sent=is_sent, first_token=first_token))
    assert explored.num_states > (200 if is_sent else 50)
    assert {(world.engine, world.call) for world, _ in explored.ends} == {("released", "ended")}
    assert not {world.fetch for world, _ in explored.ends} & {"open", "cancelled"}


class Impatient(PrefillLifecycle):
    """Leaves a fetch alone when the call ends."""

    def _call_ended(self) -> list[PrefillInstruction]:
        return [instruction for instruction in super()._call_ended() if instruction != CancelFetch()]


def test_a_lifecycle_that_leaves_a_fetch_behind_is_found_out() -> None:
    with pytest.raises(Violation, match="it would wait for long"):
        explore(World(lifecycle=Impatient))
