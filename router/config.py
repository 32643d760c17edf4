"""Settings of a router."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from headrace.config import at_least, checkpoint_folders, one_of, ports, positive, refuse
from headrace.tracing import TracingConfig
from headrace.wire.connection_options import CONTROL_SILENCE_S
from headrace.wire.tls_config import TlsConfig
from router.api.responses_api.limits import StoredLimits
from router.http.limits import HttpLimits
from router.keys import ApiKey, key_faults
from router.parsing.limits import ParseLimits
from router.routing.plan import NO_OBJECTIVES, Objectives
from router.routing.policies.by_name import POLICIES
from router.routing.role_planner import LEAST_SAMPLES
from router.text.answer.answer_format import REASONING_FORMAT_NAMES, TOOL_FORMAT_NAMES

NAME = re.compile(r"[A-Za-z0-9._:-]{0,64}")


@dataclass(frozen=True)
class RouterConfig(HttpLimits, ParseLimits, StoredLimits):
    """Settings of one router, beside its limits for clients. Durations are in seconds; port 0 takes a free one.

    model_path          folder with config.json and tokenizer.json; the weights are not read
    host                address for HTTP clients
    port                port for HTTP clients
    control_host        address at which nodes register (gRPC)
    control_port        port at which nodes register
    served_model_name   the model's name in /v1/models and in requests; empty: the folder's name
    tool_format         how the model writes tool calls: `qwen3_coder`, `hermes`, `granite`, `nemotron`, `lfm2` or
                        `kimi`; `auto`: as its chat template says; `none`: calls are text
    reasoning_format    how the model marks its reasoning: `think` (<think> ... </think>); `auto`: as its chat template
                        says; `none`: reasoning is part of the answer
    chat_template       file with a chat template, in Jinja, that takes the place of the model's own; null: the model's
    name                name under which the nodes count this router's calls; no other router may have it. Empty: the
                        host's name and `control_port`
    generation_config   model: the defaults of temperature, top_p, top_k, min_p and repetition_penalty are those of the
                        model's generation_config.json, as in vLLM; none: OpenAI's
    roles               fixed: a node does the work of its role alone, at present; elastic: any node may do any work,
                        and its role says what the policy prefers it for
    role_planner        the router itself changes a node's role when the nodes of one role have had too much work for a
                        whole `role_window_s`, and those of the other can do with one less (docs/routing.md). For fixed
                        roles, and in one router of a cluster only
    role_window_s       seconds over which the planner averages, and which pass between two of its changes
    policy              chooses the nodes of each request, and what each does (docs/routing.md): `predicted`,
                        `round_robin`, `least_loaded`, `dynamo`, `dynamo_tuned` or `llm_d`
    fetch_from_others   nodes fetch the cached part of a prompt that they compute from one that holds more of it: its
                        blocks and the checkpoint that its answer left, so that a chat's next turn computes only the new
                        tokens
    max_concurrent      requests in flight at the nodes (each prompt of a list, and each of `n`, is one). Up to a
                        quarter more run for clients that have none in flight
    max_concurrent_per_client  the same of one client (see `client_header`); null: no limit but `max_concurrent`
    max_queue           requests that may wait for their turn, which clients share fairly; beyond that those that would
                        have their turn last get 429, with the estimated time until there is room as Retry-After. So
                        does a request whose estimated wait and answer would take longer than `request_timeout_s`
    objectives          the times that each request should keep, where it names no other in `headrace.objectives`:
                        `first_token_s`, from its arrival, and `token_gap_s`, between two tokens of its answer. Nodes
                        bound the prompts in a step by the gap; empty: no bounds
    on_missed_objectives  what becomes of a request that by all predictions keeps its objectives nowhere: `queue`, it
                        waits until the nodes can generate one more answer within this config's gap, and is then served
                        as well as it can be, or `refuse`, it gets 429 at once, with the predicted time until there is
                        room as Retry-After
    api_keys            keys that clients need, by name: `hash`, `tenant`, `access`, `priority`, `tokens_per_minute`;
                        `headrace key` makes one. A client is its key then. Empty, without `api_keys_file`: none is
                        needed
    api_keys_file       YAML file with further `api_keys`; read again when it changes
    priorities          by client (the value of `client_header`, or its address) the priority of its requests that name
                        none; they may name a higher number as `headrace.priority`. 0 for other clients. Waiting
                        requests of a lower number go before all of a higher one. With API keys it is the key's
    request_timeout_s   a request's whole life, its wait and the writing of its answer included; beyond that clients get
                        504, or the connection is closed
    max_unread_bytes    memory of one client's unread answer, all its choices together, beyond which the router reads no
                        more from their nodes, and these pause; what was on its way comes on top
    max_prompt_logprobs   prompt tokens with `echo` and `logprobs`, times alternatives + 1, of one HTTP request: each
                        takes about 30 bytes of its answer; beyond that clients get 400
    max_answer_logprobs   log-probabilities of an answer that is not streamed, alternatives included, which the router
                        keeps until its end: beyond that clients get 400
    node_return_timeout_s  how long requests wait for a node that was lost without leaving, when no other can do its
                        work; beyond that clients get 503. Longer than a supervisor takes to notice the loss and to
                        start it again. A node that is merely busy is waited for as long as `request_timeout_s` allows
    stalled_after_s     a node whose engine, by its own report, has made no turn for so long gets no work, and its
                        requests are moved. Longer than the longest step
    first_event_timeout_s  how long a decode node may take to answer a call; longer than its `admission_timeout_s`
    landing_timeout_s   how long a transfer may take to land after its prefill; then the prompt is prefilled once more
    max_attempts        failures in a row of one request's prefills, or of its decode calls, before it fails with 503. A
                        token from a decode node begins the count anew, and a busy node is no failure: a request may
                        migrate as often as nodes are lost under it. Whatever is set here, a request that may be what
                        ends nodes is given to one more of them, and to no third (500, `node_crashed`)
    heartbeat_s         interval of the nodes' heartbeats; a node counts as dead after three missed ones, if it does not
                        answer either
    control_silence_s   how long a node may leave a ping unanswered (there is one after a second without data); then its
                        connection counts as lost, with all calls on it. Raise it here and on the nodes where hosts or
                        the network pause for longer
    shutdown_grace_s    how long requests in flight may continue after a stop
    tls                 this router's certificate on the control plane; if left out, plain text, open to all
    tracing             where spans of requests go; if left out, none are made, and a client's trace context is only
                        passed on to the nodes
    """

    model_path: Path
    host: str = "127.0.0.1"
    port: int = 8000
    control_host: str = "127.0.0.1"
    control_port: int = 8001
    served_model_name: str = ""
    tool_format: str = "auto"
    reasoning_format: str = "auto"
    chat_template: Path | None = None
    name: str = ""
    generation_config: Literal["model", "none"] = "model"
    roles: Literal["fixed", "elastic"] = "elastic"
    role_planner: bool = False
    role_window_s: float = 60.0
    policy: str = "predicted"
    fetch_from_others: bool = True
    max_concurrent: int = 256
    max_concurrent_per_client: int | None = None
    max_queue: int = 256
    objectives: Objectives = NO_OBJECTIVES
    on_missed_objectives: str = "queue"
    api_keys: Mapping[str, ApiKey] = field(default_factory=dict)
    api_keys_file: Path | None = None
    priorities: Mapping[str, int] = field(default_factory=dict)
    request_timeout_s: float = 600.0
    max_unread_bytes: int = 1 << 20
    max_prompt_logprobs: int = 1 << 20
    max_answer_logprobs: int = 1 << 20
    node_return_timeout_s: float = 120.0
    stalled_after_s: float = 15.0
    first_event_timeout_s: float = 30.0
    landing_timeout_s: float = 5.0
    max_attempts: int = 3
    heartbeat_s: float = 2.0
    control_silence_s: float = CONTROL_SILENCE_S
    shutdown_grace_s: float = 10.0
    tls: TlsConfig | None = None
    tracing: TracingConfig | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "model_path", Path(self.model_path))
        if not self.served_model_name:
            object.__setattr__(self, "served_model_name", self.model_path.resolve().name)
        refuse(
            self._http_faults(),
            self._parse_faults(),
            self._stored_faults(),
            checkpoint_folders(self, "model_path"),
            ports(self, "port", "control_port"),
            at_least(
                self,
                1,
                "max_concurrent",
                "max_concurrent_per_client",
                "max_attempts",
                "max_unread_bytes",
                "max_prompt_logprobs",
                "max_answer_logprobs",
            ),
            at_least(self, 0, "max_queue"),
            one_of(self, ("queue", "refuse"), "on_missed_objectives"),
            (
                f"priorities {name} {number}: must lie in -2147483648..2147483647"
                for name, number in self.priorities.items()
                if not -(2**31) <= number < 2**31
            ),
            key_faults(self.api_keys),
            self._template_faults(),
            self._client_faults(),
            self._planner_faults(),
            at_least(self, 0.5, "control_silence_s", remedy=", two lost packets would end a connection"),
            one_of(self, POLICIES, "policy"),
            one_of(self, TOOL_FORMAT_NAMES, "tool_format"),
            one_of(self, REASONING_FORMAT_NAMES, "reasoning_format"),
            [] if NAME.fullmatch(self.name) else [f"name {self.name!r}: at most 64 letters, digits, or . _ : -"],
            positive(
                self,
                "request_timeout_s",
                "node_return_timeout_s",
                "stalled_after_s",
                "first_event_timeout_s",
                "landing_timeout_s",
                "role_window_s",
                "heartbeat_s",
                "shutdown_grace_s",
            ),
        )

    def _planner_faults(self) -> Iterator[str]:
        """A window needs some heartbeats, and roles that forbid something."""
        if self.role_planner and self.role_window_s < LEAST_SAMPLES * self.heartbeat_s:
            yield (
                f"role_window_s {self.role_window_s}: must be at least {LEAST_SAMPLES} heartbeats of "
                f"{self.heartbeat_s:g} s (heartbeat_s)"
            )
        if self.role_planner and self.roles == "elastic":
            yield "role_planner true with roles elastic: every node does all work there; set roles to fixed"

    def _template_faults(self) -> Iterator[str]:
        if self.chat_template is not None and not Path(self.chat_template).is_file():
            yield f"chat_template {self.chat_template}: no such file; give one with a Jinja template"

    def _client_faults(self) -> Iterator[str]:
        """A client is its key, or what a gateway says: one of them."""
        if self.api_keys or self.api_keys_file is not None:
            if self.client_header:
                yield f"client_header {self.client_header!r}: with API keys a client is its key; leave one of them out"
            if self.priorities:
                yield f"priorities {dict(self.priorities)}: with API keys give each key its `priority`"
