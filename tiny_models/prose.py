"""Sentences that state no fact anyone asks for, and little stories, all made from templates."""

import random

from tiny_models.words import ANIMALS, COLOURS, NAMES, OBJECTS, PLACES

_WEATHER = (
    "The wind was soft",
    "The rain fell slowly",
    "The sun was warm",
    "The snow lay deep",
    "The fog was thick",
    "The moon was bright",
    "The clouds were low",
    "The night was quiet",
    "The morning was cold",
)
_WHERE = (
    "by the river",
    "on the hill",
    "near the old wall",
    "behind the house",
    "along the road",
    "under the trees",
    "at the end of the lane",
    "across the field",
    "beside the lake",
    "in the narrow street",
)
_WHEN = (
    "in the morning",
    "at noon",
    "in the evening",
    "before dinner",
    "after the storm",
    "every Sunday",
    "late at night",
    "in early spring",
    "all summer long",
    "on a winter day",
)
_CROWD = (
    "The children",
    "Two old men",
    "The farmers",
    "The neighbours",
    "Some travellers",
    "The sailors",
    "A few birds",
    "The bakers",
    "Three tired soldiers",
    "The teachers",
)
_DID = (
    "sang a quiet song",
    "waited for the train",
    "talked about the weather",
    "carried bread and milk home",
    "watched the boats go by",
    "slept until it was light",
    "laughed at a small joke",
    "looked for dry wood",
    "walked slowly and said nothing",
    "played with a wooden hoop",
    "counted the stars",
    "drank hot tea",
)
_THOUGHT = (
    "Nobody knew what time it was",
    "It was good to be outside",
    "There was nothing else to do",
    "Everyone agreed that it was late",
    "The soup was still warm",
    "The old clock had stopped again",
    "A letter came but nobody read it",
    "The road was long and dusty",
    "Dinner was ready at last",
)

_GOAL = (
    "wanted to see the sea",
    "had lost the way home",
    "was looking for a friend",
    "wished for a warm place to sleep",
    "wanted to learn a new song",
    "was curious about the dark wood",
)
_FEELING = ("happy", "tired", "brave", "a little afraid", "very hungry", "full of hope")
_LESSON = (
    "a kind word costs nothing",
    "small friends can be great friends",
    "it is wise to ask for help",
    "patience opens many doors",
    "home is where someone waits for you",
    "the long road is sometimes the best",
)


def filler_sentence(rng: random.Random) -> str:
    """One sentence of about 8 to 18 tokens that holds no code and no subject of a code."""
    kind = rng.randrange(5)
    if kind == 0:
        return f"{rng.choice(_WEATHER)} {rng.choice(_WHERE)}."
    if kind == 1:
        return f"{rng.choice(_CROWD)} {rng.choice(_DID)} {rng.choice(_WHEN)}."
    if kind == 2:
        return f"{rng.choice(_CROWD)} {rng.choice(_DID)} {rng.choice(_WHERE)}."
    if kind == 3:
        return f"{rng.choice(_THOUGHT)}."
    return f"{rng.choice(_WEATHER)}, and {_lower(rng.choice(_CROWD))} {rng.choice(_DID)}."


def story(rng: random.Random, hero: str | None = None) -> str:
    """A little story of six to eight sentences in which one hero, one animal and one thing stay the same."""
    hero = hero or rng.choice(NAMES)
    animal = rng.choice(ANIMALS)
    thing = f"{rng.choice(COLOURS)} {rng.choice(OBJECTS)}"
    place = rng.choice(PLACES)
    feeling = rng.choice(_FEELING)
    opening = rng.choice((f"Once upon a time, {hero} lived near the {place}.", f"One day, {hero} left the {place}."))
    meeting = rng.choice(
        (
            f"On the way, {hero} met a {animal} with a {thing}.",
            f"There {hero} found a {thing}, and a {animal} sat beside it.",
        )
    )
    talk = rng.choice(
        (
            f'"Take the {thing}," said the {animal}, "and follow me."',
            f'"Who are you?" asked the {animal}. "I am {hero}," was the answer.',
            f'"This {thing} is mine," said the {animal}, "but you may have it."',
        )
    )
    sentences = [
        opening,
        f"{hero} {rng.choice(_GOAL)}.",
        f"{rng.choice(_WEATHER)} {rng.choice(_WHERE)}.",
        meeting,
        talk,
        f"So {hero} and the {animal} went on together, and {hero} was {feeling}.",
        f"In the end they came back to the {place} with the {thing}.",
        f"And {hero} learned that {rng.choice(_LESSON)}.",
    ]
    if rng.random() < 0.4:
        del sentences[2]
    return " ".join(sentences)


def _lower(phrase: str) -> str:
    return phrase[0].lower() + phrase[1:]
