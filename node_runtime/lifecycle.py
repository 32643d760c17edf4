"""The common part of `DecodeLifecycle` and `PrefillLifecycle`: one request on one node as a value.

Events in, instructions out; nothing here waits, sends, reads a clock or touches the engine. What the router, the
network or another node may do at any time is an event and never raises. An event that the engine or the driver cannot
send in the present state raises IllegalTransition: a bug on this node.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from headrace.engine.sequence import Admitted
from transfer.protocol.errors import IllegalTransition

State = TypeVar("State")
Kind = TypeVar("Kind")
Message = TypeVar("Message", covariant=True)

# ---------------------------------------------------------------- states


@dataclass(frozen=True)
class Admitting:
    """The request waits for blocks and a slot."""


@dataclass(frozen=True)
class Fetching:
    """Another node is asked for blocks and a state; the engine computes nothing yet."""

    admitted: Admitted


@dataclass(frozen=True)
class Readmitting:
    """The fetch failed: the request waits for blocks and a slot again, to be computed."""


@dataclass(frozen=True)
class Done:
    """The router has everything that it will get; its call is about to end."""


@dataclass(frozen=True)
class Released:
    """The call has ended and all that the request held is being given back."""


# ---------------------------------------------------------------- events


@dataclass(frozen=True)
class CallEnded:
    """The router's call is over: answered, failed, cancelled or past its deadline."""


@dataclass(frozen=True)
class CallBroken:
    """An error that ends the request, such as a transfer that failed or a command that cannot be read."""

    error: Exception


@dataclass(frozen=True)
class FetchLanded:
    """The blocks and the state of the first `num_tokens` tokens have landed, verified."""

    num_tokens: int


@dataclass(frozen=True)
class FetchGivenUp:
    """Nothing was fetched, and nothing lands any more."""


# ---------------------------------------------------------------- instructions


@dataclass(frozen=True)
class Reply(Generic[Message]):
    """Send the message to the router."""

    message: Message


@dataclass(frozen=True)
class Refuse:
    """Fail the call with NoCapacity; CallEnded follows."""

    message: str


@dataclass(frozen=True)
class Fail:
    """Fail the call with this error; CallEnded follows."""

    error: Exception


@dataclass(frozen=True)
class Release:
    """Give blocks and slot back to the engine, as soon as no transfer reads or writes them."""


@dataclass(frozen=True)
class StartFetch:
    """Fetch what `admitted` has no blocks for; it ends in FetchLanded or FetchGivenUp."""

    admitted: Admitted


@dataclass(frozen=True)
class CancelFetch:
    """Cancel the fetch; it reports nothing any more."""


@dataclass(frozen=True)
class ResumePrefill:
    """Have the engine compute the prompt from the `num_tokens` tokens that were fetched."""

    num_tokens: int


@dataclass(frozen=True)
class PrefillLocally:
    """Have the engine admit the request again and compute what could not be fetched."""


class Lifecycle(Generic[State]):
    """A request's state; subclasses add `on(event)`."""

    def __init__(self, state: State) -> None:
        self.state = state

    @property
    def is_over(self) -> bool:
        """True once the router has got its last reply."""
        return isinstance(self.state, Done | Released)

    def _expect(self, event: object, *kinds: type[Kind]) -> Kind:
        """Returns the state if it is of one of these kinds; raises IllegalTransition if it is not."""
        for kind in kinds:
            if isinstance(self.state, kind):
                return self.state
        raise self._illegal(event)

    def _illegal(self, event: object) -> IllegalTransition:
        return IllegalTransition(f"{type(self).__name__} in {self.state}: got {event}")
