"""What runs in the next step: every decoding sequence, and a piece of one prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from worker.schedule.request import RequestId

MAX_DECODE_ROWS = 32


@dataclass(frozen=True)
class Work:
    """A sequence as the planner sees it.

    Attributes:
        position: tokens its bank holds.
        prompt: tokens of its prompt; it decodes once it holds them all.
        served_step: the step that last advanced it, −1 for never.
    """

    request: RequestId
    position: int
    prompt: int
    served_step: int

    @property
    def decodes(self) -> bool:
        return self.position >= self.prompt


@dataclass(frozen=True)
class StepPlan:
    """One step: one row for each of ``decode``, and ``prefill_tokens`` rows of ``prefill``."""

    decode: tuple[RequestId, ...] = ()
    prefill: RequestId | None = None
    prefill_tokens: int = 0

    def __bool__(self) -> bool:
        return bool(self.decode) or self.prefill is not None


def plan_step(work: Sequence[Work], chunk: int) -> StepPlan:
    """Plans the next step.

    Decoding sequences never wait for a prompt. Of several prompts the one served longest ago gets its chunk,
    so that they advance together and a short one is not held up by a long one. Chunks end at multiples of
    ``chunk``.
    """
    decoding = sorted((one for one in work if one.decodes), key=lambda one: one.served_step)
    prompts = [one for one in work if not one.decodes]
    decode = tuple(one.request for one in decoding[:MAX_DECODE_ROWS])
    if not prompts:
        return StepPlan(decode)
    first = min(prompts, key=lambda one: one.served_step)
    tokens = min(first.prompt - first.position, chunk - first.position % chunk)
    return StepPlan(decode, first.request, tokens)
