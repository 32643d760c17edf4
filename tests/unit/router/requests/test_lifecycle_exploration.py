"""One request in every order of what its nodes, its client and the network may do.

`tests.support.router.request_world` models them and asserts at each step that the client sees every token once and in
order, and that the request ends once. The mutants at the end show that each assertion can fail.
"""

from collections import Counter

import pytest

from router.requests import events as ev
from router.requests.lifecycle import RequestLifecycle
from router.requests.states import AwaitingFirstToken, Decoding
from tests.support.router.request_world import RequestWorld
from tests.support.transfer.exploration import Explored, Violation, explore


def explored(world: RequestWorld) -> Explored:
    """Every run ends, and ends well."""
    found = explore(world)
    for end, path in found.ends:
        try:
            end.assert_over()
        except AssertionError as error:
            raise Violation(f"{error} after {path}") from error
    return found


def outcomes(found: Explored) -> Counter:
    return Counter(end.ended for end, _ in found.ends)


@pytest.mark.parametrize("token_gap_s", [None, 0.01])
@pytest.mark.parametrize("may_stop", [False, True])
def test_without_a_mishap_every_order_completes(may_stop, token_gap_s) -> None:
    found = explored(RequestWorld(mishaps=0, may_stop=may_stop, token_gap_s=token_gap_s))
    assert outcomes(found).keys() == {"completed"}


@pytest.mark.parametrize("token_gap_s", [None, 0.01])
def test_one_mishap_is_repaired_in_every_order(token_gap_s) -> None:
    found = explored(RequestWorld(mishaps=1, may_stop=True, token_gap_s=token_gap_s))
    print(f"{found.num_states} states, {found.num_steps} steps, {len(found.ends)} ends")
    assert outcomes(found).keys() == {"completed"}


@pytest.mark.parametrize("token_gap_s", [None, 0.01])
def test_several_mishaps_never_lose_or_repeat_a_token(token_gap_s) -> None:
    found = explored(RequestWorld(mishaps=2, token_gap_s=token_gap_s))
    print(f"{found.num_states} states, {found.num_steps} steps, {len(found.ends)} ends")
    assert outcomes(found).keys() == {"completed", "failed"}


def test_a_single_token_without_a_decode_node() -> None:
    assert outcomes(explored(RequestWorld(mishaps=1, max_tokens=1))).keys() == {"completed"}
    assert outcomes(explored(RequestWorld(mishaps=3, max_tokens=1))).keys() == {"completed", "failed"}


class ShowsWhatOvertakesTheFirstToken(RequestLifecycle):
    def _on_tokens(self, event):
        if isinstance(self.state, AwaitingFirstToken):
            return self.state, [self.shown.show(event.tokens)]
        return super()._on_tokens(event)


class RenewsWhatHasLanded(RequestLifecycle):
    def _on_prefill_failed(self, nonce, cause):
        if isinstance(self.state, AwaitingFirstToken) and nonce == self.state.nonce:
            return self.state, [ev.SendRenew(nonce)]
        return super()._on_prefill_failed(nonce, cause)


class StartsOverAfterTheLastToken(RequestLifecycle):
    def _on_decode_lost(self, cause):
        return self._start_over() if isinstance(self.state, Decoding) else super()._on_decode_lost(cause)


class EndsWithEveryReport(RequestLifecycle):
    def _on_decode_done(self, event):
        _, instructions = super()._on_decode_done(event)
        return self.state, instructions


class LosesTheTokenItHeldBack(RequestLifecycle):
    def _on_prefill_failed(self, nonce, cause):
        self.shown.held_first = ()
        return super()._on_prefill_failed(nonce, cause)


class ShowsTheHeldTokenAloneAndWithTheNext(RequestLifecycle):
    def _on_landed(self, event):
        state, instructions = super()._on_landed(event)
        held = self.shown.held_first
        shown = [self.shown.show(())] if held else []
        self.shown.held_first = held
        return state, [*instructions, *shown]


@pytest.mark.parametrize(
    ("mutant", "violation"),
    [
        (LosesTheTokenItHeldBack, "the client sees|IndexError"),
        (ShowsTheHeldTokenAloneAndWithTheNext, "the client sees"),
    ],
)
def test_a_mutant_that_holds_the_first_token_back_is_caught(mutant, violation) -> None:
    with pytest.raises(Violation, match=violation):
        explored(RequestWorld(mishaps=1, token_gap_s=0.01, life_type=mutant))


@pytest.mark.parametrize(
    ("mutant", "violation"),
    [
        (ShowsWhatOvertakesTheFirstToken, "the client sees"),
        (RenewsWhatHasLanded, "the request hangs"),
        (StartsOverAfterTheLastToken, "IndexError"),  # a node is asked for a token after the answer's last one
        (EndsWithEveryReport, "the request hangs"),
    ],
)
def test_a_mutant_is_caught(mutant, violation) -> None:
    with pytest.raises(Violation, match=violation):
        explored(RequestWorld(mishaps=1, life_type=mutant))
