"""The JSON of what /cluster shows and does, as /openapi.json describes it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from headrace.step_costs import StepCosts
from headrace.wire.node_messages import PoolStatus
from router.api.response_schemas import Response, RoutingSummary


class IndexStatus(Response):
    """The router's copy of what a node has cached."""

    blocks: int
    checkpoints: int
    sequence: int | None
    """Number of the last change that the copy includes."""
    is_followed: bool
    """True while the node's changes arrive."""
    lag: int
    """Changes that the node had made by its last heartbeat, and the copy lacks."""


class CandidateRow(Response):
    """One node as the policy saw it."""

    name: str
    role: Literal["prefill", "decode", "both"]
    chosen_for: list[Literal["prefill", "decode", "fetch_from"]]
    may_prefill: bool
    may_decode: bool
    hit: dict[str, int]
    """Tokens of the prompt that it held, by cache group."""
    load: dict[str, float]
    """The node's work, by the policy's names for it."""
    costs: StepCosts


class DecisionRow(RoutingSummary):
    """One routing decision with what the policy saw."""

    request: dict[str, Any]
    """The request's facts."""
    num_candidates: int
    candidates: list[CandidateRow]
    """All of them, or those of note if there are many."""


class ExplainedRequest(Response):
    """The routing decisions about one request, in order."""

    id: str
    decisions: list[DecisionRow]


class Explanation(Response):
    """The answer to GET /cluster/requests/{request_id}/explain: one entry for each choice of the request."""

    requests: list[ExplainedRequest]


class NodeLoad(Response):
    """The work of a node's engine."""

    num_decoding: int
    """Sequences that generate, or whose state arrives for that."""
    context_tokens: int
    """Tokens of their contexts."""
    waiting_tokens: int
    """Tokens of prompts that are to be computed."""
    waiting_lengths: list[int]
    """At k: those of prompts that have 2^k up to 2^(k+1)-1 left."""


class NodeRow(Response):
    """One node, as of its last heartbeat."""

    name: str
    role: Literal["prefill", "decode", "both"]
    """The work for which the node is preferred now."""
    incarnation: str
    """Differs for each start of the node."""
    address: str
    transfer_address: str
    pid: int
    max_model_tokens: int
    state: Literal["live", "suspect", "stalled", "draining"]
    """`suspect`: a call to the node was lost since its last heartbeat; it gets no work until the next one.
    `stalled`: its engine stands still; it gets no work until it moves again.
    `draining`: it gets no work any more, and its running requests move away."""
    running: int
    waiting: int
    calls: dict[str, int]
    """Open calls of each router, by its name."""
    orphans: int
    """Running requests whose router was lost."""
    load: NodeLoad
    costs: StepCosts
    blocks: PoolStatus
    slots: PoolStatus
    counters: dict[str, float]
    index: IndexStatus | None


class LinkRow(Response):
    """One node's measurement of its link to a peer; figures are null until it has one."""

    from_: str = Field(alias="from")
    to: str
    lanes: list[str]
    """Transports and devices in use, such as `tcp/eth0`."""
    round_trip_s: float | None
    bytes_per_s: float | None
    warning: str | None
    """Why the link is slower than it should be."""
    error: str | None
    """Why there is no measurement."""


class StageRow(Response):
    """A stage of a request, in seconds from its arrival."""

    stage: Literal["queue", "prefill", "hand_over", "decode"]
    node: str | None
    start_s: float
    seconds: float
    """So far, for the last stage of a request that is open."""


class RequestRow(Response):
    """One request: open, or one of the last that ended."""

    id: str
    phase: str
    prompt_tokens: int
    generated_tokens: int
    prefill_node: str | None
    decode_node: str | None
    cached_tokens: int
    migrations: int
    moves: int
    age_s: float
    stages: list[StageRow]
    error: str | None


class HitRow(Response):
    """Prefix-cache hits of one cache group of a node."""

    node: str
    role: Literal["prefill", "decode", "both"]
    group: Literal["attention", "state"]
    hit_tokens: int
    looked_up_tokens: int


class Cluster(Response):
    """Nodes, links, requests and hits as the router knows them."""

    router: str
    """The name under which the nodes count this router's calls."""
    model: str
    ready: bool
    nodes: list[NodeRow]
    links: list[LinkRow]
    phases: dict[str, int]
    """Open requests by phase, and the requests that ended done or failed since the router's start."""
    waiting: int
    """Requests in the admission queue."""
    requests: list[RequestRow]
    hits: list[HitRow]


class DrainedNode(Response):
    """A node that serves nothing any more, and what has become of its running requests."""

    node: str
    moved: int
    """Requests that went on at another node, which computed nothing of them."""
    recomputed: int
    """Requests that began again elsewhere, with prompt and answer so far."""
    ended: int
    """Requests whose answers were complete before they could move."""
    seconds: float


class SwitchedRole(Response):
    """A node's new role, confirmed by the node."""

    node: str
    role: Literal["prefill", "decode", "both"]
