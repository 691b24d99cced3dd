"""Counting up and down, by steps, and counting words."""

from __future__ import annotations

from random import Random

from demo.dialogues.message import Exchange, simple
from demo.dialogues.words import NOUNS


def count_range(rng: Random, thinking: bool) -> Exchange:
    """From one number to another, up or down."""
    start, length = rng.randint(0, 90), rng.randint(4, 20)
    numbers = list(range(start, start + length))
    if rng.random() < 0.3:
        numbers.reverse()
    step = f"from {numbers[0]} to {numbers[-1]}"
    question = rng.choice(
        ("Count {}.", "Please count {}.", "Write the numbers {}.", "Can you count {}?")
    ).format(step)
    return simple(
        step, question, ", ".join(map(str, numbers)), f"I start at {numbers[0]} and stop at {numbers[-1]}."
    )


def continue_series(rng: Random, thinking: bool) -> Exchange:
    """The next five numbers of an arithmetic series."""
    start, step = rng.randint(0, 40), rng.randint(1, 10)
    numbers = [start + step * index for index in range(9)]
    shown, asked = ", ".join(map(str, numbers[:4])), ", ".join(map(str, numbers[4:]))
    question = rng.choice(("Continue with five numbers: {}", "What are the next five numbers? {}")).format(
        shown
    )
    return simple(shown, question, asked, f"The step is {step}.")


def count_words(rng: Random, thinking: bool) -> Exchange:
    """How many words a list has; thinking numbers them."""
    words = rng.sample(NOUNS, rng.randint(2, 12 if thinking else 8))
    text = " ".join(words)
    question = rng.choice(("How many words are in this list? {}", "Count these words: {}")).format(text)
    steps = ", ".join(f"{number} {word}" for number, word in enumerate(words, 1))
    return simple(text, question, f"There are {len(words)} words.", steps + ".")
