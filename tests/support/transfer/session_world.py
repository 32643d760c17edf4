"""Two sessions on one receiver as a value to explore: the real machines and demultiplexer, a network that misbehaves.

What the drivers of `transfer.sender` and `transfer.receiver` do between an instruction and the next event is an action
here, and so is all that a network, a peer's death and a deadline can do to it. `World.after` asserts, at each step,
what must never be otherwise; what must hold at the end of a run is `World.assert_over`.
"""

from collections.abc import Callable, Iterator
from typing import Any, Self

from tests.support.transfer.session_attempt import (
    NONCES,
    Attempt,
    Part,
    copy_of,
    digest_after,
    new_attempt,
    parts_of,
    plan_of,
    shallow,
)
from transfer.protocol.authentication import Verifier
from transfer.protocol.demultiplexer import Demultiplexer
from transfer.protocol.envelope import Envelope, Tag
from transfer.protocol.errors import MalformedEnvelope, Unauthenticated
from transfer.protocol.events import (
    Broken,
    Cause,
    CompleteSession,
    DeadlinePassed,
    EnvelopeArrived,
    Land,
    MessageLanded,
    MessageSent,
    PayloadAnnounced,
    PayloadArrived,
    PayloadChecked,
    PeerLost,
    ReceivePayload,
    SendMessage,
    StateFinal,
    TokensComputed,
)
from transfer.protocol.plan import TransferPlan
from transfer.protocol.session import ReceiverSession, SenderSession, SessionPhase

MISHAPS = frozenset(
    {"loses", "repeats_at_once", "repeats_late", "overtakes", "damages", "prefill_node_dies", "decode_node_dies"}
)
STAGING_BUFFERS = 2
"""Both sessions share them: each may have to wait for the other, and one may receive what it cannot verify yet."""

Memory = tuple[tuple[bytes | None, ...], ...]
NOTHING: Memory = ((None, None), (None, None))


