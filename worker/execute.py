"""What the engine runs its steps on: a model together with its banks' memory."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Protocol

from torch import Tensor

from worker.bank.layout import Span, StepLayout
from worker.bank.store import KvGeometry, KvStore
from worker.model.config import ModelConfig
from worker.model.forward import Model


class Executor(Protocol):
    """A model on one device. Its methods run on the engine's thread alone."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def store(self) -> KvStore: ...

    def decode(self, spans: Sequence[Span]) -> Tensor:
        """Advances sequences by a few rows each.

        Returns:
            logits of every span's outputs in order, float32 ``[rows, vocab]`` on the device; valid until the
            next call.
        """
        ...

    def prefill(self, span: Span) -> Generator[None, None, Tensor | None]:
        """Advances one sequence by a piece of its prompt; gives way now and then.

        The bank is as it was until the generator returns, whatever else runs in between; closing it gives
        the piece up. It returns the logits ``[1, vocab]`` of the span's last row, if the span wants them.
        """
        ...


class CpuExecutor:
    """Plain torch on the CPU.

    Args:
        model: weights and forward.
        banks: sequences at a time.
        context: tokens a bank holds.
        rounding: store keys as the official model rounds them; off only for comparisons.
    """

    def __init__(self, model: Model, banks: int, context: int, *, rounding: bool = True) -> None:
        geometry = KvGeometry(model.config, rounding)
        self.config = model.config
        self.store = KvStore(geometry, banks, banks * geometry.pages_for(context))
        self._model = model

    def decode(self, spans: Sequence[Span]) -> Tensor:
        """As :meth:`Executor.decode`."""
        return self._model.forward(StepLayout.build(spans, self.store.geometry), self.store)

    def prefill(self, span: Span) -> Generator[None, None, Tensor | None]:
        """As :meth:`Executor.prefill`; gives way before it begins, and not again."""
        yield
        logits = self.decode([span])
        return logits if span.outputs else None
