"""Rows of packed conversations for training, endlessly, from a seed.

Every conversation begins at a multiple of 128, where compression windows begin.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from demo.compose import long_conversation, short_conversation
from demo.dialogues.message import Conversation
from demo.layout import ALIGNMENT, Batch
from demo.render import ASSISTANT, EOS, render
from demo.vocabulary import load

PADDING, CONTEXT, ANSWER = 0, 1, 2
"""What a position's next token is."""
_SHORT_TRIES = 6


@dataclass(frozen=True)
class Shape:
    """Rows and their length in tokens, and which part of a row's tokens long conversations make."""

    rows: int
    length: int
    long_part: float


class Rows(IterableDataset[tuple[NDArray[np.int16], ...]]):
    """Endless batches of one shape: ids, positions, documents, targets and kinds, int16 ``[B, T]`` each."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape, self.seed = shape, seed

    def __iter__(self) -> Iterator[tuple[NDArray[np.int16], ...]]:
        worker = get_worker_info()
        return drawn(self.shape, Random(f"{self.seed}/{worker.id if worker else 0}"))


def drawn(shape: Shape, rng: Random) -> Iterator[tuple[NDArray[np.int16], ...]]:
    """Endless batches, as :class:`Rows` yields them."""
    packer = _Packer(rng, shape)
    while True:
        rows = [packer.row() for _ in range(shape.rows)]
        yield tuple(np.stack(column) for column in zip(*rows, strict=True))


def loader(shape: Shape, seed: int, workers: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """Batches made by ``workers`` processes; the same arguments give the same batches."""
    return iter(
        DataLoader(
            Rows(shape, seed),
            batch_size=None,
            num_workers=workers,
            prefetch_factor=4 if workers else None,
            pin_memory=torch.cuda.is_available(),
        )
    )


def to_batch(columns: tuple[torch.Tensor, ...], device: torch.device, context_weight: float) -> Batch:
    """A batch on the device; tokens that are not the assistant's count ``context_weight``."""
    ids, positions, documents, targets, kinds = (column.to(device, non_blocking=True) for column in columns)
    weights = (kinds == ANSWER).float() + context_weight * (kinds == CONTEXT).float()
    return Batch(ids.long(), positions.long(), documents.long(), targets.long(), weights)


def encode(conversation: Conversation) -> tuple[list[int], list[int]]:
    """A conversation's ids, and for each position what its next token is."""
    ids = load().encode(render(conversation), add_special_tokens=False).ids
    return ids, answer_kinds(ids)


def answer_kinds(ids: list[int]) -> list[int]:
    """ANSWER where the next token is the assistant's: after the think tag up to the end of the turn."""
    assistant, eos = load().token_to_id(ASSISTANT), load().token_to_id(EOS)
    kinds = [CONTEXT] * len(ids)
    kinds[-1] = PADDING
    speaking_from = None
    for index, token in enumerate(ids):
        if token == assistant:
            speaking_from = index + 1
        elif token == eos:
            speaking_from = None
        if speaking_from is not None and index >= speaking_from and index + 1 < len(ids):
            kinds[index] = ANSWER
    return kinds


class _Packer:
    """Fills rows with conversations; one that does not fit opens a later row."""

    def __init__(self, rng: Random, shape: Shape) -> None:
        self.rng, self.shape = rng, shape
        self.waiting: list[tuple[list[int], list[int]]] = []

    def row(self) -> list[NDArray[np.int16]]:
        length = self.shape.length
        ids, positions, documents, targets, kinds = (np.zeros(length, np.int16) for _ in range(5))
        positions[:] = np.arange(length) % ALIGNMENT
        documents[:] = -2
        at, number = 0, 0
        while at < length:
            found = self._fitting(length - at, number == 0)
            if found is None:
                break
            tokens, answers = found
            end = at + len(tokens)
            padded = at + -(-len(tokens) // ALIGNMENT) * ALIGNMENT
            ids[at:end] = tokens
            targets[at : end - 1] = tokens[1:]
            kinds[at:end] = answers
            positions[at:padded] = np.arange(padded - at)
            documents[at:padded] = number
            at, number = padded, number + 1
        return [ids, positions, documents, targets, kinds]

    def _fitting(self, room: int, is_first: bool) -> tuple[list[int], list[int]] | None:
        for index, (tokens, _) in enumerate(self.waiting):
            if len(tokens) <= room:
                return self.waiting.pop(index)
        if is_first and self.rng.random() < self.shape.long_part:
            for _ in range(_SHORT_TRIES):
                encoded = encode(long_conversation(self.rng, int(room * self.rng.uniform(0.5, 0.93))))
                if len(encoded[0]) <= room:
                    return encoded
        for _ in range(_SHORT_TRIES):
            encoded = encode(short_conversation(self.rng))
            if len(encoded[0]) <= room:
                return encoded
            if len(encoded[0]) <= self.shape.length and len(self.waiting) < 32:
                self.waiting.append(encoded)
        return None
