"""The format of a model's answers: chosen by its chat template, or by the operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from router.text.answer.calls import CallFormat, Schemas
from router.text.answer.json_calls import GRANITE, HERMES, NEMOTRON
from router.text.answer.kimi import KIMI
from router.text.answer.lfm2 import LFM2
from router.text.answer.parts import AnswerParser
from router.text.answer.qwen3_coder import QWEN3_CODER
from router.text.answer.reader import AnswerReader, ReasoningMarkers

CALL_FORMATS: Mapping[str, CallFormat] = {
    "qwen3_coder": QWEN3_CODER,
    "hermes": HERMES,
    "granite": GRANITE,
    "nemotron": NEMOTRON,
    "lfm2": LFM2,
    "kimi": KIMI,
}
REASONING_FORMATS: Mapping[str, ReasoningMarkers] = {"think": ReasoningMarkers("<think>", "</think>")}

TOOL_FORMAT_NAMES = ("auto", "none", *CALL_FORMATS)
REASONING_FORMAT_NAMES = ("auto", "none", *REASONING_FORMATS)

_SIGNS = (
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("kimi", ("<|tool_calls_section_begin|>",)),
    ("lfm2", ("<|tool_call_start|>",)),
    ("nemotron", ("<TOOLCALL>",)),
    ("granite", ("<|tool_call|>",)),
    ("hermes", ("<tool_call>",)),
)
"""Text that a chat template of each format contains; the first format counts of which all is there."""


@dataclass(frozen=True)
class ModelFormats:
    """Names of the formats in which a model writes tool calls and reasoning; None: it writes none that is known."""

    calls: str | None = None
    reasoning: str | None = None

    @classmethod
    def of(cls, template: str | None, calls: str = "auto", reasoning: str = "auto") -> ModelFormats:
        """The operator's choice, and for `auto` that of the chat template's text."""
        text = template or ""
        if calls == "auto":
            calls = next((name for name, signs in _SIGNS if all(sign in text for sign in signs)), "none")
        if reasoning == "auto":
            reasoning = next((name for name, each in REASONING_FORMATS.items() if each.end in text), "none")
        return cls(*(None if name == "none" else name for name in (calls, reasoning)))

    def opens_reasoning(self, prompt: str, *, is_inside: bool = False) -> bool:
        """True if the answer to this rendered prompt begins inside the reasoning. `is_inside`: the prompt ends inside a
        message, which the answer goes on with."""
        if self.reasoning is None:
            return False
        markers = REASONING_FORMATS[self.reasoning]
        if is_inside:
            return prompt.rfind(markers.start) > prompt.rfind(markers.end)
        return prompt.rstrip().endswith(markers.start)


@dataclass(frozen=True)
class AnswerFormat:
    """How one answer's text is split into parts.

    calls              name of the format of tool calls; None: there are no tools, and all calls are text
    reasoning          name of the format of reasoning
    begins_reasoning   the prompt ends inside the reasoning
    schemas            JSON schemas of the tools' parameters, by the tools' names
    max_calls          tool calls after which the answer ends; None: any number
    """

    calls: str | None = None
    reasoning: str | None = None
    begins_reasoning: bool = False
    schemas: Schemas = field(default_factory=dict)
    max_calls: int | None = None

    @property
    def markers(self) -> frozenset[str]:
        """Strings that the parser must see, also where the model has special tokens for them."""
        found: set[str] = set()
        if self.calls is not None:
            calls = CALL_FORMATS[self.calls]
            found.update(calls.openings, calls.closings, calls.inner)
        if self.reasoning is not None:
            reasoning = REASONING_FORMATS[self.reasoning]
            found.update((reasoning.start, reasoning.end))
        return frozenset(found)

    def parser(self, new_id: Callable[[int], str]) -> AnswerParser | None:
        """A parser for one answer; `new_id` makes the ids of calls from their index. None: it is content alone."""
        if self.calls is None and self.reasoning is None:
            return None
        return AnswerReader(
            None if self.reasoning is None else REASONING_FORMATS[self.reasoning],
            None if self.calls is None else CALL_FORMATS[self.calls],
            begins_reasoning=self.begins_reasoning,
            schemas=self.schemas,
            max_calls=self.max_calls,
            new_id=new_id,
        )


def schemas_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The parameters' schemas of OpenAI's `tools`, by name; tools of other shapes have none."""
    functions = [tool.get("function") for tool in tools]
    return {
        function["name"]: function["parameters"]
        for function in functions
        if isinstance(function, Mapping)
        and isinstance(function.get("name"), str)
        and isinstance(function.get("parameters"), Mapping)
    }
