"""Dataclasses of `headrace/wire/messages.py` to and from the protobuf messages, field by field of the same name.

One generic pair does all of them. Encoding a dataclass raises TypeError if one of its fields is not in the message; a
message may have fields that the dataclass has not. A dataclass field of type `X | None` is a protobuf field with
presence; a tuple is a repeated field; an Enum member STOP is FINISH_REASON_STOP.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from google.protobuf.message import Message

from headrace.wire import messages as m
from headrace.wire.generated import headrace_pb2 as pb

T = TypeVar("T")

_PREFILL_EVENTS: dict[type, str] = {
    m.FirstToken: "first_token",
    m.PromptLogprobs: "prompt_logprobs",
    m.PrefillDone: "done",
}
_DECODE_COMMANDS: dict[type, str] = {m.Start: "start", m.Renew: "renew", m.Stop: "stop"}
_DECODE_EVENTS: dict[type, str] = {
    m.Reservation: "reserved",
    m.LocalPrefill: "local",
    m.SessionFailed: "session_failed",
    m.TransferReport: "landed",
    m.Tokens: "tokens",
    m.DecodeDone: "done",
    m.PromptLogprobs: "prompt_logprobs",
}


_Writer = tuple[str, Callable[[Message, Any], None]]
_Reader = tuple[str, Callable[[Message], Any]]
_WRITERS: dict[type, list[_Writer]] = {}  # by dataclass, made on first use
_READERS: dict[type, list[_Reader]] = {}


# ---------------------------------------------------------------- one value


def encode(value: Any, message: Message) -> None:
    """Writes a dataclass into an empty protobuf message of the same field names."""
    cls = type(value)
    if cls not in _WRITERS:
        _WRITERS[cls] = _writers(cls, message.DESCRIPTOR)
    for name, put in _WRITERS[cls]:
        field_value = getattr(value, name)
        if field_value is not None:
            put(message, field_value)


def decode(message: Message, cls: type[T]) -> T:
    """The dataclass that a protobuf message holds."""
    if cls not in _READERS:
        _READERS[cls] = _readers(cls)
    return cls(**{name: get(message) for name, get in _READERS[cls]})


def _writers(cls: type[Any], descriptor: Any) -> list[_Writer]:
    known = descriptor.fields_by_name
    for field in fields(cls):
        if field.name not in known:
            raise TypeError(f"{cls.__name__}.{field.name} has no field in {descriptor.name}")
    hints = get_type_hints(cls)
    return [(field.name, _writer(field.name, _without_none(hints[field.name]))) for field in fields(cls)]


def _writer(name: str, hint: Any) -> Callable[[Message, Any], None]:
    if get_origin(hint) is tuple:
        if is_dataclass(get_args(hint)[0]):

            def put_each(message: Message, values: Any) -> None:
                repeated = getattr(message, name)
                for value in values:
                    encode(value, repeated.add())

            return put_each
        return lambda message, values: getattr(message, name).extend(values)
    if get_origin(hint) is Mapping:
        return lambda message, values: getattr(message, name).update(values)
    if is_dataclass(hint):

        def put_nested(message: Message, value: Any) -> None:
            nested = getattr(message, name)
            nested.SetInParent()
            encode(value, nested)

        return put_nested
    if isinstance(hint, type) and issubclass(hint, Enum):
        prefix = _enum_prefix(hint)
        return lambda message, value: setattr(message, name, pb.__dict__[prefix + value.name])
    return lambda message, value: setattr(message, name, value)


def _readers(cls: type[Any]) -> list[_Reader]:
    hints = get_type_hints(cls)
    return [(field.name, _reader(field.name, hints[field.name])) for field in fields(cls)]


def _reader(name: str, hint: Any) -> Callable[[Message], Any]:
    inner = _without_none(hint)
    if isinstance(inner, type) and issubclass(inner, Enum):
        by_number = {pb.__dict__[_enum_prefix(inner) + member.name]: member for member in inner}
        if inner is not hint:
            return lambda message: by_number.get(getattr(message, name))
        return lambda message: by_number[getattr(message, name)]
    if inner is not hint:
        read = _reader(name, inner)
        return lambda message: read(message) if message.HasField(name) else None
    if get_origin(hint) is tuple:
        item: type = get_args(hint)[0]
        if is_dataclass(item):
            inner_type: type = item
            return lambda message: tuple(decode(each, inner_type) for each in getattr(message, name))
        return lambda message: tuple(getattr(message, name)[:])  # protobuf's slices cost half of its iterators
    if get_origin(hint) is Mapping:
        return lambda message: dict(getattr(message, name))
    if is_dataclass(hint):
        nested: Any = hint
        return lambda message: decode(getattr(message, name), nested)
    return lambda message: getattr(message, name)


def _without_none(hint: Any) -> Any:
    if get_origin(hint) in (types.UnionType, Union):
        (hint,) = (arg for arg in get_args(hint) if arg is not type(None))
    return hint


def _enum_prefix(cls: type[Enum]) -> str:
    """FinishReason -> FINISH_REASON_."""
    words = "".join(f"_{c}" if c.isupper() else c for c in cls.__name__)
    return f"{words.lstrip('_').upper()}_"


# ---------------------------------------------------------------- one of several


def _encode_one(value: Any, message: Message, names: Mapping[type, str]) -> None:
    nested = getattr(message, names[type(value)])
    nested.SetInParent()
    encode(value, nested)


def _decode_one(message: Message, oneof: str, names: Mapping[type, str]) -> Any:
    which = message.WhichOneof(oneof)
    for cls, name in names.items():
        if name == which:
            return decode(getattr(message, name), cls)
    raise ValueError(f"{type(message).__name__} without a known {oneof}: the peer runs another version")


def encode_prefill_event(event: m.PrefillEvent) -> pb.PrefillEvent:
    message = pb.PrefillEvent()
    _encode_one(event, message, _PREFILL_EVENTS)
    return message


def decode_prefill_event(message: pb.PrefillEvent) -> m.PrefillEvent:
    event: m.PrefillEvent = _decode_one(message, "event", _PREFILL_EVENTS)
    return event


def encode_decode_command(command: m.DecodeCommand) -> pb.DecodeCommand:
    message = pb.DecodeCommand()
    _encode_one(command, message, _DECODE_COMMANDS)
    return message


def decode_decode_command(message: pb.DecodeCommand) -> m.DecodeCommand:
    command: m.DecodeCommand = _decode_one(message, "command", _DECODE_COMMANDS)
    return command


def encode_decode_event(event: m.DecodeEvent) -> pb.DecodeEvent:
    message = pb.DecodeEvent()
    _encode_one(event, message, _DECODE_EVENTS)
    return message


def decode_decode_event(message: pb.DecodeEvent) -> m.DecodeEvent:
    event: m.DecodeEvent = _decode_one(message, "event", _DECODE_EVENTS)
    return event


def decode_fetch_request(message: pb.FetchRequest) -> m.FetchRequest:
    return decode(message, m.FetchRequest)


def encode_prefill_request(request: m.PrefillRequest) -> pb.PrefillRequest:
    message = pb.PrefillRequest()
    encode(request, message)
    return message


def decode_prefill_request(message: pb.PrefillRequest) -> m.PrefillRequest:
    return decode(message, m.PrefillRequest)
