"""The OpenAPI document of a router beside its replies."""

from __future__ import annotations

import json
from typing import Any

import httpx
from jsonschema import Draft202012Validator


class Document:
    """The router's OpenAPI document, as validators."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document

    def validator(self, schema: dict[str, Any]) -> Draft202012Validator:
        Draft202012Validator.check_schema(schema)
        return Draft202012Validator({**schema, "components": self.document["components"]})

    def resolve(self, schema: dict[str, Any]) -> dict[str, Any]:
        if "$ref" in schema:
            return self.document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        return schema

    def body(self, path: str) -> dict[str, Any]:
        return self.document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]

    def check(self, reply: httpx.Response, path: str | None = None) -> None:
        """Raises ValidationError or KeyError for a reply that the document does not describe."""
        operation = self.document["paths"][path or reply.request.url.path][reply.request.method.lower()]
        response = operation["responses"][str(reply.status_code)]
        assert all(name in reply.headers for name in response.get("headers", ()))
        content = response["content"]
        media_type = next(each for each in content if reply.headers["content-type"].startswith(each.partition(";")[0]))
        if media_type == "application/json":
            self.validator(content[media_type]["schema"]).validate(reply.json())
        elif media_type == "text/event-stream":
            for data in events_of(reply.text):
                self.validator(content[media_type]["schema"]).validate(data)


def events_of(text: str) -> list[dict[str, Any]]:
    """The data of the events of a stream, whose names are their types; `[DONE]` may end it, and nothing else."""
    *events, nothing = text.split("\n\n")
    assert nothing == ""
    if events[-1] == "data: [DONE]":
        events.pop()
    found = []
    for event in events:
        name, _, data = event.rpartition("data: ")
        found.append(json.loads(data))
        assert name in ("", f"event: {found[-1].get('type')}\n")
    return found
