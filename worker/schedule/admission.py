"""Which bank a prompt goes to, and how much of what the banks hold it can use.

Every possibility is given a cost in tokens: those left to compute, plus what is destroyed on the way, which
somebody may come back for. The cheapest wins.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from worker.bank.banks import Bank, BankId, Banks, TokenId
from worker.bank.store import UNDO_ROWS
from worker.schedule.request import AdmissionKind

_LOSS = 0.5
"""What a destroyed token counts just after its last use: about every second conversation is gone on with."""
_HALF_LIFE_S = 1800.0
"""Idle time after which it counts half of that."""
_BLOCK = 1024


@dataclass(frozen=True)
class Admission:
    """Where a prompt starts.

    Attributes:
        kind: how ``bank`` comes to hold the prompt's first ``cached`` tokens.
        undo: warm: tokens after those that the bank must take back first.
        source: fork: the bank whose beginning is shared.
    """

    kind: AdmissionKind
    bank: Bank
    cached: int = 0
    undo: int = 0
    source: Bank | None = None


def choose(
    prompt: Sequence[TokenId], banks: Sequence[Bank], now: float, *, truncate: bool = True, fork: bool = True
) -> Admission | None:
    """The cheapest admission; None while every bank is in use.

    At least the prompt's last token is always computed, since its logits are needed.

    Args:
        prompt: token ids.
        banks: all of them; those in use are only forked from.
        now: monotonic seconds.
        truncate, fork: whether these kinds are allowed.
    """
    shared = {bank.id: _shared(bank.tokens, prompt) for bank in banks}
    costs = [
        (len(prompt) - admission.cached + lost, order, admission)
        for order, (admission, lost) in enumerate(_candidates(banks, shared, now))
        if (truncate or admission.kind is not AdmissionKind.TRUNCATE)
        and (fork or admission.kind is not AdmissionKind.FORK)
    ]
    return min(costs, key=lambda one: one[:2])[2] if costs else None


def carry_out(admission: Admission, banks: Banks) -> None:
    """Brings the admission's bank to where the prompt starts."""
    bank = admission.bank
    if admission.kind is AdmissionKind.WARM:
        banks.undo(bank, admission.undo)
    elif admission.source is not None:
        banks.fork(admission.source, bank, admission.cached)
    else:
        banks.truncate(bank, admission.cached)


def _candidates(
    banks: Sequence[Bank], shared: dict[BankId, int], now: float
) -> Iterator[tuple[Admission, float]]:
    """Every possible admission with what it destroys; the first of equals is preferred."""
    idle = [bank for bank in banks if not bank.in_use]
    for bank in idle:
        common = shared[bank.id]
        if common and bank.length - common <= UNDO_ROWS and common >= bank.floor:
            yield Admission(AdmissionKind.WARM, bank, common, bank.length - common), 0.0
    for bank in idle:
        point = bank.point_at_most(shared[bank.id])
        if point:
            lost = _worth(bank, bank.length - shared[bank.id], now)
            yield Admission(AdmissionKind.TRUNCATE, bank, point), lost
    for bank in idle:
        lost = _worth(bank, bank.length, now)
        for source in banks:
            point = source.point_at_most(shared[source.id])
            if point and source is not bank:
                yield Admission(AdmissionKind.FORK, bank, point, source=source), lost
        yield Admission(AdmissionKind.COLD, bank), lost


def _worth(bank: Bank, tokens: int, now: float) -> float:
    """What losing so many of the bank's tokens costs."""
    idle_s = max(0.0, now - bank.used_at)
    return _LOSS * tokens * math.exp2(-idle_s / _HALF_LIFE_S)


def _shared(held: Sequence[TokenId], prompt: Sequence[TokenId]) -> int:
    """Length of the common beginning, leaving out the prompt's last token."""
    limit = min(len(held), len(prompt) - 1)
    begin = 0
    while begin < limit and held[begin : begin + _BLOCK] == prompt[begin : begin + _BLOCK]:
        begin += _BLOCK
    end = min(begin + _BLOCK, limit)
    return next((at for at in range(min(begin, limit), end) if held[at] != prompt[at]), min(end, limit))
