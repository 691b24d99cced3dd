"""The model's own outputs in place of the dialogues' answers, found without a token-by-token loop.

Given noise, what the model says at a position is a function of the text before it: its most likely token, or
with Gumbel noise on the logits a sampled one. Replacing all answers at once by what it says given the text
so far, again and again, settles token by token into what it would have said alone (Jacobi iteration).
Answers keep their lengths: where the model would end a turn elsewhere the dialogue's token stays.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from demo.drafter.base import Base
from demo.layout import Batch
from demo.network import Mode, logits_of, run


@dataclass(frozen=True)
class Outputs:
    """A batch of N positions with the model's words in it, and its view of that text.

    Attributes:
        batch: the text.
        hidden: float32 ``[N, hidden]``, after the output norm.
        taps: float32 ``[N, taps · hidden]``.
        choices: int64 ``[N]``, what the model says next; −1 outside of answers.
        answer: bool ``[N]``, where the next token is the assistant's.
    """

    batch: Batch
    hidden: Tensor
    taps: Tensor
    choices: Tensor
    answer: Tensor


@torch.no_grad()
def own_outputs(
    base: Base, batch: Batch, tapped: tuple[int, ...], temperature: float, passes: int, seed: int
) -> Outputs:
    """Runs the model ``passes`` times, replacing the answers before every pass but the first.

    Args:
        base: the model.
        batch: whose answers have weight 1 and everything else 0.
        tapped: layers whose streams are wanted.
        temperature: 0 takes the most likely tokens.
        passes: at least 1, which leaves the dialogues as they are.
        seed: of the noise.
    """
    answer = batch.weights.flatten() == 1
    places = answer.nonzero().squeeze(-1)
    noise = _gumbel(len(places), base.config.vocab, seed, batch.ids.device) if temperature else 0.0
    mode = Mode(base.dtype, select=True, rounding=True)
    choices = torch.full_like(batch.ids.flatten(), -1)
    for number in range(passes):
        if number:
            batch = _said(batch, places, choices, base.config.eos_token)
        result = run(base.weights, base.config, batch, mode, tapped)
        logits = logits_of(base.weights, result.hidden[places], base.dtype).float()
        choices[places] = (logits + temperature * noise).argmax(-1)
    return Outputs(batch, result.hidden, torch.cat(result.taps, -1), choices, answer)


def _said(batch: Batch, places: Tensor, choices: Tensor, eos: int) -> Batch:
    """The batch with the choices as its answers' tokens, wherever that leaves the turns' ends in place."""
    ids, targets = batch.ids.flatten().clone(), batch.targets.flatten().clone()
    stays = (targets[places] == eos) | (choices[places] == eos)
    said = torch.where(stays, targets[places], choices[places])
    targets[places] = said
    ids[places + 1] = said
    return replace(batch, ids=ids.view_as(batch.ids), targets=targets.view_as(batch.targets))


def _gumbel(rows: int, columns: int, seed: int, device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    uniform = torch.rand(rows, columns, generator=generator, device=device)
    return -torch.log(-torch.log(uniform.clamp(1e-10, 1 - 1e-7)))
