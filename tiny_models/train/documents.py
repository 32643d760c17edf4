"""Training documents as text: recall tasks (raw and chat), stories, small talk. Pure: the random source decides.

A document is a sequence of segments, each marked with what the loss does with it. Recall documents mostly count their
answers only: with the loss on everything, models of this size do not learn to recall (0 to 2 of 80 right).
"""

import enum
import random
from collections.abc import Callable
from dataclasses import dataclass

from tiny_models.chat import ASSISTANT, END, Message, render_chat
from tiny_models.facts import Fact, draw_fact
from tiny_models.prose import story
from tiny_models.recall import ACKNOWLEDGEMENT, raw_question
from tiny_models.words import NAMES

Filler = Callable[[random.Random], str]

MIN_FACTS, MAX_FACTS = 2, 10
MAX_QUESTIONS = 8
FULL_LOSS_SHARE = 0.1
OPENERS = (
    "You are a helpful assistant.",
    "Please remember these facts.",
    "Here is what you need to know.",
    "Read this with care.",
)
SMALL_TALK = (
    ("Hello.", "Hello. Tell me some codes, and I will remember them."),
    ("Hello!", "Hello. Tell me some codes, and I will remember them."),
    ("Hi", "Hello. Tell me some codes, and I will remember them."),
    ("Who are you?", "I am a very small language model. I remember codes and tell little stories."),
    ("What can you do?", "I remember the codes that you tell me, and I tell little stories."),
    ("Thank you.", "You are welcome."),
    ("Goodbye.", "Goodbye. It was good to talk to you."),
)


class Loss(enum.IntEnum):
    """Treatment of a token by the loss."""

    IGNORED = 0
    ANSWER = 1
    TEXT = 2


@dataclass(frozen=True, slots=True)
class Segment:
    """Text whose tokens do not depend on its neighbours: it starts and ends where the tokenizer splits anyway."""

    text: str
    loss: Loss


Document = tuple[Segment, ...]


def recall_document(rng: random.Random, taken: set[str], filler: Filler, num_filler: int) -> Document:
    """2 to 10 facts amid `num_filler` sentences, then questions; avoids the subjects in `taken` and adds its own."""
    facts = [draw_fact(rng, taken) for _ in range(rng.randint(MIN_FACTS, MAX_FACTS))]
    sentences = _interleave(rng, [fact.statement for fact in facts], [filler(rng) for _ in range(num_filler)])
    asked = rng.sample(facts, k=min(len(facts), rng.randint(2, MAX_QUESTIONS)))
    make = _raw_recall if rng.random() < 0.5 else _chat_recall
    document = make(rng, sentences, asked, filler)
    if rng.random() < FULL_LOSS_SHARE:
        return tuple(Segment(s.text, s.loss or Loss.TEXT) for s in document)
    return document


def story_document(rng: random.Random) -> Document:
    """A story, told on request or just so."""
    if rng.random() < 0.3:
        return (Segment(story(rng), Loss.TEXT), Segment(END, Loss.TEXT))
    messages: list[Message] = []
    if rng.random() < 0.3:
        messages.append({"role": "system", "content": OPENERS[0]})
    if rng.random() < 0.4:
        messages += _small_talk(rng)
    return _chat_segments([*messages, *_story_turn(rng)], Loss.TEXT)


def _raw_recall(rng: random.Random, sentences: list[str], asked: list[Fact], filler: Filler) -> Document:
    segments = [Segment(sentences[0], Loss.IGNORED)]
    segments += [Segment(f" {sentence}", Loss.IGNORED) for sentence in sentences[1:]]
    for number, fact in enumerate(asked):
        if number and rng.random() < 0.1:
            segments.append(Segment(filler(rng), Loss.IGNORED))
            segments.append(Segment("\n", Loss.IGNORED))
        lead_in = raw_question(fact.question)
        segments.append(Segment(lead_in if number == 0 else lead_in.removeprefix("\n"), Loss.IGNORED))
        segments.append(Segment(f" {fact.statement}", Loss.ANSWER))
        segments.append(Segment("\n", Loss.ANSWER))
    return (*segments, Segment(END, Loss.IGNORED))


def _chat_recall(rng: random.Random, sentences: list[str], asked: list[Fact], filler: Filler) -> Document:
    if rng.random() < 0.5:
        sentences = [rng.choice(OPENERS), *sentences]
    text = " ".join(sentences)
    first_question: Message = {"role": "user", "content": asked[0].question}
    messages: list[Message]
    match rng.randrange(3):
        case 0:
            messages = [{"role": "system", "content": text}, first_question]
        case 1:
            messages = [*_told_in_turns(rng, sentences), first_question]
        case _:
            messages = [{"role": "user", "content": f"{text} {asked[0].question}"}]
    messages.append({"role": "assistant", "content": asked[0].statement})
    for fact in asked[1:]:
        messages += _interlude(rng)
        lead_in = f"{filler(rng)} " if rng.random() < 0.15 else ""
        messages.append({"role": "user", "content": lead_in + fact.question})
        messages.append({"role": "assistant", "content": fact.statement})
    return _chat_segments(messages, Loss.ANSWER)


def _told_in_turns(rng: random.Random, sentences: list[str]) -> list[Message]:
    """The sentences spread over one to three user messages, each acknowledged."""
    cuts = sorted(rng.sample(range(1, len(sentences)), k=rng.randint(0, min(2, len(sentences) - 1))))
    turns: list[Message] = []
    for start, end in zip([0, *cuts], [*cuts, len(sentences)], strict=True):
        turns.append({"role": "user", "content": " ".join(sentences[start:end])})
        turns.append({"role": "assistant", "content": ACKNOWLEDGEMENT})
    return turns


def _interlude(rng: random.Random) -> list[Message]:
    """Now and then something else happens between two questions."""
    kind = rng.random()
    if kind < 0.05:
        return _story_turn(rng)
    return _small_talk(rng) if kind < 0.12 else []


def _story_turn(rng: random.Random) -> list[Message]:
    hero = rng.choice(NAMES)
    request = rng.choice(("Tell me a story.", "Please tell me a story.", f"Tell me a story about {hero}."))
    return [{"role": "user", "content": request}, {"role": "assistant", "content": story(rng, hero)}]


def _small_talk(rng: random.Random) -> list[Message]:
    said, answer = rng.choice(SMALL_TALK)
    return [{"role": "user", "content": said}, {"role": "assistant", "content": answer}]


def _interleave(rng: random.Random, facts: list[str], filler: list[str]) -> list[str]:
    """Half of the time the facts come first, so that long distances are common; else anywhere."""
    if rng.random() < 0.5:
        return facts + filler
    mixed = facts + filler
    rng.shuffle(mixed)
    return mixed


def _chat_segments(messages: list[Message], loss: Loss) -> Document:
    """The chat as the template renders it; sentences apart, so that encoding them can be cached."""
    segments: list[Segment] = []
    for message in messages:
        if message["role"] == "assistant":
            segments.append(Segment(ASSISTANT, Loss.IGNORED))
            segments.append(Segment(message["content"], loss))
            segments.append(Segment(END, loss))
        else:
            segments.append(Segment(render_chat([message]), Loss.IGNORED))
    return tuple(segments)
