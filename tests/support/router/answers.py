"""Answers of models in each format, with the parts that a parser must find in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from router.text.answer.answer_format import AnswerFormat
from router.text.answer.parts import AnswerPart, CallArguments, CallStart, ContentText, ReasoningText, merged

CITY: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
SCHEMAS = {
    "weather": CITY,
    "write": {
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "text": {"type": "string"},
            "mode": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "tags": {"type": "array"},
            "flag": {"type": "boolean"},
            "who": {"$ref": "#/$defs/Who"},
        },
        "$defs": {"Who": {"type": "object", "properties": {"name": {"type": "string"}}}},
    },
}


@dataclass(frozen=True)
class Sample:
    """An answer's text, its content, reasoning and calls (name and arguments) as a parser finds them."""

    form: str
    text: str
    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    begins_reasoning: bool = False


def parsed(sample: Sample, pieces: list[str], max_calls: int | None = None) -> list[AnswerPart]:
    """The parts of a text that comes in pieces, neighbours joined."""
    parser = AnswerFormat(sample.form, "think", sample.begins_reasoning, SCHEMAS, max_calls).parser("id{}".format)
    assert parser is not None
    parts = [part for piece in pieces for part in parser.push(piece)]
    return merged([*parts, *parser.finish()])


def as_sample(sample: Sample, parts: list[AnswerPart]) -> Sample:
    """The sample as these parts say it."""
    content = reasoning = ""
    calls: list[tuple[str, str]] = []
    for part in parts:
        match part:
            case ContentText(text):
                content += text
            case ReasoningText(text):
                reasoning += text
            case CallStart(index, _, name):
                assert index == len(calls)
                calls.append((name, ""))
            case CallArguments(index, text):
                assert index == len(calls) - 1 and text
                calls[index] = (calls[index][0], calls[index][1] + text)
    return Sample(sample.form, sample.text, content, reasoning, tuple(calls), sample.begins_reasoning)


PARIS = ("weather", '{"city": "Paris"}')
XML_PARIS = "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"
JSON_PARIS = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
KIMI_PARIS = '<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|>'

