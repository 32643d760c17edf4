"""Held-out tool questions: a chat with some tools, one of which the last message asks for. Pure, but for the scorer.

An answer is right if the router reads exactly one call from it, of the right tool and with the right arguments.
"""

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from router.text.answer.answer_format import AnswerFormat, schemas_of
from router.text.answer.parts import CallArguments, CallStart, merged
from router.text.chat_template import ChatTemplate
from tiny_models.prose import filler_sentence
from tiny_models.tools import TOOLS, Arguments, CallFormat, Tool, call_text, chat_template, draw_ask

MIN_TOOLS, MAX_TOOLS = 2, 5
SYSTEM_PROMPT = "You are a helpful assistant."


@dataclass(frozen=True)
class ToolQuestion:
    """A chat as a client sends it, and the call that should come."""

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Tool, ...]
    name: str
    arguments: Arguments

    @property
    def tools_json(self) -> list[dict[str, Any]]:
        return [tool.as_json for tool in self.tools]

    def prompt_text(self, call_format: CallFormat) -> str:
        """The prompt as the family's template with tools renders it."""
        return ChatTemplate(chat_template(call_format), {}).render(
            self.messages, tools=self.tools_json, add_generation_prompt=True
        )

    def right_answer(self, call_format: CallFormat) -> str:
        return call_text(call_format, self.name, self.arguments)


def held_out_tool_questions(count: int, seed: int = 0) -> list[ToolQuestion]:
    """`count` questions for calls that training never made: alone, behind a system prompt, behind another call."""
    rng = random.Random(f"held-out tools {seed}")
    questions = []
    for number in range(count):
        tools = tuple(rng.sample(TOOLS, k=rng.randint(MIN_TOOLS, MAX_TOOLS)))
        ask = draw_ask(rng, rng.choice(tools), held_out=True)
        before: list[Mapping[str, Any]] = []
        match number % 3:
            case 1:
                before = [{"role": "system", "content": SYSTEM_PROMPT}]
            case 2:
                before = _earlier_call(rng, tools)
        messages = (*before, {"role": "user", "content": ask.text})
        questions.append(ToolQuestion(messages, tools, ask.tool.name, ask.arguments))
    return questions


def _earlier_call(rng: random.Random, tools: tuple[Tool, ...]) -> list[Mapping[str, Any]]:
    ask, result = draw_ask(rng, rng.choice(tools), held_out=True), filler_sentence(rng)
    call = {"id": "call_1", "type": "function", "function": {"name": ask.tool.name, "arguments": ask.arguments}}
    return [
        {"role": "user", "content": ask.text},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": result},
        {"role": "assistant", "content": result},
    ]


def is_right_call(question: ToolQuestion, answer_text: str, call_format: CallFormat) -> bool:
    """True if the router reads the right call from the answer, and no other."""
    parser = AnswerFormat(call_format, schemas=schemas_of(question.tools_json)).parser(str)
    assert parser is not None
    parts = merged([*parser.push(answer_text), *parser.finish()])
    names = [part.name for part in parts if isinstance(part, CallStart)]
    if names != [question.name]:
        return False
    written = "".join(part.text for part in parts if isinstance(part, CallArguments))
    try:
        return bool(json.loads(written) == dict(question.arguments))
    except ValueError:
        return False
