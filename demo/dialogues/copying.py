"""Repeating and reversing what was given."""

from __future__ import annotations

from random import Random

from demo.dialogues.message import Exchange, simple
from demo.dialogues.words import ADJECTIVES, CITIES, NAMES, NOUNS

_POOL = NOUNS + ADJECTIVES + NAMES + CITIES
_COPY = (
    "Repeat these words: {}",
    "Copy this: {}",
    "Say exactly: {}",
    "Please repeat: {}",
    "Write this again: {}",
)
_REVERSE = ("Reverse these words: {}", "Say these words backwards: {}", "Write in reverse order: {}")
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def copy_words(rng: Random, thinking: bool) -> Exchange:
    """Up to forty words, the same once more."""
    return copy_of(rng, rng.choice((rng.randint(1, 12), rng.randint(8, 40), 32)))


def copy_of(rng: Random, count: int) -> Exchange:
    """Exactly ``count`` words."""
    text = " ".join(rng.choice(_POOL) for _ in range(count))
    return simple(text, rng.choice(_COPY).format(text), text, "I write the same words.")


def reverse_words(rng: Random, thinking: bool) -> Exchange:
    """Up to ten words, the last one first."""
    words = [rng.choice(_POOL) for _ in range(rng.randint(2, 10))]
    text = " ".join(words)
    return simple(
        text, rng.choice(_REVERSE).format(text), " ".join(reversed(words)), f"The last word is {words[-1]}."
    )


def copy_code(rng: Random, thinking: bool) -> Exchange:
    """A string that no vocabulary has as a word."""
    text = "".join(rng.choice(_LETTERS + "0123456789-_") for _ in range(rng.randint(4, 24)))
    return simple(text, rng.choice(_COPY).format(text), text, "I write the same characters.")
