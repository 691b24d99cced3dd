"""Drives a model over banks by hand, without scheduler or engine."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from worker.bank.banks import Banks, TokenId
from worker.bank.layout import StepLayout
from worker.bank.store import KvGeometry, KvStore
from worker.model.config import ModelConfig
from worker.model.forward import Model
from worker.model.weights import assemble


class Runner:
    """A model with its own store; bank numbers are given by the caller."""

    def __init__(
        self, model: Model, *, rounding: bool, banks: int = 4, context: int = 1024, points: int = 4
    ) -> None:
        self.model = model
        self.geometry = KvGeometry(model.config, rounding)
        pages = banks * self.geometry.pages_for(context)
        self.store = KvStore(self.geometry, banks, pages)
        self.banks = Banks(self.store, points)

    @classmethod
    def of(cls, config: ModelConfig, tensors: dict[str, Tensor], *, rounding: bool, **sizes: int) -> Runner:
        return cls(Model(config, assemble(config, tensors.__getitem__)), rounding=rounding, **sizes)

    def step(self, work: Sequence[tuple[int, Sequence[int]]]) -> list[Tensor]:
        """Runs one ragged batch of (bank, tokens); returns each span's logits, ``[len(tokens), vocab]``."""
        parts = [(self.banks.all[bank], [TokenId(token) for token in tokens]) for bank, tokens in work]
        spans = [self.banks.span(bank, tokens, len(tokens)) for bank, tokens in parts]
        logits = self.model.forward(StepLayout.build(spans, self.geometry), self.store)
        for bank, tokens in parts:
            self.banks.commit(bank, tokens)
        return list(logits.split([len(tokens) for _, tokens in parts]))
