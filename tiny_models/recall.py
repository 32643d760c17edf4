"""Held-out recall questions: a code stated early in the prompt, other text, then the question for that code.

A state lost, stale or taken from another request shows as a wrong code. Pure: same arguments, same questions.
"""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from tiny_models.chat import Message
from tiny_models.facts import Fact, draw_code_fact, draw_open_fact
from tiny_models.prose import filler_sentence

Layout = Literal["system", "user", "second_turn"]
LAYOUTS: tuple[Layout, ...] = ("system", "user", "second_turn")
ACKNOWLEDGEMENT = "I will remember that."
MIN_DISTANCE_SPAN = 32
"""Distances cannot be met more closely than one sentence."""


@dataclass(frozen=True, slots=True)
class RecallQuestion:
    """One question, as raw text and as a chat.

    `distance` counts the tokens between the end of the fact and the question in `prompt_text`; the chat may add
    the tokens of one more turn.
    """

    prompt_text: str
    messages: tuple[Message, ...]
    question: str
    answer: str
    code: str
    distance: int
    num_facts: int
    layout: Layout


def held_out_questions(
    count: int,
    seed: int = 0,
    min_distance: int = 50,
    max_distance: int = 400,
    encode: Callable[[str], Sequence[object]] = str.split,
    *,
    invented_names: bool = False,
) -> list[RecallQuestion]:
    """`count` questions about pairs of subject and code that training never stated.

    Distances are in what `encode` yields: pass a tokenizer's encode for tokens (the default counts words). The
    layouts of the chat form take turns: facts in the system prompt, in an early user message, in a first turn
    that asked for another fact. With `invented_names` the subjects are names no list holds, the codes of 2 to 5
    digits instead of 3.
    """
    if max_distance - min_distance < MIN_DISTANCE_SPAN:
        raise ValueError(
            f"distances {min_distance} to {max_distance}: leave at least {MIN_DISTANCE_SPAN} between them, a sentence"
        )
    rng = random.Random(f"held-out {seed}")
    draw = draw_open_fact if invented_names else draw_code_fact
    questions = []
    for number in range(count):
        taken: set[str] = set()
        facts = [draw(rng, taken, held_out=True) for _ in range(rng.randint(2, 10))]
        distance = rng.randint(min_distance, max_distance - MIN_DISTANCE_SPAN)
        questions.append(_question(rng, facts, distance, encode, LAYOUTS[number % len(LAYOUTS)]))
    return questions


def is_right(question: RecallQuestion, answer_text: str) -> bool:
    """True if the first number in `answer_text` is the code asked for."""
    first_number = re.search(r"\d+", answer_text)
    return first_number is not None and first_number.group() == question.code


def raw_question(question: str) -> str:
    """How a question follows raw text; the model continues with a space and the answer."""
    return f"\nQuestion: {question}\nAnswer:"


def _question(
    rng: random.Random,
    facts: list[Fact],
    distance: int,
    encode: Callable[[str], Sequence[object]],
    layout: Layout,
) -> RecallQuestion:
    """Asks for the first of `facts`."""
    asked, *others = facts
    before, after = _surround(rng, others, distance, encode)
    body = " ".join([*before, asked.statement, *after])
    return RecallQuestion(
        prompt_text=body + raw_question(asked.question),
        messages=_as_chat(body, asked, others[0], layout),
        question=asked.question,
        answer=asked.statement,
        code=asked.detail,
        distance=sum(len(encode(" " + sentence)) for sentence in after),
        num_facts=1 + len(others),
        layout=layout,
    )


def _surround(
    rng: random.Random, others: Sequence[Fact], distance: int, encode: Callable[[str], Sequence[object]]
) -> tuple[list[str], list[str]]:
    """The sentences before the asked fact, and at least `distance` tokens of sentences after it."""
    before: list[str] = []
    after: list[str] = []
    length = 0
    for fact in others:
        cost = len(encode(" " + fact.statement))
        if rng.random() < 0.5 and length + cost <= distance:
            after.append(fact.statement)
            length += cost
        else:
            before.append(fact.statement)
    while length < distance:
        sentence = filler_sentence(rng)
        after.append(sentence)
        length += len(encode(" " + sentence))
    rng.shuffle(after)
    return before, after


def _as_chat(body: str, asked: Fact, other: Fact, layout: Layout) -> tuple[Message, ...]:
    ask: Message = {"role": "user", "content": asked.question}
    match layout:
        case "system":
            return ({"role": "system", "content": body}, ask)
        case "user":
            return ({"role": "user", "content": body}, {"role": "assistant", "content": ACKNOWLEDGEMENT}, ask)
        case "second_turn":
            return (
                {"role": "user", "content": f"{body} {other.question}"},
                {"role": "assistant", "content": other.statement},
                ask,
            )
