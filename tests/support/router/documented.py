"""The OpenAPI document of a router beside its replies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
from jsonschema import Draft202012Validator, ValidationError, validators


def _content_schema(validator: Any, schema: Any, text: Any, parent: Any) -> Iterator[ValidationError]:
    """Holds the JSON in a string to its `contentSchema`, which JSON Schema leaves open."""
    try:
        data = json.loads(text)
    except ValueError as error:
        yield ValidationError(f"{text!r}: {error}")
    else:
        yield from validator.descend(data, schema)


Validator = validators.extend(Draft202012Validator, {"contentSchema": _content_schema})


class Document:
    """The router's OpenAPI document, as validators."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document

    def validator(self, schema: dict[str, Any]) -> Any:
        Draft202012Validator.check_schema(schema)
        return Validator({**schema, "components": self.document["components"]})

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
            validator = self.validator(content[media_type]["itemSchema"])
            for event in events_of(reply.text):
                validator.validate(event)


def events_of(text: str) -> list[dict[str, str]]:
    """The events of a stream as a client parses them; those with a name are named as the `type` of their data."""
    *events, nothing = text.split("\n\n")
    assert nothing == ""
    found = [dict(line.split(": ", 1) for line in event.split("\n")) for event in events]
    assert all(json.loads(each["data"])["type"] == each["event"] for each in found if "event" in each)
    return found
