"""Training documents with tool calls and JSON answers, in the format of one family. Pure: the random source decides."""

import json
import random

from tiny_models.chat import ASSISTANT, END, SYSTEM, render_chat
from tiny_models.facts import draw_code_fact
from tiny_models.prose import filler_sentence
from tiny_models.tool_questions import MAX_TOOLS, MIN_TOOLS, SYSTEM_PROMPT
from tiny_models.tools import TOOLS, Ask, CallFormat, call_text, draw_ask, result_text, tools_text
from tiny_models.train.documents import OPENERS, SMALL_TALK, Document, Loss, Segment

NO_TOOL = "I have no tool for that."
MAX_TURNS = 4
JSON_SHARE = 0.2


def call_document(rng: random.Random, call_format: CallFormat, taken: set[str]) -> Document:
    """A chat with tools, or one whose answers are JSON; the latter avoids the subjects in `taken` and adds its own."""
    return _json_chat(rng, taken) if rng.random() < JSON_SHARE else _tool_chat(rng, call_format)


def _tool_chat(rng: random.Random, call_format: CallFormat) -> Document:
    """One to four turns: mostly a call and what became of it; now and then two calls, none that fits, or talk."""
    tools = rng.sample(TOOLS, k=rng.randint(MIN_TOOLS, MAX_TOOLS))
    others = [tool for tool in TOOLS if tool not in tools]
    opener = f"{rng.choice((SYSTEM_PROMPT, *OPENERS))}\n" if rng.random() < 0.4 else ""
    segments = [Segment(f"{SYSTEM}{opener}{tools_text(tools)}{END}", Loss.IGNORED)]
    for _ in range(rng.randint(1, MAX_TURNS)):
        kind = rng.random()
        if kind < 0.08:
            said, answer = rng.choice(SMALL_TALK)
            segments += _turn(said, answer)
        elif kind < 0.16:
            segments += _turn(draw_ask(rng, rng.choice(others), held_out=False).text, NO_TOOL)
        else:
            asks = [
                draw_ask(rng, tool, held_out=False) for tool in rng.sample(tools, k=2 if rng.random() < 0.15 else 1)
            ]
            segments += _called(rng, call_format, asks)
    return tuple(segments)


def _called(rng: random.Random, call_format: CallFormat, asks: list[Ask]) -> list[Segment]:
    """Question and calls; mostly their results as well, of which the last one is the answer."""
    calls = "\n".join(call_text(call_format, ask.tool.name, ask.arguments) for ask in asks)
    segments = _turn(" ".join(ask.text for ask in asks), calls)
    if rng.random() < 0.7:
        results = [filler_sentence(rng) for _ in asks]
        segments += [Segment(result_text(result), Loss.IGNORED) for result in results]
        segments += _answer(results[-1])
    return segments


def _json_chat(rng: random.Random, taken: set[str]) -> Document:
    """Codes, and questions for them that want JSON."""
    facts = [draw_code_fact(rng, taken, held_out=False) for _ in range(rng.randint(2, 5))]
    segments = [Segment(f"{SYSTEM}{' '.join(fact.statement for fact in facts)}{END}", Loss.IGNORED)]
    for fact in rng.sample(facts, k=rng.randint(1, len(facts))):
        document = json.dumps({"subject": fact.subject, "code": int(fact.detail)})
        segments += _turn(f"{fact.question} Answer with JSON.", document)
    return tuple(segments)


def _turn(said: str, answer: str) -> list[Segment]:
    return [Segment(render_chat([{"role": "user", "content": said}]), Loss.IGNORED), *_answer(answer)]


def _answer(text: str) -> list[Segment]:
    return [Segment(ASSISTANT, Loss.IGNORED), Segment(text, Loss.ANSWER), Segment(END, Loss.ANSWER)]
