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
    taps = torch.empty(*ids.shape, len(tapped) * base.config.hidden, device=device)
    spans = [range(slot.start, slot.start) for slot in slots]
    open_rows = list(range(len(examples)))
    for number in range(passes):
        choices, taps[open_rows] = _pass(base, ids[open_rows].to(device), tapped)
        said = dict(zip(open_rows, choices.cpu(), strict=True))
        for row, choice in said.items():
            spans[row] = _own(ids[row].tolist(), choice.tolist(), slots[row], eos)
        open_rows = [row for row in open_rows if not _is_settled(ids[row], spans[row], slots[row], eos)]
        if not open_rows:
            break
        if number < passes - 1:
            for row in open_rows:
                slot = slots[row]
                ids[row, slot.start : slot.stop] = said[row][slot.start - 1 : slot.stop - 1]
    cut = sum(int(row[span.stop - 1]) != eos for row, span in zip(ids, spans, strict=True))
    return Said(ids, taps, spans, cut)


def _pass(base: Base, ids: Tensor, tapped: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The most likely next token everywhere, and the taps."""
    positions, nothing = torch.arange(ids.shape[1], device=ids.device).expand_as(ids), torch.zeros_like(ids)
    batch = Batch(ids, positions, nothing, ids, nothing.float())
    result = run(base.weights, base.config, batch, Mode(base.dtype, select=True, rounding=True), tapped)
    parts = result.hidden.split(_ROWS_AT_ONCE)
    choices = torch.cat([logits_of(base.weights, part, base.dtype).argmax(-1) for part in parts])
    return choices.view_as(ids), torch.cat(result.taps, -1).view(*ids.shape, -1)


def _is_settled(row: Tensor, span: range, slot: range, eos: int) -> bool:
    """Whether the answer is the model's to its end, or to the slot's."""
    return len(span) == len(slot) or (len(span) > 0 and int(row[span.stop - 1]) == eos)


def _own(row: list[int], choice: list[int], slot: range, eos: int) -> range:
    """The part of the answer that is certainly the model's: up to its end or the first difference."""
    for at in slot:
        if row[at] != choice[at - 1]:
            return range(slot.start, at)
        if row[at] == eos:
            return range(slot.start, at + 1)
    return slot
