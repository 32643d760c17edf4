"""The JSON of responses, as /openapi.json describes it.

Nothing is validated by these models at run time: `responses` and `router.status` write the JSON, and
tests/unit/router/api/test_openapi.py validates real responses against the schema.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from headrace.step_costs import StepCosts
from headrace.wire.messages import PoolStatus

FinishReason = Literal["stop", "length"]


def _absent() -> Any:
    """A field that an answer may lack, but that is never null."""
    return Field(default=None, json_schema_extra=_without_default)


def _without_default(schema: dict[str, Any]) -> None:
    del schema["default"]


class _Response(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


# ---------------------------------------------------------------- errors


class ErrorDetail(_Response):
    """One error."""

    message: str
    """The value, the limit and the remedy."""
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"]
    param: str | None
    """The field of the request that is wrong."""
    code: str | None
    """The cause, for programs: `context_length_exceeded`, `queue_full`, `no_node_available`, ..."""


class ErrorBody(_Response):
    """The body of every answer that is no success, and the last event of a stream that breaks."""

    error: ErrorDetail


# ---------------------------------------------------------------- usage


class PromptTokensDetails(_Response):
    """Parts of the prompt's tokens."""

    cached_tokens: int
    """Prompt tokens that no node had to compute."""


class PrefillNodeReport(_Response):
    """The prefill node's part."""

    node: str
    attention_hit_tokens: int
    """Prompt tokens whose attention blocks were cached on the node."""
    state_hit_tokens: int
    """Prompt tokens before the deepest cached checkpoint."""
    fetched_tokens: int
    """Prompt tokens whose cache came from a decode node."""
    computed_tokens: int


class DecodeNodeReport(_Response):
    """The decode node's part."""

    node: str
    attention_hit_tokens: int
    """Prompt tokens whose attention blocks were cached on the node, and were not transferred."""
    state: Literal["received", "resumed", "computed"]
    """Origin of the state: the prefill node, a checkpoint (the decode node's own, or a fetched one), or its own
    prefill."""
    fetched_tokens: int
    """Prompt tokens beyond the node's own checkpoint that another node sent, for a prompt that it computed itself."""


class TransferSizes(_Response):
    """The transfer from the prefill node to the decode node."""

    attention_tokens: int
    attention_bytes: int
    state_bytes: int
    seconds: float


class PlanNodes(_Response):
    """The nodes of a plan."""

    prefill: str
    decode: str | None
    """The node that generates; null: the first token was enough."""
    fetch_from: str | None
    """The node that the prefill node may fetch the cached part of the prompt from."""


class RoutingFigures(_Response):
    """Predicted or measured figures of a decision; null: unknown."""

    first_token_s: float | None
    """From the decision to the first token."""
    token_gap_s: float | None
    computed_tokens: int | None
    """Tokens of the prompt that were not cached."""


class RoutingSummary(_Response):
    """One routing decision."""

    plan: PlanNodes
    kind: Literal["hand_over", "fetch_and_hand_over", "alone", "first_token"]
    reason: str
    """The policy's, of a fixed set."""
    cause: Literal["request", "retry", "renewal", "sibling", "orphan"]
    """The occasion of the decision; a sibling's or orphan's nodes were given."""
    predicted: RoutingFigures
    measured: RoutingFigures


class UsageReport(_Response):
    """How the cluster served one choice."""

    path: Literal["remote", "local"]
    """`remote`: a prefill node computed the prompt; `local`: the decode node itself."""
    prefill: PrefillNodeReport | None
    decode: DecodeNodeReport | None
    transfer: TransferSizes | None
    checkpoints: list[int]
    """Token positions at which nodes published a checkpoint."""
    migrations: int
    """Decode nodes lost under the request."""
    routing: RoutingSummary | None
    """The last routing decision, what it predicted and what was measured."""
    moves: int
    """Times that it moved to another decode node, which computed nothing of it."""


class Usage(_Response):
    """Tokens of all choices; a prompt with several choices counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    headrace: UsageReport | list[UsageReport] = _absent()
    """Only with `headrace.report`: one report, or one for each choice if there are several."""


# ---------------------------------------------------------------- log-probabilities


class TopLogprob(_Response):
    """One of the most likely tokens at a position."""

    token: str
    logprob: float
    """-9999 for an impossible token."""
    bytes: list[int] | None
    """The token's bytes; null where the model's tokenizer does not determine them."""


class TokenLogprob(TopLogprob):
    """One generated token."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(_Response):
    """Log-probabilities of a chat's choice."""

    content: list[TokenLogprob]
    refusal: None


class CompletionLogprobs(_Response):
    """Log-probabilities of a completion's choice; null for the first token of an echoed prompt."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]
    """Start of each token in the choice's text, in characters."""


# ---------------------------------------------------------------- answers


class _Choice(_Response):
    index: int
    token_ids: list[int] = _absent()
    """Only with `return_token_ids`."""
    stop_reason: str | int | None = _absent()
    """With a finish reason: the stop string or the id of the stop token that ended the choice, else null."""


