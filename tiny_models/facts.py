"""Facts that a prompt states once and a question asks for later.

A model without memory cannot guess them: the code is three random digits, and the same subject carries another
code in every document. One in ten pairs of subject and code is held out: training never states such a pair, and
the held-out questions state no other.
"""

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass

from tiny_models.words import COLOURS, NAMES, OBJECTS, PLACES

HELD_OUT_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Fact:
    """One sentence, the question that asks for it, and the part of it that a right answer must contain.

    The answer repeats the statement word for word: small models learn to copy a sentence sooner than to extract
    from it.
    """

    subject: str
    detail: str
    statement: str
    question: str


def is_held_out(subject: str, detail: str) -> bool:
    """True if training must never state this pair."""
    digest = hashlib.blake2b(f"{subject}|{detail}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") < HELD_OUT_SHARE * 2**32


def code_fact(rng: random.Random, subject: str, num_digits: int = 3) -> Fact:
    code = str(rng.randint(10 ** (num_digits - 1), 10**num_digits - 1))
    question = f"What is the code of {subject}?"
    return Fact(subject, code, f"The code of {subject} is {code}.", question)


def possession_fact(rng: random.Random, name: str) -> Fact:
    thing = f"{rng.choice(COLOURS)} {rng.choice(OBJECTS)}"
    return Fact(name, thing, f"{name} has the {thing}.", f"What does {name} have?")


def home_fact(rng: random.Random, name: str) -> Fact:
    place = rng.choice(PLACES)
    return Fact(name, place, f"{name} lives near the {place}.", f"Where does {name} live?")


def draw_subject(rng: random.Random) -> str:
    """A person, a place or a coloured thing."""
    kind = rng.random()
    if kind < 0.5:
        return rng.choice(NAMES)
    if kind < 0.7:
        return f"the {rng.choice(PLACES)}"
    return f"the {rng.choice(COLOURS)} {rng.choice(OBJECTS)}"


def invent_name(rng: random.Random) -> str:
    """A name of two or three syllables, so that models learn to copy names they never saw."""
    syllables = (rng.choice("bdfghjklmnprstvwz") + rng.choice("aeiou") for _ in range(rng.randint(2, 3)))
    return ("".join(syllables) + rng.choice(("", "n", "r", "s", "l", "t"))).capitalize()


def draw_open_fact(rng: random.Random, taken: set[str], *, held_out: bool) -> Fact:
    """As draw_code_fact, with an invented name and a code of 2 to 5 digits."""
    return _draw(rng, taken, held_out, lambda: code_fact(rng, invent_name(rng), rng.randint(2, 5)))


def draw_code_fact(rng: random.Random, taken: set[str], *, held_out: bool) -> Fact:
    """A code fact from one side of the split, about a subject not yet in `taken`; adds the subject to it."""
    return _draw(rng, taken, held_out, lambda: code_fact(rng, draw_subject(rng)))


def draw_fact(rng: random.Random, taken: set[str]) -> Fact:
    """A training fact of any kind, most of them codes; `taken` as above."""
    kind = rng.random()
    if kind < 0.5:
        return draw_code_fact(rng, taken, held_out=False)
    if kind < 0.75:
        return draw_open_fact(rng, taken, held_out=False)
    make = possession_fact if kind < 0.88 else home_fact
    return _draw(rng, taken, False, lambda: make(rng, rng.choice(NAMES)))


def _draw(rng: random.Random, taken: set[str], held_out: bool, make: Callable[[], Fact]) -> Fact:
    while True:
        fact = make()
        if fact.subject not in taken and is_held_out(fact.subject, fact.detail) == held_out:
            taken.add(fact.subject)
            return fact
