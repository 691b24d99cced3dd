"""One step's index arithmetic: which stored and new rows every row reads, and where its own results go.

Computed once a step from positions alone and shared by all layers of a kind. Sources are concatenations:
first rows taken from a bank's ring, then the step's new rows; an index points into that concatenation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.attention import pad_keys
from worker.bank.store import KvGeometry

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Span:
    """Consecutive new tokens of one bank.

    Attributes:
        bank: the bank they extend.
        start: position of the first; the bank holds the positions before it.
        tokens: token ids.
        pages: the bank's page table; covers ``start + len(tokens)`` positions.
        outputs: how many of the last rows need logits.
    """

    bank: int
    start: int
    tokens: Sequence[int]
    pages: Sequence[int]
    outputs: int

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True)
class RingUse:
    """Reads and writes of one ring.

    Attributes:
        take: ring rows that head the source, int64 ``[R]``.
        put_rows: rows of the step that stay in the ring, int64 ``[P]``.
        put_at: the ring rows they go to, int64 ``[P]``.
    """

    take: Tensor
    put_rows: Tensor
    put_at: Tensor


@dataclass(frozen=True)
class SpanEntries:
    """The rows of one span and the compressed entries they may see."""

    rows: slice
    entries: slice


@dataclass(frozen=True)
class RatioLayout:
    """The step as layers of one compression ratio see it.

    Attributes:
        ring: of the compressor's inputs (the indexer's compressor uses the same).
        slots: for each entry completed in this step the inputs it pools, int64 ``[W, slots]`` into the ring's
            source; −1 before the first window.
        put_at: where the completed entries go in the pool, int64 ``[W]``.
        positions: of the completed entries (their windows' first tokens), int64 ``[W]``.
        visible: entries that row t sees, int64 ``[T]``.
        most_visible: the largest of ``visible``.
        entries: pool rows of all visible entries, span by span, int64 ``[N]``.
        spans: which rows and which of ``entries`` belong together.
        all_visible: for each row every entry it sees, int64 ``[T, L]`` into ``entries``; −1 fills.
    """

    ring: RingUse
    slots: Tensor
    put_at: Tensor
    positions: Tensor
    visible: Tensor
    most_visible: int
    entries: Tensor
    spans: tuple[SpanEntries, ...]
    all_visible: Tensor


@dataclass(frozen=True)
class StepLayout:
    """A ragged batch of T rows.

    Attributes:
        tokens, positions: int64 ``[T]``.
        output_rows: rows whose logits are wanted, int64.
        ring: of raw keys.
        window: for each row the raw keys it sees, int64 ``[T, L]`` into the ring's source; −1 fills.
        ratios: by compression ratio.
    """

    tokens: Tensor
    positions: Tensor
    output_rows: Tensor
    ring: RingUse
    window: Tensor
    ratios: dict[int, RatioLayout]

    @classmethod
    def build(cls, spans: Sequence[Span], geometry: KvGeometry) -> StepLayout:
        """The layout of ``spans``, whose rows follow each other in the batch; banks differ from span to
        span.
        """
        firsts = np.cumsum([0, *(len(span.tokens) for span in spans)])
        positions = np.concatenate([np.arange(span.start, span.end) for span in spans])
        output_rows = np.concatenate(
            [
                np.arange(first + len(span.tokens) - span.outputs, first + len(span.tokens))
                for span, first in _with(spans, firsts)
            ]
        )
        ring, bases, lows = _ring_use(spans, firsts, geometry.ring_rows, geometry.config.window - 1)
        window = geometry.config.window
        index = []
        for span, first, base, low in zip(spans, firsts, bases, lows, strict=False):
            key = np.arange(span.start, span.end)[:, None] + np.arange(1 - window, 1)[None, :]
            index.append(_locate(key, span.start, len(ring.take) + first, base, low))
        return cls(
            tokens=_tensor(np.concatenate([np.asarray(span.tokens, dtype=np.int64) for span in spans])),
            positions=_tensor(positions),
            output_rows=_tensor(output_rows),
            ring=ring,
            window=pad_keys(_tensor(np.concatenate(index))),
            ratios={
                ratio: _ratio_layout(spans, firsts, positions, geometry, ratio) for ratio in geometry.ratios
            },
        )


def _ratio_layout(
    spans: Sequence[Span], firsts: Ints, positions: Ints, geometry: KvGeometry, ratio: int
) -> RatioLayout:
    overlap, per_page = geometry.overlap(ratio), geometry.page_tokens // ratio
    rows_kept = geometry.window_rows(ratio)
    # The inputs of the window that `start` falls in, and of the one before it where windows overlap.
    ring, bases, lows = _ring_use(spans, firsts, rows_kept, None, ratio, overlap)
    slots, put_at, entry_positions, entries, span_entries, table_rows = [], [], [], [], [], []
    seen = 0
    for span, first, base, low in zip(spans, firsts, bases, lows, strict=False):
        completed = np.arange(span.start // ratio, span.end // ratio)
        key = completed[:, None] * ratio + np.arange((1 - overlap) * ratio, ratio)[None, :]
        slots.append(_locate(key, span.start, len(ring.take) + first, base, low))
        pages = np.asarray(span.pages, dtype=np.int64)
        put_at.append(pages[completed // per_page] * per_page + completed % per_page)
        entry_positions.append(completed * ratio)
        visible = np.arange(span.end // ratio)
        entries.append(pages[visible // per_page] * per_page + visible % per_page)
        rows = slice(int(first), int(first) + len(span.tokens))
        span_entries.append(SpanEntries(rows, slice(seen, seen + len(visible))))
        table_rows.append(np.full(len(span.tokens), seen))
        seen += len(visible)
    visible = (positions + 1) // ratio
    most_visible = int(visible.max(initial=0))
    local = np.arange(most_visible)[None, :]
    all_visible = np.where(local < visible[:, None], np.concatenate(table_rows)[:, None] + local, -1)
    return RatioLayout(
        ring=ring,
        slots=_tensor(np.concatenate(slots)),
        put_at=_tensor(np.concatenate(put_at)),
        positions=_tensor(np.concatenate(entry_positions)),
        visible=_tensor(visible),
        most_visible=most_visible,
        entries=_tensor(np.concatenate(entries)),
        spans=tuple(span_entries),
        all_visible=pad_keys(_tensor(all_visible)),
    )


def _ring_use(
    spans: Sequence[Span], firsts: Ints, ring_rows: int, history: int | None, ratio: int = 1, overlap: int = 1
) -> tuple[RingUse, list[int], list[int]]:
    """The ring's use, and for each span where its part of the source begins and the position that part begins
    at.

    ``history`` positions before the span are read; None: those of the open window, and with overlap of the
    one before.
    """
    take, put_rows, put_at, bases, lows = [], [], [], [], []
    base = 0
    for span, first in _with(spans, firsts):
        oldest = span.start - history if history is not None else (span.start // ratio - overlap + 1) * ratio
        low = max(0, oldest)
        bases.append(base)
        lows.append(low)
        take.append(span.bank * ring_rows + np.arange(low, span.start) % ring_rows)
        base += span.start - low
        kept = np.arange(max(span.start, span.end - ring_rows), span.end)
        put_rows.append(first + kept - span.start)
        put_at.append(span.bank * ring_rows + kept % ring_rows)
    use = RingUse(*(_tensor(np.concatenate(part)) for part in (take, put_rows, put_at)))
    return use, bases, lows


def _locate(position: Ints, start: int, first_new: int, base: int, low: int) -> Ints:
    """Source rows of positions: new ones from ``first_new`` on, older ones from ``base`` on; −1 before the
    sequence.
    """
    index = np.where(position >= start, first_new + position - start, base + position - low)
    return np.where(position >= 0, index, -1)


def _with(spans: Sequence[Span], firsts: Ints) -> list[tuple[Span, int]]:
    return [(span, int(first)) for span, first in zip(spans, firsts, strict=False)]


def _tensor(values: Ints) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64))
