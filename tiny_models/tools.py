"""The tools that the tiny models call: their names, what is asked of them, and how each family writes a call. Pure.

As with codes, one in ten combinations of a tool and its arguments is held out: training never asks for it, and the
held-out questions ask for no other. Half of the persons have invented names, so that arguments have to be copied.
"""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tiny_models.chat import ASSISTANT, END, SYSTEM, USER
from tiny_models.facts import invent_name, is_held_out
from tiny_models.words import ANIMALS, COLOURS, NAMES, OBJECTS, PLACES

CallFormat = Literal["qwen3_coder", "hermes"]
"""As `router.tool_format` names them."""
FORMAT_OF_MODEL: Mapping[str, CallFormat] = {"qwen3_5_text": "qwen3_coder", "granitemoehybrid": "hermes"}
"""By `model_type`: Qwen3.5's, and that of Granite 4."""
Arguments = Mapping[str, str | int]


@dataclass(frozen=True)
class Tool:
    """A function, its parameters' JSON types, and sentences that ask for it, with `{parameter}` in them."""

    name: str
    description: str
    parameters: Mapping[str, Literal["string", "integer"]]
    asked: Sequence[str]

    @property
    def as_json(self) -> dict[str, Any]:
        """The tool as a client of OpenAI's API sends it."""
        properties = {name: {"type": kind} for name, kind in self.parameters.items()}
        parameters = {"type": "object", "properties": properties, "required": list(properties)}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


def _tool(name: str, description: str, *asked: str, **parameters: Literal["string", "integer"]) -> Tool:
    return Tool(name, description, parameters, asked)


TOOLS = (
    _tool("find", "Finds a person.", "Where is {person} now?", "Find {person} for me.", person="string"),
    _tool("weather", "The weather at a place.", "How is the weather at the {place}?", place="string"),
    _tool("open_door", "Opens a door.", "Open the door of the {place}.", place="string"),
    _tool("send", "Sends a thing.", "Send the {thing} to {person}.", person="string", thing="string"),
    _tool("ring", "Rings a person.", "Ring {person} at {hour}.", person="string", hour="integer"),
    _tool("order", "Orders things.", "Order the {thing}, {count} of them.", thing="string", count="integer"),
    _tool("add", "Adds two numbers.", "What is {a} plus {b}?", "Add {a} and {b}.", a="integer", b="integer"),
    _tool("set_code", "Sets a code.", "Set the code of {person} to {code}.", person="string", code="integer"),
    _tool("feed", "Feeds an animal.", "Feed the {animal} at the {place}.", animal="string", place="string"),
    _tool("paint", "Paints a thing.", "Paint the {thing} {colour}.", thing="string", colour="string"),
    _tool("read_letter", "Reads a letter.", "Read me the letter of {person}.", person="string"),
    _tool("play_song", "Plays a song.", "Play the song of the {animal}.", animal="string"),
)
_WORDS = (*ANIMALS, *COLOURS, *NAMES, *OBJECTS, *PLACES)
_DRAW: Mapping[str, Callable[[random.Random], str | int]] = {
    "person": lambda rng: invent_name(rng) if rng.random() < 0.5 else rng.choice(NAMES),
    "place": lambda rng: rng.choice(PLACES),
    "thing": lambda rng: f"{rng.choice(COLOURS)} {rng.choice(OBJECTS)}",
    "animal": lambda rng: rng.choice(ANIMALS),
    "colour": lambda rng: rng.choice(COLOURS),
    "hour": lambda rng: rng.randint(1, 23),
    "count": lambda rng: rng.randint(2, 99),
    "a": lambda rng: rng.randint(1, 999),
    "b": lambda rng: rng.randint(1, 999),
    "code": lambda rng: rng.randint(100, 999),
}


_ODD_WORD_SHARE = 1 / 3


def _any_word(rng: random.Random, value: str | int) -> str | int:
    """Mostly `value`; some texts become another word."""
    if isinstance(value, int) or rng.random() >= _ODD_WORD_SHARE:
        return value
    return invent_name(rng).lower() if rng.random() < 0.5 else rng.choice(_WORDS)


@dataclass(frozen=True)
class Ask:
    """A sentence, and the call that answers it."""

    text: str
    tool: Tool
    arguments: Arguments


