"""Which bank a prompt goes to, and how much of what the bank holds it can use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from worker.bank.banks import Bank, TokenId
from worker.bank.store import UNDO_ROWS
from worker.schedule.request import AdmissionKind


@dataclass(frozen=True)
class Admission:
    """Where a prompt starts.

    Attributes:
        cached: prompt tokens the bank holds already.
        undo: tokens after them that the bank must take back first.
    """

    kind: AdmissionKind
    bank: Bank
    cached: int = 0
    undo: int = 0


def choose(prompt: Sequence[TokenId], banks: Sequence[Bank]) -> Admission | None:
    """The admission that leaves the least to compute; None while every bank is in use.

    A bank can be gone on with when it holds a beginning of the prompt and at most a few tokens more. At least
    the prompt's last token is always computed, since its logits are needed. Otherwise an empty bank is taken,
    or the one unused for longest.
    """
    idle = [bank for bank in banks if not bank.in_use]
    if not idle:
        return None
    warm = [
        Admission(AdmissionKind.WARM, bank, cached, bank.length - cached)
        for bank in idle
        if (cached := _shared(bank.tokens, prompt)) and bank.length - cached <= UNDO_ROWS
    ]
    if warm:
        return max(warm, key=lambda admission: (admission.cached, -admission.bank.id))
    return Admission(AdmissionKind.COLD, min(idle, key=lambda bank: (bank.length > 0, bank.used_at, bank.id)))


def _shared(held: Sequence[TokenId], prompt: Sequence[TokenId]) -> int:
    """Length of the common beginning, leaving out the prompt's last token."""
    limit = min(len(held), len(prompt) - 1)
    if held[:limit] == list(prompt[:limit]):
        return limit
    return next(index for index in range(limit) if held[index] != prompt[index])