class AssistantMessage(_Response):
    """The model's message."""

    role: Literal["assistant"]
    content: str


class ChatChoice(_Choice):
    """One answer to a chat."""

    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class CompletionChoice(_Choice):
    """One answer to a prompt."""

    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason


class ChatDelta(_Response):
    """The next part of a message: its role first, then text, and nothing at the end."""

    role: Literal["assistant"] = _absent()
    content: str = _absent()


class ChatChunkChoice(_Choice):
    """The next part of one answer to a chat."""

    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class CompletionChunkChoice(_Choice):
    """The next part of one answer to a prompt."""

    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class _Answer(_Response):
    id: str
    created: int
    """Seconds since 1970."""
    model: str
    system_fingerprint: str
    """Names the release: under one, the same seed gives the same answer."""


class ChatCompletion(_Answer):
    """The answer to POST /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage


class Completion(_Answer):
    """The answer to POST /v1/completions."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage


class _Chunk(_Answer):
    usage: Usage | None = None
    """In every chunk if the stream includes the usage: null but in the last one, which has no choices."""


class ChatCompletionChunk(_Chunk):
    """The data of one server-sent event of a streamed chat; `[DONE]` ends the stream."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]


class CompletionChunk(_Chunk):
    """The data of one server-sent event of a streamed completion; `[DONE]` ends the stream."""

    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]


# ---------------------------------------------------------------- tokens


class Tokenized(_Response):
    """Tokens of a text or a chat."""

    count: int
    max_model_len: int | None
    """Tokens of prompt and answer together; null where neither the model nor a node bounds them."""
    tokens: list[int]
    token_strs: list[str] | None
    """Each token as the vocabulary spells it, with `return_token_strs`."""


class Detokenized(_Response):
    """The text of tokens, special tokens included."""

    prompt: str


# ---------------------------------------------------------------- models, health, cluster


class Version(_Response):
    """The release that serves."""

    version: str


class Model(_Response):
    """The served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None
    """Tokens of prompt and answer together; null while no node is registered."""


class ModelList(_Response):
    """The served models: one."""

    object: Literal["list"]
    data: list[Model]


class Health(_Response):
    """`ok`: the router's process answers."""

    status: Literal["ok"]


class Readiness(_Response):
    """`ready`: a decode node is registered."""

    status: Literal["ready"]


class IndexStatus(_Response):
    """The router's copy of what a node has cached."""

    blocks: int
    checkpoints: int
    sequence: int | None
    """Number of the last change that the copy includes."""
    is_followed: bool
    """True while the node's changes arrive."""
    lag: int
    """Changes that the node had made by its last heartbeat, and the copy lacks."""


class CandidateRow(_Response):
    """One node as the policy saw it."""

    name: str
    role: Literal["prefill", "decode", "both"]
    chosen_for: list[Literal["prefill", "decode", "fetch_from"]]
    may_prefill: bool
    may_decode: bool
    hit: dict[str, int]
    """Tokens of the prompt that it held, by cache group."""
    load: dict[str, int]
    costs: StepCosts


class DecisionRow(RoutingSummary):
    """One routing decision with what the policy saw."""

    request: dict[str, Any]
    """The request's facts."""
    num_candidates: int
    candidates: list[CandidateRow]
    """All of them, or those of note if there are many."""


class ExplainedRequest(_Response):
    """The routing decisions about one request, in order."""

    id: str
    decisions: list[DecisionRow]


class Explanation(_Response):
    """The answer to GET /cluster/requests/{request_id}/explain: one entry for each choice of the request."""

    requests: list[ExplainedRequest]


class NodeLoad(_Response):
    """The work of a node's engine."""

    num_decoding: int
    """Sequences that generate, or whose state arrives for that."""
    context_tokens: int
    """Tokens of their contexts."""
    waiting_tokens: int
    """Tokens of prompts that are to be computed."""
    waiting_lengths: list[int]
    """At k: those of prompts that have 2^k up to 2^(k+1)-1 left."""


class NodeRow(_Response):
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


class LinkRow(_Response):
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


class RequestRow(_Response):
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
    error: str | None


class HitRow(_Response):
    """Prefix-cache hits of one cache group of a node."""

    node: str
    role: Literal["prefill", "decode", "both"]
    group: Literal["attention", "state"]
    hit_tokens: int
    looked_up_tokens: int


class Cluster(_Response):
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


class DrainedNode(_Response):
    """A node that serves nothing any more, and what has become of its running requests."""

    node: str
    moved: int
    """Requests that went on at another node, which computed nothing of them."""
    recomputed: int
    """Requests that began again elsewhere, with prompt and answer so far."""
    ended: int
    """Requests whose answers were complete before they could move."""
    seconds: float


class SwitchedRole(_Response):
    """A node's new role, confirmed by the node."""

    node: str
    role: Literal["prefill", "decode", "both"]
