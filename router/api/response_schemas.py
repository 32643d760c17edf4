"""The JSON of responses, as /openapi.json describes it: what several endpoints share.

Nothing is validated by these models at run time: the writers of answers and `router.status` write the JSON, and
tests/unit/router/api/test_openapi.py validates real responses against the schema.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


def absent() -> Any:
    """A field that an answer may lack, but that is never null."""
    return Field(default=None, json_schema_extra=_without_default)


def _without_default(schema: dict[str, Any]) -> None:
    del schema["default"]


class Response(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


# ---------------------------------------------------------------- errors


class ErrorDetail(Response):
    """One error."""

    message: str
    """The value, the limit and the remedy."""
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"]
    param: str | None
    """The field of the request that is wrong."""
    code: str | None
    """The cause, for programs: `context_length_exceeded`, `queue_full`, `no_node_available`, ..."""


class ErrorBody(Response):
    """The body of every answer that is no success, and the last event of a stream that breaks."""

    error: ErrorDetail


# ---------------------------------------------------------------- usage


class PromptTokensDetails(Response):
    """Parts of the prompt's tokens."""

    cached_tokens: int
    """Prompt tokens that no node had to compute."""


class CompletionTokensDetails(Response):
    """Parts of the answer's tokens."""

    reasoning_tokens: int
    """Tokens of the reasoning, without its markers."""


class PrefillNodeReport(Response):
    """The prefill node's part."""

    node: str
    attention_hit_tokens: int
    """Prompt tokens whose attention blocks were cached on the node."""
    state_hit_tokens: int
    """Prompt tokens before the deepest cached checkpoint."""
    fetched_tokens: int
    """Prompt tokens whose cache came from a decode node."""
    computed_tokens: int


class DecodeNodeReport(Response):
    """The decode node's part."""

    node: str
    attention_hit_tokens: int
    """Prompt tokens whose attention blocks were cached on the node, and were not transferred."""
    state: Literal["received", "resumed", "computed"]
    """Origin of the state: the prefill node, a checkpoint (the decode node's own, or a fetched one), or its own
    prefill."""
    fetched_tokens: int
    """Prompt tokens beyond the node's own checkpoint that another node sent, for a prompt that it computed itself."""
    drafted_tokens: int
    """Tokens drafted for steps of the answer on the node."""
    accepted_tokens: int
    """Drafted tokens that were the answer's: each saved it a step."""


class TransferSizes(Response):
    """The transfer from the prefill node to the decode node."""

    attention_tokens: int
    attention_bytes: int
    state_bytes: int
    seconds: float


class PlanNodes(Response):
    """The nodes of a plan."""

    prefill: str
    decode: str | None
    """The node that generates; null: the first token was enough."""
    fetch_from: str | None
    """The node that the prefill node may fetch the cached part of the prompt from."""


class RoutingFigures(Response):
    """Predicted or measured figures of a decision; null: unknown."""

    first_token_s: float | None
    """From the decision to the first token."""
    token_gap_s: float | None
    computed_tokens: int | None
    """Tokens of the prompt that were not cached."""


class RoutingSummary(Response):
    """One routing decision."""

    plan: PlanNodes
    kind: Literal["hand_over", "fetch_and_hand_over", "alone", "first_token"]
    reason: str
    """The policy's, of a fixed set."""
    cause: Literal["request", "retry", "renewal", "sibling", "orphan"]
    """The occasion of the decision; a sibling's or orphan's nodes were given."""
    predicted: RoutingFigures
    measured: RoutingFigures


class UsageReport(Response):
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


class UsageSoFar(Response):
    """Tokens of a choice and its prompt, up to a chunk."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Usage(Response):
    """Tokens of all choices; a prompt with several choices counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails = absent()
    """Only of a chat with a model whose reasoning is known from its answer."""
    headrace: UsageReport | list[UsageReport] = absent()
    """Only with `headrace.report`: one report, or one for each choice if there are several."""


# ---------------------------------------------------------------- answers


class PromptLogprob(Response):
    """A token of the prompt, or one that could have stood in its place."""

    logprob: float
    rank: int | None
    """1 is the most likely; null: below the alternatives."""
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""For each token of the prompt by token id; null for the first."""


class AnswerChoice(Response):
    index: int
    token_ids: list[int] = absent()
    """Only with `return_token_ids`."""
    stop_reason: str | int | None = absent()
    """With a finish reason: the stop string or the id of the stop token that ended the choice, else null."""


class AnswerEnvelope(Response):
    id: str
    created: int
    """Seconds since 1970."""
    model: str
    system_fingerprint: str
    """Names the release: under one, the same seed gives the same answer."""


class ChunkEnvelope(AnswerEnvelope):
    usage: Usage | UsageSoFar | None = None
    """In every chunk if the stream includes the usage: null but in the last one, which has no choices. With
    `continuous_usage_stats` those before have the usage so far."""


# ---------------------------------------------------------------- tokens


class Tokenized(Response):
    """Tokens of a text or a chat."""

    count: int
    max_model_len: int | None
    """Tokens of prompt and answer together; null where neither the model nor a node bounds them."""
    tokens: list[int]
    token_strs: list[str] | None
    """Each token as the vocabulary spells it, with `return_token_strs`."""


class Detokenized(Response):
    """The text of tokens, special tokens included."""

    prompt: str


# ---------------------------------------------------------------- models and health


class Version(Response):
    """The release that serves."""

    version: str


class Model(Response):
    """The served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None
    """Tokens of prompt and answer together; null while no node is registered."""


class ModelList(Response):
    """The served models: one."""

    object: Literal["list"]
    data: list[Model]


class Health(Response):
    """`ok`: the router's process answers."""

    status: Literal["ok"]


class Readiness(Response):
    """`ready`: a node that generates answers is registered."""

    status: Literal["ready"]