class World:
    """Session i hands over from prefill node i; the decode node receives both.

    mishaps      how many in one run: the network loses, repeats, reorders or damages a part, a process dies, a deadline
                 passes although something could still happen (when nothing else can, deadlines pass anyway)
    is_retry     session 1 takes over session 0's blocks and slot once that has failed, as `Renew` does it
    new_demultiplexer, new_verifier, new_receiver   replaced by tests that show what would be found
    """

    def __init__(
        self,
        *,
        mishaps: int,
        is_retry: bool,
        new_demultiplexer: Callable[[], Demultiplexer[int]] = Demultiplexer,
        new_verifier: Callable[[bytes], Verifier] = Verifier,
        new_receiver: Callable[[TransferPlan], ReceiverSession] = ReceiverSession,
    ) -> None:
        self.mishaps = mishaps
        self.is_retry = is_retry
        self.decode_node_lives = True
        self.memory = NOTHING
        """What lies in the blocks and the slot of each claim; a retry has the first session's claim."""
        self.free_buffers = STAGING_BUFFERS
        self.demultiplexer = new_demultiplexer()
        self._new_demultiplexer = new_demultiplexer
        self._new_receiver = new_receiver
        self.attempts: tuple[Attempt, Attempt] = (new_attempt(0, new_verifier), new_attempt(1, new_verifier))
        for session in (0,) if is_retry else (0, 1):
            self._begin(self._own(session), session)

    def key(self) -> tuple:
        return (
            self.mishaps, self.decode_node_lives, self.memory, self.free_buffers,
            tuple(self.demultiplexer._expecting), *(attempt.key() for attempt in self.attempts),
        )  # fmt: skip

    # ------------------------------------------------------------ what may happen

    def enabled(self) -> list[tuple]:
        """All that may happen next; of what nobody can tell the order of, only the first: see `_unnoticed`."""
        for session, attempt in enumerate(self.attempts):
            for action in self._unnoticed(session, attempt):
                return [(*action, session)]
        steps = [(*action, s) for s, attempt in enumerate(self.attempts) for action in self._steps(s, attempt)]
        deadlines = [(*action, s) for s, attempt in enumerate(self.attempts) for action in self._deadlines(attempt)]
        if self.mishaps == 0:
            return steps or deadlines
        mishaps = [(*action, s) for s, attempt in enumerate(self.attempts) for action in self._mishaps(s, attempt)]
        if self.decode_node_lives and any(not attempt.is_over for attempt in self.attempts):
            mishaps.append(("decode_node_dies", 0))
        early = [("too_early", *deadline) for deadline in deadlines] if steps else deadlines
        return steps + mishaps + early

    def _unnoticed(self, session: int, attempt: Attempt) -> Iterator[tuple]:
        """What ended sessions leave to be tidied up. It neither hinders nor changes anything else that may happen, so
        that one order stands for all."""
        if attempt.sender is not None and attempt.sender.ended:
            yield from (("let_go", index) for index in attempt.in_staging)
        if attempt.receiver is not None and attempt.receiver.ended and attempt.announced is not None:
            yield ("receives",)
        is_forgotten = attempt.receiver is None or attempt.receiver.ended
        if attempt.wire and is_forgotten and self._destination(session, attempt.wire[0]) is None:
            yield ("delivers", 0)

    def _steps(self, session: int, attempt: Attempt) -> Iterator[tuple]:
        """What happens when nothing goes wrong, and what follows when something has."""
        sender, receiver = attempt.sender, attempt.receiver
        if session == 1 and self._may_retry():
            yield ("begins",)
        if sender is not None and not sender.ended:
            if sender._tokens == 0:
                yield ("computes",)
            elif not sender._finished:
                yield ("finishes",)
            if not self.decode_node_lives:
                yield ("sender_notices",)
        yield from (("let_go", index) for index in attempt.in_staging)
        is_lost = not attempt.prefill_node_lives and not attempt.has_noticed
        if receiver is not None and not receiver.ended and is_lost:
            yield ("receiver_notices",)
        if attempt.announced is not None and self.free_buffers:
            yield ("receives",)
        if attempt.arrived and attempt.landing is None:
            yield ("begins_landing",)
        if attempt.landing is not None:
            yield ("ends_landing",)
        if attempt.wire and self._takes(session, attempt.wire[0]):
            yield ("delivers", 0)
        if attempt.wire and not attempt.prefill_node_lives:
            yield ("vanishes",)

    def _deadlines(self, attempt: Attempt) -> Iterator[tuple]:
        if attempt.sender is not None and not attempt.sender.ended:
            yield ("senders_deadline",)
        if attempt.receiver is not None and not attempt.receiver.ended:
            yield ("receivers_deadline",)

    def _mishaps(self, session: int, attempt: Attempt) -> Iterator[tuple]:
        if attempt.sender is not None and not attempt.is_over:
            yield ("prefill_node_dies",)
        wire = attempt.wire
        if wire:
            yield from (("loses",), ("repeats_at_once",))
        if wire and wire[0][1]:
            yield ("damages",)
        if len(wire) > 1:
            yield ("repeats_late",)
            yield from (("overtakes", at) for at in range(1, len(wire)) if self._takes(session, wire[at]))

    def _may_retry(self) -> bool:
        first, second = self.attempts
        is_due = first.receiver is not None and first.receiver.phase is SessionPhase.FAILED and first.is_settled
        return self.is_retry and is_due and second.receiver is None

    def _takes(self, session: int, part: Part) -> bool:
        """A driver looks at one part at a time; what finds nobody is dropped at any time."""
        target = self._destination(session, part)
        return target is None or self.attempts[target].announced is None

    def _destination(self, session: int, part: Part) -> int | None:
        return self.demultiplexer.destination(Tag(NONCES[session], part[0], part[1]))

    # ------------------------------------------------------------ what then is

    def after(self, action: tuple) -> Self:
        name, *arguments, session = action
        world = shallow(self)
        if name == "too_early":
            world.mishaps -= 1
            name, *arguments = arguments
        elif name in MISHAPS:
            world.mishaps -= 1
        getattr(world, f"_{name}")(world._own(session), session, *arguments)
        assert 0 <= world.free_buffers <= STAGING_BUFFERS, "staging was given back twice"
        return world

    def _own(self, session: int) -> Attempt:
        """A copy of the attempt in this world alone, to be changed."""
        attempt = self.attempts[session].copied()
        first, second = self.attempts
        self.attempts = (attempt, second) if session == 0 else (first, attempt)
        return attempt

    def _change_demultiplexer(self) -> Demultiplexer[int]:
        self.demultiplexer = copy_of(self.demultiplexer)
        return self.demultiplexer

    def _begin(self, attempt: Attempt, session: int) -> None:
        attempt.sender = SenderSession(plan_of(session))
        attempt.receiver = self._new_receiver(plan_of(session))
        self._change_demultiplexer().expect(NONCES[session], session)

    def _begins(self, attempt: Attempt, session: int) -> None:
        self.memory = NOTHING
        self._begin(attempt, session)

    def _computes(self, attempt: Attempt, session: int) -> None:
        self._tell_sender(attempt, session, TokensComputed(plan_of(session).num_tokens))

    def _finishes(self, attempt: Attempt, session: int) -> None:
        self._tell_sender(attempt, session, StateFinal())

    def _let_go(self, attempt: Attempt, session: int, index: int) -> None:
        """The transport needs a buffer no longer, whatever has become of its session."""
        attempt.in_staging -= {index}
        self._tell_sender(attempt, session, MessageSent(index))

    def _senders_deadline(self, attempt: Attempt, session: int) -> None:
        self._tell_sender(attempt, session, DeadlinePassed())

    def _sender_notices(self, attempt: Attempt, session: int) -> None:
        self._tell_sender(attempt, session, PeerLost("eof"))

    def _tell_sender(self, attempt: Attempt, session: int, event: Any) -> None:
        if attempt.sender is None:
            return
        attempt.sender = copy_of(attempt.sender)
        for instruction in attempt.sender.on(event):
            if isinstance(instruction, SendMessage):
                index = instruction.message.index
                attempt.in_staging |= {index}
                attempt.wire += parts_of(session)[index]

    def _delivers(self, attempt: Attempt, session: int, at: int) -> None:
        part = attempt.wire[at]
        attempt.wire = attempt.wire[:at] + attempt.wire[at + 1 :]
        target = self._destination(session, part)
        if target is not None:
            self._arrives(attempt if target == session else self._own(target), target, part)

    def _overtakes(self, attempt: Attempt, session: int, at: int) -> None:
        self._delivers(attempt, session, at)

    def _arrives(self, attempt: Attempt, session: int, part: Part) -> None:
        """As `IncomingTransfer` takes a part: through the verifier, and then to the session."""
        index, is_payload, data = part
        attempt.verifier = copy_of(attempt.verifier)
        try:
            if is_payload:
                attempt.verifier.verify_payload(index)
                instructions = self._tell_receiver(attempt, session, PayloadAnnounced(index, len(data)))
                if any(isinstance(instruction, ReceivePayload) for instruction in instructions):
                    attempt.announced = part
            else:
                attempt.envelope = attempt.verifier.verify_envelope(data)
                self._tell_receiver(attempt, session, EnvelopeArrived(index, attempt.envelope))
        except Unauthenticated:
            pass  # as if it had never come
        except MalformedEnvelope:
            self._tell_receiver(attempt, session, Broken(Cause.MALFORMED, "bytes"))

    def _receives(self, attempt: Attempt, session: int) -> None:
        part, attempt.announced = attempt.announced, None
        assert part is not None and attempt.receiver is not None and attempt.envelope is not None
        if attempt.receiver.ended:
            return
        self.free_buffers -= 1
        attempt.arrived += ((part, attempt.envelope),)
        self._tell_receiver(attempt, session, PayloadArrived(part[0]))

    def _begins_landing(self, attempt: Attempt, session: int) -> None:
        """As `IncomingTransfer` does once the oldest payload's page hashes are known."""
        (part, envelope), *later = attempt.arrived
        attempt.arrived = tuple(later)
        assert attempt.receiver is not None
        if self._is_right(attempt, session, part, envelope):
            attempt.landing = part
        else:
            self.free_buffers += 1

    def _is_right(self, attempt: Attempt, session: int, part: Part, envelope: Envelope) -> bool:
        assert attempt.receiver is not None
        if attempt.receiver.ended:
            return False
        attempt.digest = digest_after(attempt.digest, envelope.fields(), part[2])
        event = PayloadChecked(part[0], digest_ok=attempt.digest == envelope.digest)
        return any(isinstance(instruction, Land) for instruction in self._tell_receiver(attempt, session, event))

    def _ends_landing(self, attempt: Attempt, session: int) -> None:
        part = attempt.landing
        assert part is not None
        self._write(session, part)
        attempt.landing = None
        self.free_buffers += 1
        for instruction in self._tell_receiver(attempt, session, MessageLanded(part[0])):
            if isinstance(instruction, CompleteSession):
                self._assert_whole(session)

    def _receivers_deadline(self, attempt: Attempt, session: int) -> None:
        self._tell_receiver(attempt, session, DeadlinePassed())

    def _receiver_notices(self, attempt: Attempt, session: int) -> None:
        attempt.has_noticed = True
        self._tell_receiver(attempt, session, PeerLost("eof"))

    def _tell_receiver(self, attempt: Attempt, session: int, event: Any) -> list:
        assert attempt.receiver is not None
        had_failed = attempt.receiver.phase is SessionPhase.FAILED
        attempt.receiver = copy_of(attempt.receiver)
        instructions = attempt.receiver.on(event)
        assert not (had_failed and instructions), f"{instructions} after it had failed"
        if attempt.receiver.ended:
            self._change_demultiplexer().forget(NONCES[session])
        return instructions

    # ------------------------------------------------------------ what the world does to them

    def _loses(self, attempt: Attempt, session: int) -> None:
        attempt.wire = attempt.wire[1:]

    def _repeats_at_once(self, attempt: Attempt, session: int) -> None:
        attempt.wire = attempt.wire[:1] + attempt.wire

    def _repeats_late(self, attempt: Attempt, session: int) -> None:
        attempt.wire = attempt.wire + attempt.wire[:1]

    def _damages(self, attempt: Attempt, session: int) -> None:
        index, is_payload, data = attempt.wire[0]
        attempt.wire = ((index, is_payload, bytes([data[0] ^ 1]) + data[1:]), *attempt.wire[1:])

    def _vanishes(self, attempt: Attempt, session: int) -> None:
        """What a dead sender had under way may or may not have arrived before."""
        attempt.wire = ()

    def _prefill_node_dies(self, attempt: Attempt, session: int) -> None:
        attempt.prefill_node_lives = False
        attempt.sender = None
        attempt.in_staging = frozenset()

    def _decode_node_dies(self, attempt: Attempt, session: int) -> None:
        """And is started again, with nothing: what still arrives finds nobody."""
        self.decode_node_lives = False
        self.free_buffers = STAGING_BUFFERS
        self.memory = NOTHING
        self.demultiplexer = self._new_demultiplexer()
        for number in range(2):
            each = self._own(number)
            each.receiver = each.announced = each.landing = None
            each.arrived = ()

    # ------------------------------------------------------------ what must be

    def _write(self, session: int, part: Part) -> None:
        """The one place where anything lands: only its own session's bytes, only while the claim is its own."""
        index, _, data = part
        assert data == parts_of(session)[index][1][2], f"session {session} landed what is not its own"
        other = self.attempts[1 - session]
        is_given_away = self.is_retry and session == 0 and other.receiver is not None
        assert not is_given_away, "a session wrote into blocks that are another's by now"
        claim = list(self.memory)
        cells = list(claim[self._claim_of(session)])
        cells[index] = data
        claim[self._claim_of(session)] = tuple(cells)
        self.memory = (claim[0], claim[1])

    def _claim_of(self, session: int) -> int:
        return 0 if self.is_retry else session

    def _assert_whole(self, session: int) -> None:
        whole = tuple(payload for _, (_, _, payload) in parts_of(session))
        assert self.memory[self._claim_of(session)] == whole, f"session {session} completed without all of its bytes"

    def assert_over(self) -> None:
        """A run's end: no session is open, everything reserved is back, and what is complete is whole, still."""
        assert self.free_buffers == STAGING_BUFFERS, "the receiver's staging is not back"
        assert len(self.demultiplexer) == 0, "a nonce is still expected"
        for session, attempt in enumerate(self.attempts):
            assert attempt.sender is None or attempt.sender.ended, f"sender {session} is stuck"
            assert attempt.receiver is None or attempt.receiver.ended, f"receiver {session} is stuck"
            assert attempt.is_settled and not attempt.in_staging and attempt.announced is None
            if attempt.receiver is not None and attempt.receiver.phase is SessionPhase.COMPLETE:
                self._assert_whole(session)

    def outcome(self) -> tuple[str, ...]:
        """Of each end, sender and receiver by session: COMPLETE, FAILED, or gone."""
        ends = [end for attempt in self.attempts for end in (attempt.sender, attempt.receiver)]
        return tuple("gone" if end is None else end.phase.name for end in ends)
