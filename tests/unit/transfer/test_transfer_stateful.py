"""Hypothesis drives the real senders and receivers: sessions on two claims, over a network that it holds in its hand.

Each part waits until a rule lets it through, loses, repeats or damages it, in any order: so messages come late, after
their session has ended and its claim has gone to another. Peers die and sessions are cancelled at any moment.
"""

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
from hypothesis import HealthCheck, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.support.loop_clock import soon, turns
from tests.support.patience import PATIENCE_S
from tests.support.transfer.inprocess import InProcessArrival, InProcessNetwork, InProcessTransport
from tests.support.transfer.transfer_plans import contents, secret_of, small_plan
from transfer.buffers import Buffer, StagingBuffer
from transfer.protocol.envelope import Tag
from transfer.protocol.errors import TransferFailed
from transfer.protocol.plan import PlannedMessage, TransferPlan
from transfer.receiver import IncomingTransfer, TransferReceiver
from transfer.sender import OutgoingTransfer, TransferSender
from transfer.staging import Staging, StagingConfig

NUM_CLAIMS = 2
NUM_BUFFERS = 2
STEPS = 60


class Repeated:
    """Bytes that the network has kept, and delivers once more."""

    def __init__(self, tag: Tag, data: Buffer) -> None:
        self.tag = tag
        self.num_bytes = len(data)
        self._data = data

    def receive(self, buffer: Buffer, deadline_s: float, connection_id: int | None) -> asyncio.Future[None]:
        received = asyncio.get_running_loop().create_future()
        buffer[: self.num_bytes] = self._data
        received.set_result(None)
        return received

    def drop(self) -> None:
        """Nobody waits for it."""


class HoldingTransport(InProcessTransport):
    """A receiver's transport at whose door all parts wait for `let_in`: before they are routed."""

    def __init__(self, network: InProcessNetwork, address: str) -> None:
        super().__init__(network, address)
        self.held: list[InProcessArrival | Repeated] = []

    def announce(self, arrival: InProcessArrival | Repeated) -> None:
        self.held.append(arrival)

    def let_in(self, at: int) -> None:
        super().announce(self.held.pop(at))


@dataclass
class Session:
    plan: TransferPlan
    claim: int
    incoming: IncomingTransfer
    outgoing: OutgoingTransfer
    num_tokens: int = 0
    is_finished: bool = False
    landed: list[int] = field(default_factory=list)


