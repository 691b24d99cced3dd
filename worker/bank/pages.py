"""A pool of numbered places (pages, restore slots): which are free, and how many banks hold each of the
others.
"""

from __future__ import annotations

from collections.abc import Iterable


class PagePool:
    """Reference-counted page numbers 0 … pages−1.

    Args:
        pages: size of the pool.
    """

    def __init__(self, pages: int) -> None:
        self._holders = [0] * pages
        self._free = list(range(pages - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def total(self) -> int:
        return len(self._holders)

    def allocate(self, count: int) -> list[int]:
        """``count`` free pages, each held once.

        Raises:
            ValueError: fewer are free; none is taken. The memory plan rules it out.
        """
        if count > len(self._free):
            raise ValueError(f"{count} pages wanted, {len(self._free)} of {self.total} free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One more hold on each of ``pages``, which somebody holds already."""
        for page in pages:
            if self._holders[page] <= 0:
                raise ValueError(f"page {page} is shared but not held")
            self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Gives up one hold on each of ``pages``; a page nobody holds is free again."""
        for page in pages:
            if self._holders[page] <= 0:
                raise ValueError(f"page {page} is released but not held")
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)

    def check(self, tables: Iterable[Iterable[int]]) -> None:
        """Asserts that holds and free list are exactly what the page tables say; for tests and idle
        moments.
        """
        held = [0] * self.total
        for table in tables:
            for page in table:
                held[page] += 1
        assert held == self._holders, "page holds differ from the banks' page tables"
        assert sorted(self._free) == [page for page, count in enumerate(held) if not count], (
            "free list is wrong"
        )
