"""Two sessions on one receiver, in every order of events: nothing lands where it does not belong, all comes back.

`tests.support.transfer.session_world` says what is real (both machines, demultiplexer, verifier, envelopes and digests)
and what is asserted at each step. The mutants at the end show that each assertion can fail.
"""

from collections import Counter

import pytest

from tests.support.transfer.exploration import Explored, Violation, explore
from tests.support.transfer.session_world import World
from transfer.protocol.authentication import Verifier
from transfer.protocol.demultiplexer import Demultiplexer
from transfer.protocol.envelope import HEADER_BYTES, Envelope, Tag
from transfer.protocol.session import ReceiverSession, SessionPhase

WHOLE = ("COMPLETE", "COMPLETE")
NEVER_BEGUN = ("gone", "gone")


def explored(world: World) -> Explored:
    """Every run ends, and ends well."""
    found = explore(world)
    for end, path in found.ends:
        try:
            end.assert_over()
        except AssertionError as error:
            raise Violation(f"{error} after {path}") from error
    return found


def outcomes(found: Explored) -> Counter:
    return Counter(end.outcome() for end, _ in found.ends)


def test_without_a_mishap_both_complete_in_every_order_and_nobody_waits_for_a_deadline() -> None:
    found = explored(World(mishaps=0, is_retry=False))
    assert outcomes(found).keys() == {WHOLE + WHOLE}
    assert found.num_states > 4_000


def test_a_session_that_lands_has_no_retry() -> None:
    assert outcomes(explored(World(mishaps=0, is_retry=True))).keys() == {WHOLE + NEVER_BEGUN}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("is_retry", "mishaps", "at_least"),
    [
        pytest.param(False, 1, 100_000, id="neighbours"),
        # the first of two mishaps fails the first session, the second one meets the retry, or both at once
        pytest.param(True, 2, 150_000, id="retry in the same blocks"),
    ],
)
def test_whatever_goes_wrong_nothing_lands_where_it_does_not_belong(is_retry, mishaps, at_least) -> None:
    found = explored(World(mishaps=mishaps, is_retry=is_retry))
    print(f"{found.num_states} states, {found.num_steps} steps, {len(found.ends)} ends")
    assert found.num_states > at_least
    seen = outcomes(found)
    assert any(outcome[2:] == WHOLE and "FAILED" in outcome[:2] for outcome in seen)  # one fails, the other is whole
    assert any("FAILED" in outcome[:2] and "FAILED" in outcome[2:] for outcome in seen)


def test_a_retry_lands_although_the_first_sender_never_hears_of_it() -> None:
    seen = outcomes(explored(World(mishaps=1, is_retry=True)))
    assert ("COMPLETE", "FAILED", *WHOLE) in seen  # the late messages of the first all find nobody


# ---------------------------------------------------------------- what would be found


class ByIndexOnly(Demultiplexer[int]):
    """Two sessions that expect messages of the same index are all one to it."""

    def destination(self, tag: Tag) -> int | None:
        return next(iter(self._expecting.values()), None)


class OpenVerifier(Verifier):
    def verify_envelope(self, data: bytes) -> Envelope:
        return Envelope.decode(data[:HEADER_BYTES])

    def verify_payload(self, index: int) -> None:
        """Anybody's."""


class Trusting(ReceiverSession):
    """Believes that what comes is what was planned."""

    def _envelope_arrived(self, index, envelope):
        planned = self.plan.messages[index]
        return super()._envelope_arrived(index, Envelope.of(self.plan.nonce, 0, planned))

    def _payload_checked(self, event, index, digest_ok):
        return super()._payload_checked(event, index, True)


class LandsWhatFailed(ReceiverSession):
    """A failure is noted, and work goes on."""

    @property
    def ended(self):
        return self.phase is SessionPhase.COMPLETE


class NeverForgets(Demultiplexer[int]):
    def forget(self, nonce: int) -> None:
        """Somebody may still want it."""


class LandsAfterTheEnd(World):
    """Its driver does not ask again, before it scatters, whether the session still is."""

    def _is_right(self, attempt, session, part, envelope):
        had_ended = attempt.receiver.ended
        return super()._is_right(attempt, session, part, envelope) or had_ended


class LandsWhatItReceives(World):
    """Its driver scatters what was agreed to, and verifies it meanwhile."""

    def _is_right(self, attempt, session, part, envelope):
        super()._is_right(attempt, session, part, envelope)
        return True


class KeepsStagingOfTheFailed(World):
    def _begins_landing(self, attempt, session):
        free = self.free_buffers
        super()._begins_landing(attempt, session)
        self.free_buffers = free


def test_a_router_by_index_is_found_though_gate_and_plan_keep_the_bytes_apart() -> None:
    found = explored(
        World(mishaps=0, is_retry=False, new_demultiplexer=ByIndexOnly)
    )  # nothing lands where it should not
    assert outcomes(found).keys() != {WHOLE + WHOLE}  # ... yet sessions starve without a mishap


@pytest.mark.parametrize(
    ("broken", "found"),
    [
        (
            World(
                mishaps=0,
                is_retry=False,
                new_demultiplexer=ByIndexOnly,
                new_verifier=OpenVerifier,
                new_receiver=Trusting,
            ),
            "landed what is not its own",
        ),
        (World(mishaps=1, is_retry=False, new_receiver=Trusting), "landed what is not its own"),
        (World(mishaps=1, is_retry=False, new_receiver=LandsWhatFailed), "after it had failed"),
        (World(mishaps=1, is_retry=True, new_demultiplexer=NeverForgets), "still expected"),
        (LandsAfterTheEnd(mishaps=1, is_retry=True), "another's by now"),
        (LandsWhatItReceives(mishaps=1, is_retry=False), "landed what is not its own"),
        (KeepsStagingOfTheFailed(mishaps=1, is_retry=True), "staging is not back"),
    ],
    ids=[
        "demultiplexer by index, trusts", "ignores digests", "goes on", "never forgets", "lands late", "lands at once",
        "keeps staging",
    ],
)  # fmt: skip
def test_a_broken_part_is_found(broken: World, found: str) -> None:
    with pytest.raises(Violation, match=found):
        explored(broken)