class Transfers(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.run(self._start())

    def run(self, work):
        return self.runner.run(work)

    async def _start(self) -> None:
        self.network = InProcessNetwork()
        self.decode = HoldingTransport(self.network, "d0")
        self.staging = Staging(StagingConfig(NUM_BUFFERS, buffer_bytes=400))
        self.receiver = TransferReceiver(self.decode, self.staging)
        self.sender_staging = Staging(StagingConfig(NUM_BUFFERS, buffer_bytes=400))
        self.sessions: list[Session] = []
        self.holders: list[Session | None] = [None] * NUM_CLAIMS
        self.memory: list[dict[int, Buffer]] = [{} for _ in range(NUM_CLAIMS)]
        self.landings: list[asyncio.Event] = []
        """Landings under way, each until a rule lets it go on."""
        self.violations: list[str] = []
        self._start_prefill()

    def _start_prefill(self) -> None:
        self.prefill = InProcessTransport(self.network, "p0")
        self.sender = TransferSender(self.prefill, self.sender_staging)

    # ------------------------------------------------------------ sessions

    @precondition(lambda self: any(self._is_free(claim) for claim in range(NUM_CLAIMS)))
    @rule(data=st.data(), is_computed=st.booleans())
    def reserve(self, data, is_computed) -> None:
        """For a claim that is new, or whose last session is over and lands nothing any more."""
        claim = data.draw(st.sampled_from([claim for claim in range(NUM_CLAIMS) if self._is_free(claim)]))
        self.run(self._reserve(claim))
        if is_computed:
            self.run(self._compute(self.sessions[-1], self.sessions[-1].plan.num_tokens))

    def _is_free(self, claim: int) -> bool:
        holder = self.holders[claim]
        return holder is None or holder.incoming._settled.is_set()

    async def _reserve(self, claim: int) -> None:
        plan = small_plan(nonce=len(self.sessions) + 1)
        self.memory[claim] = {}

        async def pack(message: PlannedMessage, buffer: StagingBuffer) -> None:
            await asyncio.sleep(0)
            buffer.payload[:] = contents(message, plan.nonce)

        async def land(message: PlannedMessage, buffer: StagingBuffer) -> None:
            gate = asyncio.Event()
            self.landings.append(gate)
            await gate.wait()
            if self.holders[claim] is not session:
                self.violations.append(f"{plan.nonce} landed {message.index} in a claim that is another's")
            if not np.array_equal(buffer.payload, contents(message, plan.nonce)):
                self.violations.append(f"{plan.nonce} landed other bytes than its own as {message.index}")
            session.landed.append(message.index)
            self.memory[claim][message.index] = buffer.payload.copy()

        secret = secret_of(plan.nonce)
        incoming = self.receiver.expect(plan, secret=secret, land=land, deadline_s=soon(60))
        outgoing = self.sender.open(plan, "d0", secret=secret, pack=pack, deadline_s=soon(60))
        session = Session(plan, claim, incoming, outgoing)
        self.sessions.append(session)
        self.holders[claim] = session
        await turns()

    @precondition(lambda self: any(not session.is_finished for session in self.sessions))
    @rule(data=st.data())
    def compute(self, data) -> None:
        session = next(session for session in self.sessions if not session.is_finished)
        tokens = data.draw(st.integers(session.num_tokens + 1, session.plan.num_tokens + 1))
        self.run(self._compute(session, tokens))

    async def _compute(self, session: Session, tokens: int) -> None:
        """One token more than there are: the state as well."""
        session.num_tokens = min(tokens, session.plan.num_tokens)
        session.outgoing.tokens_computed(session.num_tokens)
        if tokens >= session.plan.num_tokens:
            session.is_finished = True
            session.outgoing.finish(42)
        await turns()

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), what=st.sampled_from(["receiver", "sender", "prefill node"]), at_once=st.booleans())
    def interrupt(self, data, what, at_once) -> None:
        """`at_once`: without the turns in which others would notice."""
        num_turns = 0 if at_once else 50
        if what == "prefill node":
            self.run(self._restart_prefill(num_turns))
            return
        session = data.draw(st.sampled_from(self.sessions[-NUM_CLAIMS:]))
        self.run(self._cancel(session.incoming if what == "receiver" else session.outgoing, num_turns))

    async def _cancel(self, end: IncomingTransfer | OutgoingTransfer, num_turns: int) -> None:
        end.cancel()
        await turns(num_turns)

    async def _restart_prefill(self, num_turns: int) -> None:
        """Its parts under way fail where they are received."""
        await self.prefill.close()
        self._start_prefill()
        await turns(num_turns)

    # ------------------------------------------------------------ the network, and the engine that lands

    @precondition(lambda self: self.decode.held)
    @rule(number=st.integers(1, 6))
    def deliver(self, number) -> None:
        self.run(self._deliver(number))

    async def _deliver(self, number: int) -> None:
        for _ in range(min(number, len(self.decode.held))):
            self.decode.let_in(0)
            await turns(10)

    @precondition(lambda self: self.landings)
    @rule()
    def land(self) -> None:
        self.run(self._land())

    async def _land(self) -> None:
        self.landings.pop(0).set()
        await turns()

    @precondition(lambda self: self.decode.held or self.landings)
    @rule()
    def deliver_and_land_all(self) -> None:
        self.run(self._deliver_and_land_all())

    async def _deliver_and_land_all(self) -> None:
        while self.decode.held or self.landings:
            await self._deliver(1)
            if self.landings:
                await self._land()

    @precondition(lambda self: self.decode.held)
    @rule(data=st.data(), what=st.sampled_from(["overtake", "lose", "repeat", "repeat late", "damage"]))
    def mishap(self, data, what) -> None:
        held = self.decode.held
        at = data.draw(st.integers(0, len(held) - 1))
        part = held[at]
        if what == "overtake":
            held.insert(0, held.pop(at))
        elif what == "lose":
            self.run(self._lose(at))
        elif isinstance(part, InProcessArrival) and part._part is not None:
            if what == "damage":
                part._part = part._part.copy()
                part._part[data.draw(st.integers(0, part.num_bytes - 1))] ^= 1
            else:
                held.insert(at if what == "repeat" else len(held), Repeated(part.tag, part._part.copy()))

    async def _lose(self, at: int) -> None:
        self.decode.held.pop(at).drop()
        await turns()

    # ------------------------------------------------------------ what must be

    @invariant()
    def nothing_landed_where_it_does_not_belong(self) -> None:
        assert self.violations == []

    @invariant()
    def what_is_complete_is_whole(self) -> None:
        for holder in filter(None, self.holders):
            assert holder.landed == list(range(len(holder.landed)))
            if holder.incoming._complete:
                for message in holder.plan.messages:
                    here = self.memory[holder.claim][message.index]
                    assert np.array_equal(here, contents(message, holder.plan.nonce))

    @invariant()
    def staging_adds_up(self) -> None:
        self.staging.check()
        self.sender_staging.check()

    def teardown(self) -> None:
        """In the end the world is quiet: sessions that hang are cancelled, as their deadline would, and all is back."""
        self.run(self._end())
        self.runner.close()

    async def _end(self) -> None:
        event(f"{min(3, self.decode.stats.received.sessions)} or more sessions landed")
        event(f"failed: {', '.join(sorted(self.decode.stats.failures))}")
        for session in self.sessions:
            for end in (session.incoming, session.outgoing):
                end.cancel()
        await self._deliver_and_land_all()
        async with asyncio.timeout(PATIENCE_S):
            for session in self.sessions:
                for ended in (session.incoming.landed(), session.outgoing.done()):
                    with suppress(TransferFailed):
                        await ended
        await turns()
        for staging in (self.staging, self.sender_staging):
            staging.check()
            assert staging.num_free == NUM_BUFFERS
        assert len(self.decode._demultiplexer) == 0
        assert not [task for s in self.sessions for end in (s.incoming, s.outgoing) for task in end._tasks]


Transfers.TestCase.settings = settings(
    max_examples=100,
    stateful_step_count=STEPS,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestTransfers = Transfers.TestCase
