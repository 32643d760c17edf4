"""A routing decision as a value: the request as a policy sees it, and the plan that it chooses. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.config import positive, refuse
from router.routing.candidates import Candidate


@dataclass(frozen=True, slots=True)
class Objectives:
    """The times that a request's client or the cluster's operator asks for; None: no bound.

    first_token_s   from the request's arrival to its first token
    token_gap_s     between two tokens of an answer
    """

    first_token_s: float | None = None
    token_gap_s: float | None = None

    def __post_init__(self) -> None:
        refuse(positive(self, "first_token_s", "token_gap_s"))

    def over(self, default: Objectives) -> Objectives:
        """These, and what they leave open from `default`."""
        return Objectives(
            default.first_token_s if self.first_token_s is None else self.first_token_s,
            default.token_gap_s if self.token_gap_s is None else self.token_gap_s,
        )


NO_OBJECTIVES = Objectives()


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """The facts about a request that matter for its routing.

    number          counts this router's decisions: policies that take turns need no memory of their own
    num_tokens      of the prompt, with what other nodes generated before a migration
    answer_tokens   expected; at most `max_tokens`
    needs_decode    False: one token is enough, and the node that computes the prompt draws it
    waited_s        since the request's arrival
    is_scored       the whole prompt is computed for its logprobs, whatever is cached
    may_fetch       False: no node fetches what another one has cached
    session_nodes   names of the nodes that served the session's last request, first the one that generated; they are
                    preferred to nodes that are otherwise equal
    caches_are_short
                    True: the nodes that are not meant for prompts have too little cache; it does not hold the requests
                    under way, or of what comes back they miss more than all nodes together would
                    (`MissRatioCurve.is_short`)
    """

    number: int
    num_tokens: int
    answer_tokens: int
    needs_decode: bool = True
    waited_s: float = 0.0
    is_scored: bool = False
    may_fetch: bool = True
    objectives: Objectives = NO_OBJECTIVES
    session_nodes: tuple[str, ...] = ()
    caches_are_short: bool = False


@dataclass(frozen=True, slots=True)
class Prediction:
    """The outcome that a policy expects of a plan; None: it does not predict.

    first_token_s   seconds from now to the first token
    token_gap_s     seconds between two tokens of the answer
    computed_tokens tokens of the prompt that some node computes
    """

    first_token_s: float | None = None
    token_gap_s: float | None = None
    computed_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """The nodes that serve one request, by name, and what each does.

    prefill      computes the prompt
    decode       generates; the same node as `prefill`: nothing is handed over. None: the first token is enough
    fetch_from   sends the prefill node what that lacks of the prompt before it computes; None: nobody
    reason       why, in a few words of a fixed set: a label of a metric
    relief_s     seconds until the nodes have done so much that such a request is within its objectives; 0: it is now
    """

    prefill: str
    decode: str | None
    fetch_from: str | None = None
    prediction: Prediction = Prediction()
    reason: str = ""
    relief_s: float = 0.0


class Policy(Protocol):
    """Chooses a plan for each request. Keeps no state: the same question has the same answer."""

    def choose(self, request: RoutedRequest, candidates: Sequence[Candidate]) -> Plan | None:
        """A plan among `candidates`, live nodes sorted by name; None if none of them can serve the request."""
        ...
