"""JSON bodies as models, and the errors of those that do not fit: the base of all requests.

Unknown fields are ignored, since clients send many; inside a part that is Headrace's own an unknown key is an error. A
field that would change the answer and is not supported is refused, not ignored: see `router.api.unsupported_fields`.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, GetJsonSchemaHandler, ValidationError, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import PydanticCustomError

from router.api.unsupported_fields import Unsupported, refuse_unsupported, schema_of
from router.errors import ApiError, bad_request


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = BeforeValidator(_whole)
"""Behind an int's bounds: some clients write a whole number as 3.0, which JSON Schema counts as an integer."""


def whole_numbers(values: Any) -> Any:
    """A list's whole numbers as int, for lists that are too long for `Whole` at each; anything else as it is."""
    if isinstance(values, list) and float in set(map(type, values)):
        return [_whole(value) for value in values]
    return values


def wrong_field(field: str, message: str) -> PydanticCustomError:
    """The error of a field that a validator of the whole body finds wrong."""
    return PydanticCustomError("wrong_field", "{message}", {"message": message, "field": field})


class Body(BaseModel):
    """A request's body, or a part of it: strict about types, without NaN and infinities."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="ignore", use_attribute_docstrings=True)
    unsupported: ClassVar[dict[str, Unsupported]] = {}


class OpenBody(Body):
    """A whole body, with fields that it names in `unsupported`."""

    model_config = ConfigDict(extra="allow")  # kept until `parse_body` has looked for unsupported ones

    @classmethod
    def __get_pydantic_json_schema__(cls, core: Any, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Adds the unsupported fields, with the values that are no error."""
        schema = handler(core)
        described = handler.resolve_ref_schema(schema)
        described["properties"] |= schema_of(cls.unsupported)
        described.pop("additionalProperties", None)
        return schema


class OwnBody(Body):
    """A part of a request that is Headrace's own: an unknown key is an error."""

    model_config = ConfigDict(json_schema_extra={"additionalProperties": False})

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, value: Any) -> Any:
        known = [field.alias or name for name, field in cls.model_fields.items()]
        for key in value if isinstance(value, dict) else ():
            if key not in known:
                nearest = get_close_matches(str(key), known, n=1, cutoff=0)[0]
                raise ValueError(f"unknown key {key!r}: did you mean {nearest!r}?")
        return value


B = TypeVar("B", bound=Body)


def parse_body(cls: type[B], data: bytes) -> B:
    """The body, or ApiError (400) that names the first wrong or unsupported field."""
    try:
        body = cls.model_validate_json(data)
    except ValidationError as error:
        raise _as_api_error(error) from None
    refuse_unsupported(body.model_extra, cls.unsupported)
    return body


def checked_body(cls: type[B], fields: Mapping[str, Any]) -> B:
    """The body with these fields, those that are None left out; raises ApiError (400) as `parse_body`."""
    try:
        body = cls.model_validate({name: value for name, value in fields.items() if value is not None})
    except ValidationError as error:
        raise _as_api_error(error) from None
    refuse_unsupported(body.model_extra, cls.unsupported)
    return body


def _as_api_error(error: ValidationError) -> ApiError:
    # Of a union, each member that was tried has an error: that of the one which was meant is deepest, or of its type.
    faults = error.errors(include_url=False)
    first = max(faults, key=lambda each: (len(each["loc"]), not each["type"].endswith("_type")))
    if first["type"] == "json_invalid":
        return bad_request(f"the body is not valid JSON: {first['ctx']['error']}")
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "model_type" and not first["loc"]:
        return bad_request(f"the body is a {type(first['input']).__name__}: send a JSON object")
    if not first["loc"]:
        return bad_request(message, first.get("ctx", {}).get("field"))
    # For a union, pydantic appends the member that it tried; clients know field names only.
    names = [str(part) for part in first["loc"] if isinstance(part, int) or str(part).isidentifier()]
    names = [name for name in names if name not in ("str", "bool", "TextPart", "RefusalPart")] or [str(first["loc"][0])]
    field = ".".join(names)
    shown = first["input"]
    value = "" if isinstance(shown, dict | list) or first["type"] == "missing" else f" {shown!r:.100}"
    return bad_request(f"{field}{value}: {message}", names[0])
