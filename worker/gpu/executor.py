"""The model on a GPU: decode steps replayed from graphs, and chunks of prompts between them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import cast

import torch
from torch import Tensor

from kernels.gpu.indexer import HELD as CLASSES
from worker.bank.layout import Span
from worker.bank.store import KvGeometry, KvStore
from worker.gpu.decode import MAX_ROWS, DecodeForward
from worker.gpu.prefill import PrefillForward
from worker.gpu.weights import WeightsOnGpu
from worker.model.config import ModelConfig

BUCKETS = (1, 2, 4, 8, 16, 24, 32)
"""Rows of the recorded steps; a step runs as the smallest that holds it."""


class GpuExecutor:
    """An executor (:class:`worker.execute.Executor`) on one GPU.

    Args:
        config, weights: of the model.
        banks: sequences at a time.
        context: tokens a bank holds.
        chunk: tokens of the largest chunk of a prompt.
        graphs: replay decode steps; off to find a fault.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightsOnGpu,
        banks: int,
        context: int,
        chunk: int,
        *,
        graphs: bool = True,
    ) -> None:
        device = weights.embedding.device
        geometry = KvGeometry(config, rounding=True)
        self.config = config
        self.store = KvStore(geometry, banks, banks * geometry.pages_for(context), device, spare=1)
        self._decode = DecodeForward(config, weights, self.store, context)
        self._prefill = PrefillForward(config, weights, self.store, context, chunk)
        self._chunk = chunk
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._records = graphs
        self._staging = torch.zeros(4, MAX_ROWS, dtype=torch.int32, pin_memory=True)
        self._pages: dict[int, list[int]] = {}

    @torch.inference_mode()
    def warm_up(self, on_stage: Callable[[str, float], None]) -> None:
        """Compiles every kernel and records every step; afterwards neither happens any more.

        ``on_stage`` is told what is being done, and how much of it is done, 0 to 1.
        Banks must be empty: the first is written to.
        """
        pages = [
            page % self.store.pages for page in range(self.store.geometry.pages_for(self._decode.context))
        ]
        for number, (begin, end) in enumerate(spans := self._warm_up_spans()):
            on_stage("compiling prefill kernels", number / len(spans))
            for _ in self.prefill(Span(0, begin, [0] * (end - begin), pages, 1)):
                pass
        for number, bucket in enumerate(BUCKETS):
            on_stage("recording decode steps", number / len(BUCKETS))
            self._fill([Span(0, 0, [0] * bucket, pages, bucket)])
            self._decode.run(bucket)
            if self._records:
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    self._decode.run(bucket)
                self._graphs[bucket] = graph
        torch.cuda.synchronize()
        self._pages.clear()

    @torch.inference_mode()
    def decode(self, spans: Sequence[Span]) -> Tensor:
        """As :meth:`worker.execute.Executor.decode`."""
        count = self._fill(spans)
        bucket = next(size for size in BUCKETS if size >= count)
        if bucket in self._graphs:
            self._graphs[bucket].replay()
        else:
            self._decode.run(bucket)
        logits = self._decode.buffers.vocabulary
        if all(span.outputs == len(span.tokens) for span in spans):
            return logits[:count]
        ends = torch.tensor([len(span.tokens) for span in spans]).cumsum(0).tolist()
        wanted = [
            row for span, end in zip(spans, ends, strict=True) for row in range(end - span.outputs, end)
        ]
        return logits[wanted]

    @torch.inference_mode()
    def prefill(self, span: Span) -> Generator[None, None, Tensor | None]:
        """As :meth:`worker.execute.Executor.prefill`; gives way once a layer.

        The host is never more than a layer ahead, so that what runs in between waits for one layer at most.
        """
        layers = self._prefill.run(span)
        before: torch.cuda.Event | None = None
        while True:
            try:
                next(layers)
            except StopIteration as end:
                return cast("Tensor | None", end.value)
            done = torch.cuda.Event()
            done.record()
            if before is not None:
                before.synchronize()
            before = done
            yield

    def _warm_up_spans(self) -> list[tuple[int, int]]:
        """Chunks that between them need every kernel: many rows and few, lists of entries of every class."""
        context = self._decode.context
        ends = {1, min(self._chunk, context), *(min(4 * size + 64, context) for size in CLASSES), context}
        return [(max(0, end - min(self._chunk, 100)), end) for end in sorted(ends)] + [
            (0, min(self._chunk, context))
        ]

    def _fill(self, spans: Sequence[Span]) -> int:
        """Uploads the step's rows, and page tables that have changed; returns the number of rows.

        Rows past the real ones repeat the last.
        """
        columns: list[tuple[int, int, int, int]] = []
        for span in spans:
            first = len(columns)
            columns += [
                (token, span.start + offset, span.bank, first) for offset, token in enumerate(span.tokens)
            ]
            if self._pages.get(span.bank) != span.pages:
                self._pages[span.bank] = list(span.pages)
                table = torch.tensor(span.pages, dtype=torch.int32)
                self._decode.rows.pages[span.bank, : len(table)].copy_(table)
        count = len(columns)
        columns += columns[-1:] * (MAX_ROWS - count)
        # The copy of the step before has ended: its tokens have been read.
        self._staging.copy_(torch.tensor(columns, dtype=torch.int32).T)
        self._decode.table.copy_(self._staging, non_blocking=True)
        return count
