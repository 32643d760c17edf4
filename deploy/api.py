"""Client of the router's HTTP interface, for the `headrace` command."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx

from deploy.errors import RequestFailed

TIMEOUT = httpx.Timeout(connect=5.0, read=120.0, write=30.0, pool=5.0)

Message = Mapping[str, str]


@dataclass(frozen=True)
class ChatAnswer:
    """A finished answer. `usage` is the router's, with the request's report under `headrace`; durations in seconds.

    calls   of tools: each a name and its arguments as JSON
    """

    text: str
    usage: Mapping[str, Any]
    first_token_s: float | None
    total_s: float
    calls: tuple[tuple[str, str], ...] = ()

    @property
    def report(self) -> Mapping[str, Any] | None:
        return self.usage.get("headrace")


class RouterApi:
    """Requests to the router at `url`, with an API key where it needs one. Every failure is a RequestFailed."""

    def __init__(self, url: str, api_key: str = "") -> None:
        self.url = url
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.Client(base_url=url, timeout=TIMEOUT, trust_env=False, headers=headers)

    def cluster(self) -> dict[str, Any]:
        """The JSON of GET /cluster: nodes, requests, counters."""
        return self._get("/cluster")

    def explain(self, request_id: str) -> dict[str, Any]:
        """The JSON of GET /cluster/requests/ID/explain: the routing decisions about a request."""
        return self._get(f"/cluster/requests/{quote(request_id, safe='')}/explain")

    def _get(self, path: str) -> dict[str, Any]:
        try:
            response = self._client.get(path)
        except httpx.HTTPError as error:
            raise RequestFailed(f"{self.url} does not answer: {error}") from error
        if response.is_error:
            raise RequestFailed(_error_message(response))
        return response.json()

    def switch_role(self, node: str, role: str) -> None:
        """Changes the work for which the cluster prefers a node; returns once the node has confirmed it."""
        try:
            response = self._client.post(f"/cluster/nodes/{quote(node, safe='')}/role", json={"role": role})
        except httpx.HTTPError as error:
            raise RequestFailed(f"{self.url} does not answer: {error}") from error
        if response.is_error:
            raise RequestFailed(_error_message(response))

    def drain(self, node: str, *, timeout_s: float, keep: bool) -> dict[str, Any]:
        """Moves the node's running requests to others, and stops it unless it is kept; the router's report."""
        body = {"timeout_s": timeout_s, "keep": keep}
        path = f"/cluster/nodes/{quote(node, safe='')}/drain"
        patience = httpx.Timeout(connect=5.0, read=timeout_s + 30.0, write=30.0, pool=5.0)
        try:
            response = self._client.post(path, json=body, timeout=patience)
        except httpx.HTTPError as error:
            raise RequestFailed(f"{self.url} does not answer: {error}") from error
        if response.is_error:
            raise RequestFailed(_error_message(response))
        report: dict[str, Any] = response.json()
        return report

    def registered_nodes(self) -> set[str]:
        """Names of the registered nodes; none while the router does not answer yet."""
        try:
            return {node["name"] for node in self.cluster()["nodes"]}
        except RequestFailed:
            return set()

    def chat(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int,
        on_text: Callable[[str], None],
        temperature: float = 0.0,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> ChatAnswer:
        """Sends a streaming request; `on_text` gets each piece of text as it arrives."""
        body = {
            "messages": list(messages),
            "max_tokens": max_tokens,
            "temperature": temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            "headrace": {"report": True},
            **({"tools": list(tools)} if tools else {}),
        }
        started_s = time.monotonic()
        first_token_s: float | None = None
        pieces: list[str] = []
        calls: list[tuple[str, str]] = []
        usage: Mapping[str, Any] = {}
        for event in self._events("/v1/chat/completions", body):
            usage = event.get("usage") or usage
            for choice in event.get("choices", ()):
                for part in choice["delta"].get("tool_calls") or ():
                    function = part["function"]
                    if "name" in function:
                        calls.append((function["name"], ""))
                    name, arguments = calls.pop()
                    calls.append((name, arguments + function.get("arguments", "")))
                text = choice["delta"].get("content")
                if text:
                    first_token_s = first_token_s or time.monotonic() - started_s
                    pieces.append(text)
                    on_text(text)
        return ChatAnswer("".join(pieces), usage, first_token_s, time.monotonic() - started_s, tuple(calls))

    def _events(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The server-sent events of one streamed answer."""
        finished = False
        try:
            with self._client.stream("POST", path, json=body) as response:
                if response.is_error:
                    response.read()
                    raise RequestFailed(_error_message(response))
                for line in response.iter_lines():
                    if line == "data: [DONE]":
                        finished = True
                    elif line.startswith("data: "):
                        event = json.loads(line.removeprefix("data: "))
                        if "error" in event:
                            raise RequestFailed(event["error"]["message"])
                        yield event
        except httpx.HTTPError as error:
            raise RequestFailed(f"{self.url} broke off: {error}") from error
        if not finished:
            raise RequestFailed(f"{self.url} broke off before the answer's end")


def first_to_answer(apis: Sequence[RouterApi]) -> tuple[RouterApi, dict[str, Any]]:
    """The first of several routers that answers, and its /cluster. Raises RequestFailed when none does."""
    failures = []
    for api in apis:
        try:
            return api, api.cluster()
        except RequestFailed as failure:
            failures.append(str(failure))
    raise RequestFailed("; ".join(failures))


def first_to_explain(apis: Sequence[RouterApi], request_id: str) -> dict[str, Any]:
    """The explanation of the first router that knows the request. Raises RequestFailed when none does."""
    failures = []
    for api in apis:
        try:
            return api.explain(request_id)
        except RequestFailed as failure:
            failures.append(str(failure))
    raise RequestFailed("; ".join(failures))


def _error_message(response: httpx.Response) -> str:
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = response.text[:200]
    return f"HTTP {response.status_code}: {message}"