SAMPLES = [
    # ---------------- no calls, reasoning
    Sample("hermes", "Plain text.\n", "Plain text.\n"),
    Sample("hermes", " <think>\nHm.\n</think>\n\nYes.", "Yes.", "Hm."),
    Sample("hermes", "Hm.\n\nWell.\n</think>\n\nYes.\n", "Yes.\n", "Hm.\n\nWell.", begins_reasoning=True),
    Sample("hermes", "<think>\nHm.</think>", "", "Hm.", begins_reasoning=True),
    Sample("hermes", "Cut in th", "", "Cut in th", begins_reasoning=True),
    Sample("hermes", "A <think> later is text </think>", "A <think> later is text </think>"),
    # ---------------- qwen3_coder
    Sample("qwen3_coder", XML_PARIS, calls=(PARIS,)),
    Sample("qwen3_coder", f"I look.\n\n{XML_PARIS}\n{XML_PARIS}\n", "I look.", calls=(PARIS, PARIS)),
    Sample("qwen3_coder", f"I look{XML_PARIS}Done.", "I lookDone.", calls=(PARIS,)),
    Sample("qwen3_coder", f"Hm.\n</think>\n\n{XML_PARIS}", "", "Hm.", (PARIS,), begins_reasoning=True),
    Sample("qwen3_coder", f"A <tool_call> in thought {XML_PARIS}", "", "A <tool_call> in thought", (PARIS,), True),
    Sample("qwen3_coder", XML_PARIS.removeprefix("<tool_call>\n"), calls=(PARIS,)),
    Sample("qwen3_coder", "<tool_call>\n<function=now>\n</function>\n</tool_call>", calls=(("now", "{}"),)),
    Sample(
        "qwen3_coder",
        '<tool_call>\n<function=write>\n<parameter=path>\na "b"\\c.py\n</parameter>\n<parameter=text>\n\nif x < 3:\n'
        "    f('</tool_call>')\n\n</parameter>\n<parameter=mode>\n7\n</parameter>\n<parameter=tags>\n[1, \"x\"]\n"
        "</parameter>\n<parameter=flag>\nTrue\n</parameter>\n<parameter=who>\n{'name': 'é'}\n</parameter>\n"
        "<parameter=more>\n5\n</parameter>\n</function>\n</tool_call>",
        calls=(
            (
                "write",
                '{"path": "a \\"b\\"\\\\c.py", "text": "\\nif x < 3:\\n    f(\'</tool_call>\')\\n", "mode": 7, '
                '"tags": [1, "x"], "flag": true, "who": {"name": "é"}, "more": "5"}',
            ),
        ),
    ),
    Sample("qwen3_coder", XML_PARIS.replace("</parameter>\n", ""), calls=(PARIS,)),
    Sample("qwen3_coder", XML_PARIS.replace("city", "days"), calls=(("weather", '{"days": "Paris"}'),)),
    Sample("qwen3_coder", XML_PARIS[: XML_PARIS.index("ris")], calls=(("weather", '{"city": "Pa'),)),
    Sample("qwen3_coder", "<tool_call> is a tag, <function=a b", "<tool_call> is a tag, <function=a b"),
    # ---------------- hermes
    Sample("hermes", JSON_PARIS, calls=(PARIS,)),
    Sample("hermes", f"I look.\n{JSON_PARIS}\n{JSON_PARIS}", "I look.", calls=(PARIS, PARIS)),
    Sample("hermes", f"Hm {JSON_PARIS}", "", "Hm", (PARIS,), begins_reasoning=True),
    Sample("hermes", JSON_PARIS[:-12], calls=(PARIS,)),
    Sample("hermes", JSON_PARIS.replace("}}", "}"), calls=(PARIS,)),
    Sample("hermes", JSON_PARIS.replace("}}", "}}}"), calls=(PARIS,)),
    Sample("hermes", JSON_PARIS.replace("Paris", "</tool_call>"), calls=(("weather", '{"city": "</tool_call>"}'),)),
    Sample("hermes", JSON_PARIS.replace('Paris"', "Paris"), calls=(("weather", '{"city": "Paris}}\n'),)),
    Sample("hermes", JSON_PARIS.replace('"}}', '"'), calls=(("weather", '{"city": "Paris"\n'),)),
    Sample("hermes", '<tool_call>{"name": "now"}</tool_call>', calls=(("now", "{}"),)),
    Sample("hermes", '<tool_call>{"arguments": {"city": "Paris"}, "id": 3, "name": "weather"}', calls=(PARIS,)),
    Sample("hermes", '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Paris\\"}"}', calls=(PARIS,)),
    Sample("hermes", '<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>'),
    Sample("hermes", "Use <tool_call>, then </tool_call>.", "Use <tool_call>, then </tool_call>."),
    Sample("hermes", "<tool_call>", "<tool_call>"),
    # ---------------- granite and nemotron
    Sample("granite", '<|tool_call|>[{"name": "weather", "arguments": {"city": "Paris"}}]', calls=(PARIS,)),
    Sample(
        "granite",
        '<|tool_call|> [{"name": "weather", "arguments": {"city": "Paris"}}, {"arguments": {}, "name": "now"}] Done.',
        "Done.",
        calls=(PARIS, ("now", "{}")),
    ),
    Sample("granite", JSON_PARIS, calls=(PARIS,)),
    Sample(
        "nemotron",
        '<TOOLCALL>[{"name": "weather", "arguments": {"city": "Paris"}}, '
        '{"name": "weather", "arguments": {"city": "Paris"}}]</TOOLCALL>',
        calls=(PARIS, PARIS),
    ),
    Sample("nemotron", "<TOOLCALL>[]</TOOLCALL>", "<TOOLCALL>[]</TOOLCALL>"),
    # ---------------- lfm2
    Sample("lfm2", '<|tool_call_start|>[weather(city="Paris")]<|tool_call_end|>', calls=(PARIS,)),
    Sample(
        "lfm2",
        "I look. <|tool_call_start|>[weather(city='Paris'), now(), write(path='it\\'s \"x\"', "
        "tags=[1, 'a', (True, None)],"
        " who={'name': \"\"}, text='''a\nb''', mode=-07)]<|tool_call_end|>\nDone.",
        "I look.Done.",
        calls=(
            PARIS,
            ("now", "{}"),
            (
                "write",
                '{"path": "it\'s \\"x\\"", "tags": [1, "a", [true, null]], "who": {"name": ""}, "text": "a\\nb", '
                '"mode": -07}',
            ),
        ),
    ),
    Sample("lfm2", '<|tool_call_start|>[{"name": "weather", "arguments": {"city": "Paris"}}]', calls=(PARIS,)),
    Sample("lfm2", "<|tool_call_start|>[weather('Paris')]", calls=(("weather", "{'Paris')]"),)),
    Sample("lfm2", "<|tool_call_start|>[weather(city='Par", calls=(("weather", '{"city": "Par'),)),
    Sample("lfm2", "<|tool_call_start|>none<|tool_call_end|>", "<|tool_call_start|>none<|tool_call_end|>"),
    # ---------------- kimi
    Sample(
        "kimi",
        f"I look.<|tool_calls_section_begin|>{KIMI_PARIS}{KIMI_PARIS}<|tool_calls_section_end|>",
        "I look.",
        calls=(PARIS, PARIS),
    ),
    Sample("kimi", f"Hm<|tool_calls_section_begin|>{KIMI_PARIS}", "", "Hm", (PARIS,), begins_reasoning=True),
    Sample("kimi", "<|tool_calls_section_begin|>nothing", "<|tool_calls_section_begin|>nothing"),
]
