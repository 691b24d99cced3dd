"""What the model answers to held-out dialogues, greedily, and what it thinks meanwhile.

Starts from the dialogue's own answer and replaces all of it by what the model says given the text so far,
until nothing changes (Jacobi iteration): the result is that of saying one token after another.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

import torch
from torch import Tensor

from demo.compose import held_out_conversation
from demo.dialogues.message import Conversation
from demo.drafter.base import Base
from demo.layout import ALIGNMENT, Batch
from demo.network import Mode, logits_of, run
from demo.rows import encode

_LONGER = 16
"""Tokens that an answer may be longer than the dialogue's."""
_PASSES = 12
_ROWS_AT_ONCE = 4096
"""Positions whose logits are made together."""


@dataclass(frozen=True)
class Example:
    """Token ids of a prompt, and the answer that the dialogue has to it."""

    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True)
class Said:
    """Rows of T positions with the model's answers in them.

    Attributes:
        ids: int64 ``[B, T]``.
        taps: float32 ``[B, T, taps · hidden]``.
        spans: each row's answer, from its first token to its last, in positions.
        cut: answers without the end of their turn: too long, or not settled.
    """

    ids: Tensor
    taps: Tensor
    spans: list[range]
    cut: int


def examples_of(kind: str, thinking: bool, count: int, seed: int) -> list[Example]:
    """Every turn of the assistant in ``count`` held-out dialogues of a kind."""
    rng = Random(f"{seed}/{kind}/{thinking}")
    dialogues = [held_out_conversation(kind, rng, thinking) for _ in range(count)]
    return [example for dialogue in dialogues for example in _turns(dialogue)]


def _turns(dialogue: Conversation) -> list[Example]:
    turns = []
    for index, message in enumerate(dialogue.messages):
        if message.role == "assistant":
            prompt = encode(replace(dialogue, messages=dialogue.messages[:index]))[0]
            whole = encode(replace(dialogue, messages=dialogue.messages[: index + 1]))[0]
            turns.append(Example(prompt, whole[len(prompt) :]))
    return turns


@torch.no_grad()
def say(base: Base, examples: list[Example], tapped: tuple[int, ...], passes: int = _PASSES) -> Said:
    """The model's greedy answers to the prompts, the served model's roundings on.

    An answer that has not settled after ``passes`` is cut where it is no longer certain.
    """
    eos, device = base.config.eos_token, base.embedding.device
    slots = [range(len(one.prompt), len(one.prompt) + len(one.answer) + _LONGER) for one in examples]
    length = -(-max(slot.stop for slot in slots) // ALIGNMENT) * ALIGNMENT
    ids = torch.full((len(examples), length), eos, dtype=torch.int64)
    for row, one in zip(ids, examples, strict=True):
        row[: len(one.prompt) + len(one.answer)] = torch.tensor(one.prompt + one.answer)
    mode = Mode(base.dtype, select=True, rounding=True)
    positions = torch.arange(length).expand_as(ids)
    for _ in range(passes):
        said = ids.clone()
        batch = Batch(said, positions, torch.zeros_like(ids), said, torch.zeros(ids.shape)).to(device)
        result = run(base.weights, base.config, batch, mode, tapped)
        choices = _choices(base, result.hidden).view_as(ids).cpu()
        spans, settled = [], True
        for row, choice, slot in zip(ids, choices, slots, strict=True):
            span = _own(row.tolist(), choice.tolist(), slot, eos)
            spans.append(span)
            if len(span) < len(slot) and row[span.stop - 1] != eos:
                settled = False
                row[slot.start : slot.stop] = choice[slot.start - 1 : slot.stop - 1].clone()
        if settled:
            break
    ends = torch.tensor([span.stop - 1 for span in spans])
    cut = int((said[torch.arange(len(ends)), ends] != eos).sum())
    return Said(said, torch.cat(result.taps, -1).view(*ids.shape, -1), spans, cut)


def _own(row: list[int], choice: list[int], slot: range, eos: int) -> range:
    """The part of the answer that is certainly the model's: up to its end or the first difference."""
    for at in slot:
        if row[at] != choice[at - 1]:
            return range(slot.start, at)
        if row[at] == eos:
            return range(slot.start, at + 1)
    return slot


def _choices(base: Base, hidden: Tensor) -> Tensor:
    parts = [logits_of(base.weights, part, base.dtype).argmax(-1) for part in hidden.split(_ROWS_AT_ONCE)]
    return torch.cat(parts)
