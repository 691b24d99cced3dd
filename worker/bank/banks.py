"""KV banks: what each holds, and the only code that changes it.

A bank is a place for one sequence. Its tokens are those the model has processed; its rings and pages in the
store hold exactly their state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NewType

from worker.bank.layout import Span
from worker.bank.pages import PagePool
from worker.bank.store import UNDO_ROWS, KvGeometry

BankId = NewType("BankId", int)
TokenId = NewType("TokenId", int)


@dataclass
class Bank:
    """One bank.

    Attributes:
        tokens: processed token ids, in order.
        pages: page table; covers at least ``tokens``.
        in_use: a request works on it.
        used_at: monotonic seconds of the last use.
    """

    id: BankId
    tokens: list[TokenId] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    in_use: bool = False
    used_at: float = 0.0

    @property
    def length(self) -> int:
        return len(self.tokens)


class Banks:
    """All banks of an engine and their page pool; owned by the engine's thread.

    Args:
        geometry: of the store they describe.
        count: banks.
        pool: pages.
    """

    def __init__(self, geometry: KvGeometry, count: int, pool: PagePool) -> None:
        self._geometry = geometry
        self.pool = pool
        self.all = [Bank(BankId(index)) for index in range(count)]

    def span(self, bank: Bank, tokens: Sequence[TokenId], outputs: int) -> Span:
        """A span that extends ``bank`` by ``tokens``, with pages for them; nothing is committed yet."""
        missing = self._geometry.pages_for(bank.length + len(tokens)) - len(bank.pages)
        if missing > 0:
            bank.pages += self.pool.allocate(missing)
        return Span(bank.id, bank.length, tokens, bank.pages, outputs)

    def commit(self, bank: Bank, tokens: Sequence[TokenId]) -> None:
        """The model has processed ``tokens`` after what the bank held."""
        bank.tokens += tokens

    def undo(self, bank: Bank, count: int) -> None:
        """Takes back the last ``count`` tokens, at most :data:`UNDO_ROWS`: the rings still hold what came
        before.
        """
        if not 0 <= count <= min(UNDO_ROWS, bank.length):
            raise ValueError(f"cannot take back {count} of {bank.length} tokens")
        if count:
            del bank.tokens[-count:]
            self._trim(bank)

    def clear(self, bank: Bank) -> None:
        """Empties the bank and frees its pages."""
        bank.tokens.clear()
        self._trim(bank)

    def check(self) -> None:
        """Asserts that pages balance; for tests and idle moments."""
        self.pool.check(bank.pages for bank in self.all)
        for bank in self.all:
            assert len(bank.pages) >= self._geometry.pages_for(bank.length), f"bank {bank.id} lacks pages"

    def _trim(self, bank: Bank) -> None:
        keep = self._geometry.pages_for(bank.length)
        self.pool.release(bank.pages[keep:])
        del bank.pages[keep:]
