"""KV banks: what each holds, and the only code that changes it.

A bank is a place for one sequence. Its tokens are those the model has processed; its rings and pages in the
store hold exactly their state. Banks whose sequences begin alike may share pages and restore points of that
beginning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NewType

from worker.bank.layout import Span
from worker.bank.pages import PagePool
from worker.bank.restore import RestoreStore, points_to_drop
from worker.bank.store import UNDO_ROWS, KvStore

DEFAULT_POINTS = 16

BankId = NewType("BankId", int)
TokenId = NewType("TokenId", int)


@dataclass
class Bank:
    """One bank.

    Attributes:
        tokens: processed token ids, in order.
        pages: page table; covers at least ``tokens``.
        points: slots of restore points by position, ascending.
        floor: position of the restore point last gone back to; taking back single tokens stops there.
        in_use: a request works on it.
        used_at: monotonic seconds of the last use.
    """

    id: BankId
    tokens: list[TokenId] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    points: dict[int, int] = field(default_factory=dict)
    floor: int = 0
    in_use: bool = False
    used_at: float = 0.0

    @property
    def length(self) -> int:
        return len(self.tokens)

    def point_at_most(self, position: int) -> int:
        """The last restore point not after ``position``; 0, the empty bank, always is one."""
        return max((point for point in self.points if point <= position), default=0)


class Banks:
    """All banks of an engine with their pages and restore points; owned by the engine's thread.

    Args:
        store: their memory.
        points: restore points a bank keeps.
    """

    def __init__(self, store: KvStore, points: int) -> None:
        self._geometry = store.geometry
        self._points = points
        self._restore = RestoreStore(store, store.banks * (points + 1))
        self._slots = PagePool(store.banks * (points + 1))
        self.pool = PagePool(store.pages)
        self.all = [Bank(BankId(index)) for index in range(store.banks)]

    def span(self, bank: Bank, tokens: Sequence[TokenId], outputs: int) -> Span:
        """A span that extends ``bank`` by ``tokens``, with pages for them; nothing is committed yet."""
        missing = self._geometry.pages_for(bank.length + len(tokens)) - len(bank.pages)
        if missing > 0:
            bank.pages += self.pool.allocate(missing)
        return Span(bank.id, bank.length, tokens, bank.pages, outputs)

    def commit(self, bank: Bank, tokens: Sequence[TokenId]) -> None:
        """The model has processed ``tokens`` after what the bank held; at a page's end the state is kept."""
        bank.tokens += tokens
        if bank.length % self._geometry.page_tokens or bank.length in bank.points or not self._points:
            return
        (slot,) = self._slots.allocate(1)
        self._restore.save(slot, bank.id, bank.length)
        bank.points[bank.length] = slot
        for position in points_to_drop(list(bank.points), self._points):
            self._slots.release([bank.points.pop(position)])

    def undo(self, bank: Bank, count: int) -> None:
        """Takes back the last ``count`` tokens, at most :data:`UNDO_ROWS`: the rings hold what came
        before.
        """
        if not 0 <= count <= min(UNDO_ROWS, bank.length - bank.floor):
            raise ValueError(f"cannot take back {count} of {bank.length} tokens")
        self._shorten(bank, bank.length - count)

    def truncate(self, bank: Bank, position: int) -> None:
        """Goes back to a restore point, or to nothing at 0."""
        if position and position not in bank.points:
            raise ValueError(f"bank {bank.id} has no restore point at {position}")
        self._shorten(bank, position)
        bank.floor = position
        if position:
            self._restore.load(bank.points[position], bank.id, position)

    def fork(self, source: Bank, bank: Bank, position: int) -> None:
        """Makes ``bank``, whatever it held, a copy of ``source`` at one of its restore points.

        Pages and points up to there are shared; ``source`` may be in use and stays as it is.
        """
        if position not in source.points:
            raise ValueError(f"bank {source.id} has no restore point at {position}")
        self.truncate(bank, 0)
        bank.tokens += source.tokens[:position]
        bank.pages += source.pages[: self._geometry.pages_for(position)]
        bank.points |= {point: slot for point, slot in source.points.items() if point <= position}
        self.pool.share(bank.pages)
        self._slots.share(bank.points.values())
        bank.floor = position
        self._restore.load(bank.points[position], bank.id, position)

    def check(self) -> None:
        """Asserts that pages and points balance; for tests and idle moments."""
        self.pool.check(bank.pages for bank in self.all)
        self._slots.check(bank.points.values() for bank in self.all)
        for bank in self.all:
            assert len(bank.pages) >= self._geometry.pages_for(bank.length), f"bank {bank.id} lacks pages"
            assert list(bank.points) == sorted(bank.points), f"points of bank {bank.id} are out of order"
            assert all(point <= bank.length for point in bank.points), (
                f"bank {bank.id} has a point past its end"
            )

    def _shorten(self, bank: Bank, length: int) -> None:
        """Forgets what is past ``length``."""
        del bank.tokens[length:]
        keep = self._geometry.pages_for(length)
        self.pool.release(bank.pages[keep:])
        del bank.pages[keep:]
        for position in [point for point in bank.points if point > length]:
            self._slots.release([bank.points.pop(position)])