def draw_ask(rng: random.Random, tool: Tool, *, held_out: bool) -> Ask:
    """A sentence that asks for this tool, from one side of the split.

    In training one text in three is a word of another kind, or an invented one. Else a tool's arguments were a list to
    learn by heart, in which the held-out ones are missing: `{"animal": "dog"}` whenever a lamb is asked for.
    """
    while True:
        arguments = {name: _DRAW[name](rng) for name in tool.parameters}
        if not held_out:
            arguments = {name: _any_word(rng, value) for name, value in arguments.items()}
        if is_held_out(tool.name, json.dumps(arguments)) == held_out:
            return Ask(rng.choice(tool.asked).format(**arguments), tool, arguments)


def tools_text(tools: Sequence[Tool]) -> str:
    """The system prompt's lines about tools."""
    lines = (f"{tool.name}({', '.join(f'{name}: {kind}' for name, kind in tool.parameters.items())})" for tool in tools)
    return "\n".join(["Tools:", *lines])


def call_text(call_format: CallFormat, name: str, arguments: Arguments) -> str:
    """One call as a model of the family writes it."""
    if call_format == "hermes":
        inner = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    else:
        parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
        inner = f"<function={name}>\n{parameters}</function>"
    return f"<tool_call>\n{inner}\n</tool_call>"


def result_text(content: str) -> str:
    """The turn that has a tool's result."""
    return f"{USER}<tool_response>\n{content}\n</tool_response>{END}"


_CALLS: Mapping[CallFormat, str] = {
    "hermes": "{{- '{\"name\": ' ~ call.name | tojson ~ ', \"arguments\": ' ~ call.arguments | tojson ~ '}' -}}",
    "qwen3_coder": (
        "{{- '<function=' ~ call.name ~ '>\\n' -}}"
        "{%- for key, value in call.arguments.items() -%}"
        "{{- '<parameter=' ~ key ~ '>\\n' ~ (value if value is string else value | tojson) ~ '\\n</parameter>\\n' -}}"
        "{%- endfor -%}"
        "{{- '</function>' -}}"
    ),
}


def chat_template(call_format: CallFormat) -> str:
    """The chat template of a family with tools: without any, it renders as `tiny_models.chat.CHAT_TEMPLATE`."""
    return (
        "{%- set rest = messages -%}"
        "{%- if tools -%}"
        f"{{{{- '{SYSTEM}' -}}}}"
        "{%- if messages[0]['role'] == 'system' -%}"
        "{{- messages[0]['content'] ~ '\\n' -}}{%- set rest = messages[1:] -%}"
        "{%- endif -%}"
        "{{- 'Tools:' -}}"
        "{%- for tool in tools -%}"
        "{{- '\\n' ~ tool.function.name ~ '(' -}}"
        "{%- for key, value in (tool.function.parameters.properties or {}).items() -%}"
        "{{- key ~ ': ' ~ value.type ~ (', ' if not loop.last else '') -}}"
        "{%- endfor -%}"
        "{{- ')' -}}"
        "{%- endfor -%}"
        f"{{{{- '{END}' -}}}}"
        "{%- endif -%}"
        "{%- for message in rest -%}"
        "{%- if message['role'] == 'tool' -%}"
        f"{{{{- '{USER}<tool_response>\\n' ~ message['content'] ~ '\\n</tool_response>{END}' -}}}}"
        "{%- elif message['role'] in ['system', 'user', 'assistant'] -%}"
        "{{- '<|' ~ message['role'] ~ '|>' ~ (message['content'] or '') -}}"
        "{%- for tool_call in message['tool_calls'] or [] -%}"
        "{%- set call = tool_call.function -%}"
        "{{- '\\n' if not loop.first or message['content'] -}}"
        "{{- '<tool_call>\\n' -}}" + _CALLS[call_format] + "{{- '\\n</tool_call>' -}}"
        "{%- endfor -%}"
        f"{{{{- '{END}' -}}}}"
        "{%- else -%}"
        "{{- raise_exception('unknown role ' ~ message['role'] ~ ': use system, user, assistant or tool') -}}"
        "{%- endif -%}"
        "{%- endfor -%}"
        f"{{%- if add_generation_prompt -%}}{{{{- '{ASSISTANT}' -}}}}{{%- endif -%}}"
    )
