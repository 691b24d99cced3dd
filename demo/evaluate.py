"""Accuracy on held-out dialogues, by kind.

An example counts as right when the most likely token is the wanted one at every position of its answers:
greedy decoding then writes exactly these answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from demo.compose import held_out_conversation
from demo.layout import ALIGNMENT, Batch
from demo.network import Mode, logits_of, run
from demo.rows import ANSWER, encode
from worker.model.config import ModelConfig


@dataclass(frozen=True)
class Kind:
    """Held-out examples: how many, and whether the assistant thinks."""

    name: str
    count: int
    thinking: bool = False

    @property
    def label(self) -> str:
        """As reported."""
        return self.name + ("+thinking" if self.thinking else "")


KINDS = (
    Kind("smalltalk", 128),
    Kind("sums_two_digits", 256),
    Kind("sums", 128, thinking=True),
    Kind("differences", 128),
    Kind("count_range", 128),
    Kind("continue_series", 128),
    Kind("count_words", 128),
    Kind("count_words", 128, thinking=True),
    Kind("copy_words", 128),
    Kind("copy_32", 128),
    Kind("copy_code", 128),
    Kind("reverse_words", 128),
    Kind("tool_call", 256),
    Kind("tool_call", 128, thinking=True),
    Kind("structured", 256),
    Kind("structured", 128, thinking=True),
    Kind("memory", 128),
    Kind("needle", 128),
    Kind("needle_2000", 64),
    Kind("needle_6000", 64),
)
_TOKENS_A_BATCH = 32768


def evaluate(
    weights: Mapping[str, Tensor],
    config: ModelConfig,
    mode: Mode,
    device: torch.device,
    kinds: tuple[Kind, ...] = KINDS,
    seed: int = 1234,
) -> dict[str, float]:
    """The part of each kind's examples that is right in every token.

    Every kind has rows of another length, for which compiling would take longer than running.
    """
    with torch.compiler.set_stance("force_eager"):
        return {kind.label: _accuracy(weights, config, mode, device, kind, seed) for kind in kinds}


@torch.no_grad()
def _accuracy(
    weights: Mapping[str, Tensor],
    config: ModelConfig,
    mode: Mode,
    device: torch.device,
    kind: Kind,
    seed: int,
) -> float:
    rng = Random(f"{seed}/{kind.label}")
    examples = [encode(held_out_conversation(kind.name, rng, kind.thinking)) for _ in range(kind.count)]
    longest = max(len(ids) for ids, _ in examples)
    length = -(-longest // ALIGNMENT) * ALIGNMENT
    rows = max(1, _TOKENS_A_BATCH // length)
    right = 0
    for begin in range(0, len(examples), rows):
        batch = _padded(examples[begin : begin + rows], length).to(device)
        hidden = run(weights, config, batch, mode).hidden
        found = logits_of(weights, hidden, mode.dtype).argmax(-1).view_as(batch.targets)
        right += int(((found == batch.targets) | (batch.weights == 0)).all(-1).sum())
    return right / len(examples)


def _padded(examples: list[tuple[list[int], list[int]]], length: int) -> Batch:
    rows = len(examples)
    ids, targets = torch.zeros(rows, length, dtype=torch.long), torch.zeros(rows, length, dtype=torch.long)
    weights = torch.zeros(rows, length)
    for row, (tokens, kinds) in enumerate(examples):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        targets[row, : len(tokens) - 1] = torch.tensor(tokens[1:])
        weights[row, : len(tokens)] = (torch.tensor(kinds) == ANSWER).float()
    positions = torch.arange(length).expand(rows, -1)
    return Batch(ids, positions, torch.zeros_like(ids), targets, weights)
