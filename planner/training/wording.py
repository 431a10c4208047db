"""Sentences of synthetic job steps: LIBERO's ten, everyday wordings, invented words.

Some verbs, objects and places never occur in training; the gate reports them apart.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from string import ascii_lowercase

LIBERO_SENTENCES = (
    "open the middle drawer of the cabinet",
    "put the bowl on the stove",
    "put the wine bottle on top of the cabinet",
    "open the top drawer and put the bowl inside",
    "put the bowl on top of the cabinet",
    "push the plate to the front of the stove",
    "put the cream cheese in the bowl",
    "turn on the stove",
    "put the bowl on the plate",
    "put the wine bottle on the rack",
)

Wording = Callable[[Random], str]

_VERBS = [
    "put",
    "push",
    "move",
    "place",
    "open",
    "close",
    "turn",
    "lift",
    "pick",
    "slide",
    "carry",
    "hand",
    "press",
    "stack",
    "set",
    "bring",
    "take",
    "drop",
    "store",
    "hang",
    "insert",
    "load",
    "sort",
    "wipe",
    "fold",
    "rotate",
    "tilt",
]
_OBJECTS = [
    "bowl",
    "plate",
    "mug",
    "bottle",
    "box",
    "cube",
    "can",
    "spoon",
    "book",
    "basket",
    "drawer",
    "tray",
    "pan",
    "kettle",
    "lamp",
    "lid",
    "cup",
    "jar",
    "towel",
    "cheese",
    "cream",
    "block",
    "knife",
    "fork",
    "carton",
    "sponge",
    "glass",
    "bread",
    "apple",
    "phone",
    "pen",
    "ball",
    "door",
    "switch",
]
_PLACES = [
    "stove",
    "rack",
    "cabinet",
    "shelf",
    "table",
    "plate",
    "sink",
    "oven",
    "counter",
    "drawer",
    "tray",
    "box",
    "bin",
    "desk",
    "mat",
    "stand",
    "cart",
    "bench",
    "corner",
    "microwave",
    "fridge",
]
_RELATIONS = [
    "on the",
    "in the",
    "next to the",
    "on top of the",
    "behind the",
    "under the",
    "to the front of the",
    "to the left of the",
    "to the right of the",
    "inside the",
    "near the",
    "onto the",
    "into the",
    "from the",
    "between the plate and the",
]
_ADJECTIVES = [
    "red",
    "blue",
    "small",
    "large",
    "black",
    "white",
    "top",
    "middle",
    "bottom",
    "front",
    "wooden",
    "metal",
    "green",
    "left",
    "right",
    "yellow",
    "empty",
    "full",
    "wine",
    "round",
]
_TAILS = ("and close it", "and put the bowl inside", "slowly", "again", "with care", "and let go")

_HELD_OUT_VERBS = ["shove", "fetch", "nudge", "lower", "hoist", "flip"]
_HELD_OUT_OBJECTS = ["teapot", "ladle", "napkin", "funnel", "skillet", "candle"]
_HELD_OUT_PLACES = ["windowsill", "trolley", "dresser", "hob", "pantry", "crate"]
_HELD_OUT_ADJECTIVES = ["purple", "narrow", "upper", "ceramic"]

_CONSONANTS, _VOWELS, _CODAS = "bcdfghjklmnprstvwxyz", "aeiou", "nrstlmdk"


def invented_word(rng: Random) -> str:
    """A word of no language: half of them syllables, half any letters, so that every token occurs."""
    if rng.random() < 0.5:
        return "".join(rng.choice(ascii_lowercase) for _ in range(rng.randint(1, 9)))
    return "".join(
        rng.choice(_CONSONANTS) + rng.choice(_VOWELS) + (rng.choice(_CODAS) if rng.random() < 0.3 else "")
        for _ in range(rng.choice((1, 2, 2, 3, 4)))
    )


def everyday_sentence(rng: Random) -> str:
    """Verb, object, mostly a place; a word in eight is an invented one."""

    def noun(words: list[str]) -> str:
        word = invented_word(rng) if rng.random() < 0.12 else rng.choice(words)
        return f"{rng.choice(_ADJECTIVES)} {word}" if rng.random() < 0.3 else word

    sentence = f"{rng.choice(_VERBS)} the {noun(_OBJECTS)}"
    if rng.random() < 0.85:
        sentence += f" {rng.choice(_RELATIONS)} {noun(_PLACES)}"
    if rng.random() < 0.1:
        sentence += f" {rng.choice(_TAILS)}"
    return sentence


def invented_sentence(rng: Random) -> str:
    """One to eight words, most of them invented; sometimes a number, a capital or a hyphen."""
    words = [
        invented_word(rng) if rng.random() < 0.75 else rng.choice(_OBJECTS) for _ in range(rng.randint(1, 8))
    ]
    if rng.random() < 0.15:
        words[rng.randrange(len(words))] = str(rng.randint(0, 120))
    if rng.random() < 0.1:
        words[0] = words[0].capitalize()
    if rng.random() < 0.1:
        words.append(f"{invented_word(rng)}-{invented_word(rng)}")
    return " ".join(words)


def libero_sentence(rng: Random) -> str:
    """One of LIBERO-Goal's ten."""
    return rng.choice(LIBERO_SENTENCES)


def any_sentence(rng: Random) -> str:
    """The training mixture."""
    kind = rng.choices((libero_sentence, everyday_sentence, invented_sentence), (0.2, 0.4, 0.4))[0]
    return kind(rng)


def held_out_sentence(rng: Random) -> str:
    """A sentence whose verb, object and place do not occur in training."""

    def noun(words: list[str]) -> str:
        word = rng.choice(words)
        return f"{rng.choice(_HELD_OUT_ADJECTIVES)} {word}" if rng.random() < 0.3 else word

    sentence = f"{rng.choice(_HELD_OUT_VERBS)} the {noun(_HELD_OUT_OBJECTS)}"
    return f"{sentence} {rng.choice(_RELATIONS)} {noun(_HELD_OUT_PLACES)}"
