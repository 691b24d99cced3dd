"""What changes in the course of the training, by the part of it that is done.

First the network attends to all compressed entries while the indexer learns to tell which matter; then it
attends to the indexer's choice, in longer contexts; at last every rounding of the served model is on.
"""

from __future__ import annotations

from dataclasses import dataclass

from demo.rows import Shape

TOKENS_A_STEP = 65536
SHORT = Shape(TOKENS_A_STEP // 2048, 2048, 0.0)
MIDDLE = Shape(TOKENS_A_STEP // 4096, 4096, 0.9)
LONG = Shape(TOKENS_A_STEP // 8192, 8192, 1.0)

_MIDDLE_FROM, _SELECT_FROM, _ROUND_FROM, _QUANTIZE_FROM = 0.12, 0.4, 0.55, 0.6
_DECAY_FROM, _LAST_RATE = 0.4, 0.03
_WARM_STEPS = 150


@dataclass(frozen=True)
class Phase:
    """The settings of one step."""

    shape: Shape
    select: bool
    rounding: bool
    quantized: bool
    rate: float
    """Of the full learning rates."""
    balance: float
    """How far a routing bias moves."""


def phase(done: float, step: int, steps_since_start: int) -> Phase:
    """The settings of step ``step`` at ``done`` (0 to 1) of the training.

    ``steps_since_start`` counts from the start or the last resumption, where the optimizers begin without
    momentum.
    """
    decay = max(0.0, done - _DECAY_FROM) / (1 - _DECAY_FROM)
    warm = min(1.0, (steps_since_start + 1) / _WARM_STEPS)
    return Phase(
        shape=_shape(done, step),
        select=done >= _SELECT_FROM,
        rounding=done >= _ROUND_FROM,
        quantized=done >= _QUANTIZE_FROM,
        rate=warm * (1 - (1 - _LAST_RATE) * min(1.0, decay)),
        balance=0.002 if done < 0.9 else 0.0,
    )


def _shape(done: float, step: int) -> Shape:
    if done >= _SELECT_FROM and step % 10 == 4:
        return LONG
    if done >= _MIDDLE_FROM and step % 10 == 9:
        return MIDDLE
    return SHORT
