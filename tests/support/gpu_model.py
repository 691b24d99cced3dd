"""A small quantized model, on the device with both forwards and beside it in plain torch."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from support.runner import Runner
from worker.bank.layout import Span
from worker.bank.store import KvGeometry, KvStore
from worker.gguf.presets import SMALL
from worker.gguf.synthetic import write_synthetic
from worker.gpu.decode import DecodeForward
from worker.gpu.prefill import PrefillForward
from worker.gpu.source import FileSource
from worker.gpu.weights import load_weights
from worker.model.config import ModelConfig
from worker.model.load import load_model, open_model

TINY = replace(
    SMALL,
    name="tiny",
    layers=3,
    vocab=288,
    context=256,
    heads=2,
    head_dim=64,
    q_rank=64,
    o_rank=32,
    o_groups=2,
    window=32,
    compress_ratios=(0, 4, 8),
    index_heads=16,
    index_dim=32,
    index_top_k=4,
    experts=4,
    experts_used=2,
    hash_layers=1,
    swiglu_clamp=(10.0,) * 3,
    swiglu_clamp_shared=(10.0,) * 3,
)
"""Every mechanism within a few dozen tokens: for the interpreter."""


class GpuRunner:
    """Drives the two forwards over banks by hand."""

    def __init__(self, path: Path, device: torch.device, *, banks: int = 3, context: int, chunk: int) -> None:
        file, self.config = open_model(path)
        weights = load_weights(FileSource(file, device), self.config, device)
        geometry = KvGeometry(self.config, rounding=True)
        self._per_bank = geometry.pages_for(context)
        self.store = KvStore(geometry, banks, banks * self._per_bank, device, spare=1)
        self.decode = DecodeForward(self.config, weights, self.store, context)
        self.prefill = PrefillForward(self.config, weights, self.store, context, chunk)
        pages = torch.arange(banks * self._per_bank, dtype=torch.int32).view(banks, -1)
        self.decode.rows.pages[:banks] = pages.to(device)
        self._lengths = [0] * banks

    def chunk(self, bank: int, tokens: Sequence[int]) -> Tensor:
        """Prefills; the last row's logits, ``[vocab]``."""
        layers = self.begin(bank, tokens)
        try:
            while True:
                next(layers)
        except StopIteration as end:
            logits: Tensor = end.value
        self._lengths[bank] += len(tokens)
        return logits[0].clone()

    def begin(self, bank: int, tokens: Sequence[int]) -> Generator[None, None, Tensor | None]:
        """A chunk that stops after every layer; does not count until :meth:`chunk` has run one whole."""
        pages = range(bank * self._per_bank, (bank + 1) * self._per_bank)
        return self.prefill.run(Span(bank, self._lengths[bank], list(tokens), list(pages), 1))

    def step(self, work: Sequence[tuple[int, Sequence[int]]]) -> list[Tensor]:
        """One decode step of (bank, tokens); logits of every row, ``[len(tokens), vocab]`` by bank."""
        rows = self.decode.rows
        columns: list[tuple[int, int, int, int]] = []
        for bank, tokens in work:
            first = len(columns)
            for offset, token in enumerate(tokens):
                columns.append((token, self._lengths[bank] + offset, bank, first))
            self._lengths[bank] += len(tokens)
        filled = columns + columns[-1:] * (len(rows.tokens) - len(columns))
        for target, values in zip(
            (rows.tokens, rows.positions, rows.banks, rows.firsts), zip(*filled, strict=True), strict=True
        ):
            target.copy_(torch.tensor(values, dtype=torch.int32))
        logits = self.decode.run(len(columns))[: len(columns)].clone()
        return list(logits.split([len(tokens) for _, tokens in work]))


def write_model(path: Path, config: ModelConfig, mix: str = "q2") -> Path:
    """A synthetic file of ``config``."""
    write_synthetic(path, config, mix, 1)
    return path


def reference(path: Path, *, context: int, banks: int = 3) -> Runner:
    """The same file in plain torch, with keys rounded."""
    file, config = open_model(path)
    return Runner(load_model(file, config), rounding=True, banks=banks, context=context)
