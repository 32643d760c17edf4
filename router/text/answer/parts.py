"""Answer parts: the text of an answer, its reasoning and its tool calls apart."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ContentText:
    """The next text of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """The next text of the reasoning before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins: the `index`-th of the answer, from 0, each after the end of the one before."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next fragment of a call's arguments: joined, they are a JSON object, unless the model broke it."""

    index: int
    text: str


AnswerPart = ContentText | ReasoningText | CallStart | CallArguments


class AnswerParser(Protocol):
    """Splits one answer's text into parts, as it arrives.

    The parts, with neighbours of a kind joined, do not depend on how the text was cut into pieces. Nothing raises: text
    that does not keep to the model's format comes out as content, or as arguments as they are.
    """

    @property
    def is_complete(self) -> bool:
        """True once no part may follow: the answer has all the calls that it may have."""
        ...

    @property
    def is_reasoning(self) -> bool:
        """True while the text is reasoning."""
        ...

    def push(self, text: str) -> list[AnswerPart]:
        """The parts that this text completes; what may be the beginning of a marker is held back."""
        ...

    def finish(self) -> list[AnswerPart]:
        """The parts that were held back, once the answer has ended."""
        ...


def merged(parts: Iterable[AnswerPart]) -> list[AnswerPart]:
    """The parts with neighbouring texts of one kind joined."""
    out: list[AnswerPart] = []
    for part in parts:
        match out[-1] if out else None, part:
            case (ContentText(before), ContentText(text)):
                out[-1] = ContentText(before + text)
            case (ReasoningText(before), ReasoningText(text)):
                out[-1] = ReasoningText(before + text)
            case (CallArguments(one, before), CallArguments(other, text)) if one == other:
                out[-1] = CallArguments(one, before + text)
            case _:
                out.append(part)
    return out
