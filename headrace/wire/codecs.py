"""Converts the dataclasses of `headrace/wire/messages.py` to protobuf messages and back, by field names.

Encoding raises TypeError if a dataclass has a field that the message lacks; the message may have more. A dataclass
field of type `X | None` is a protobuf field with presence; a tuple is a repeated field, a TokenArray its bytes; the
Enum member STOP of FinishReason is FINISH_REASON_STOP.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from google.protobuf.message import Message

from headrace.token_array import TokenArray
from headrace.wire import messages as m
from headrace.wire.generated import headrace_pb2 as pb

T = TypeVar("T")
M = TypeVar("M", bound=Message)

_UNIONS: dict[type[Message], Any] = {
    pb.PrefillEvent: m.PrefillEvent,
    pb.DecodeCommand: m.DecodeCommand | m.TokensRead,
    pb.DecodeEvent: m.DecodeEvent,
}
"""Messages that hold one of several others, with the dataclasses of those."""

_Writer = tuple[str, Callable[[Message, Any], None]]
_Reader = tuple[str, Callable[[Message], Any]]
_WRITERS: dict[type, list[_Writer]] = {}  # by dataclass, filled on first use
_READERS: dict[type, list[_Reader]] = {}


# ---------------------------------------------------------------- one value


def encode(value: Any, message: M) -> M:
    """Writes a dataclass into an empty protobuf message of the same field names; returns the message."""
    cls = type(value)
    if cls not in _WRITERS:
        _WRITERS[cls] = _writers(cls, message.DESCRIPTOR)
    for name, put in _WRITERS[cls]:
        field_value = getattr(value, name)
        if field_value is not None:
            put(message, field_value)
    return message


def decode(message: Message, cls: type[T]) -> T:
    """The dataclass in a protobuf message."""
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
    if hint is TokenArray:
        return lambda message, tokens: setattr(message, name, tokens.packed)
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
        return lambda message: tuple(getattr(message, name)[:])  # half as long as iterating
    if get_origin(hint) is Mapping:
        return lambda message: dict(getattr(message, name))
    if hint is TokenArray:
        return lambda message: TokenArray(getattr(message, name))
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


def encode_one_of(value: Any, message: M) -> M:
    """Writes one of a union's dataclasses into an empty PrefillEvent, DecodeCommand or DecodeEvent; returns that."""
    nested = getattr(message, _FIELDS[type(message)][type(value)])
    nested.SetInParent()
    encode(value, nested)
    return message


def decode_one_of(message: Message) -> Any:
    """The dataclass in a PrefillEvent, DecodeCommand or DecodeEvent. Raises ValueError for one of another version."""
    kind = type(message)
    which = message.WhichOneof(_ONEOFS[kind])
    if which is None:
        raise ValueError(f"{kind.__name__} without a known {_ONEOFS[kind]}: the peer runs another version")
    return decode(getattr(message, which), _CLASSES[kind][which])


def _classes(kind: type[Message]) -> dict[str, type]:
    """The dataclass of each field of a union; a field's message has the dataclass's name."""
    by_name = {cls.__name__: cls for cls in get_args(_UNIONS[kind])}
    return {field.name: by_name[field.message_type.name] for field in kind.DESCRIPTOR.fields if field.message_type}


_ONEOFS = {kind: kind.DESCRIPTOR.oneofs[0].name for kind in _UNIONS}
_CLASSES = {kind: _classes(kind) for kind in _UNIONS}
_FIELDS = {kind: {cls: name for name, cls in classes.items()} for kind, classes in _CLASSES.items()}
