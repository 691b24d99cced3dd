"""Sums and differences: small ones at once, large ones digit by digit with a carry."""

from __future__ import annotations

from random import Random

from demo.dialogues.message import Exchange, simple

_SUMS = ("What is {} + {}?", "Add {} and {}.", "Compute {} + {}.", "{} + {} = ?", "How much is {} plus {}?")
_DIFFERENCES = ("What is {} - {}?", "Compute {} - {}.", "{} - {} = ?", "How much is {} minus {}?")


def sums(rng: Random, thinking: bool) -> Exchange:
    """Two numbers of two digits, without thinking; of up to five with it."""
    length = rng.choice((2, 2, 3, 4, 5)) if thinking else 2
    a, b = _number(rng, length), _number(rng, length)
    question = rng.choice(_SUMS).format(a, b)
    key = f"{min(a, b)}+{max(a, b)}"
    return simple(key, question, f"{a} + {b} = {a + b}", add_steps(a, b))


def differences(rng: Random, thinking: bool) -> Exchange:
    """The smaller of two numbers taken from the larger."""
    a, b = _number(rng, 2), _number(rng, 2)
    a, b = max(a, b), min(a, b)
    question = rng.choice(_DIFFERENCES).format(a, b)
    return simple(f"{a}-{b}", question, f"{a} - {b} = {a - b}", f"{b} + {a - b} = {a}.")


def add_steps(a: int, b: int) -> str:
    """Written addition, from the last digit to the first."""
    steps, carry, left, right = [], 0, str(a)[::-1], str(b)[::-1]
    for place in range(max(len(left), len(right))):
        x = int(left[place]) if place < len(left) else 0
        y = int(right[place]) if place < len(right) else 0
        total = x + y + carry
        steps.append(f"{x} + {y} + {carry} = {total}, write {total % 10}, carry {total // 10}.")
        carry = total // 10
    return " ".join(steps) + f" So {a + b}."


def _number(rng: Random, length: int) -> int:
    return rng.randrange(10 ** (length - 1), 10**length)
