"""From logits to a token: penalties, filters, and a draw whose randomness is a function of (seed, position).

The order is fixed: repetition, frequency and presence penalties and logit bias change the logits; temperature
divides them; top-k, min-p and top-p cut the distribution (all three judge the same uncut probabilities);
one uniform number picks from what is left, in descending order of probability, ties to the lower id.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class SamplingParams:
    """How one request samples. Defaults change nothing: the plain distribution at temperature 1.

    Attributes:
        temperature: 0 takes the most likely token.
        top_p: keep the likeliest tokens until their mass reaches this, the crossing one included.
        top_k: keep this many; 0 keeps all.
        min_p: keep tokens with at least this fraction of the likeliest one's probability.
        frequency_penalty: subtracted for each time a token was generated.
        presence_penalty: subtracted once for a token that was generated.
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or answer.
        logit_bias: added, by token id.
        seed: of the request's randomness.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0

    @property
    def counts_tokens(self) -> bool:
        """Whether a :class:`TokenCounts` is needed."""
        return bool(self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1.0)


class TokenCounts:
    """How often each token stands in a request's prompt and answer.

    Args:
        vocab: number of token ids.
        prompt: ids that count as seen, but not as generated.
        device: of the logits.
    """

    def __init__(self, vocab: int, prompt: Tensor, device: torch.device) -> None:
        self.seen = torch.zeros(vocab, dtype=torch.bool, device=device)
        self.seen[prompt.to(device)] = True
        self.generated = torch.zeros(vocab, device=device)

    def add(self, token: int) -> None:
        """Counts one generated token."""
        self.seen[token] = True
        self.generated[token] += 1


def adjust(logits: Tensor, params: SamplingParams, counts: TokenCounts | None) -> Tensor:
    """Logits ``[V]`` after penalties and bias; the input is left alone."""
    if counts is not None and params.counts_tokens:
        if params.repetition_penalty != 1.0:
            scaled = torch.where(
                logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty
            )
            logits = torch.where(counts.seen, scaled, logits)
        logits = logits - params.frequency_penalty * counts.generated
        logits = logits - params.presence_penalty * (counts.generated > 0)
    if params.logit_bias:
        logits = logits.clone()
        tokens = torch.tensor(list(params.logit_bias), device=logits.device)
        logits[tokens] += torch.tensor(list(params.logit_bias.values()), device=logits.device)
    return logits


def sample(logits: Tensor, params: SamplingParams, position: int) -> int:
    """Draws one token.

    Args:
        logits: float32 ``[V]``, adjusted.
        params: of the request.
        position: of the token to be drawn in its sequence; with the seed it keys the draw.
    """
    if params.temperature <= 0:
        return int(logits.argmax())
    ordered, tokens = torch.sort(logits, descending=True, stable=True)
    probability = torch.softmax(ordered.double() / params.temperature, dim=0)
    kept = int((probability >= params.min_p * probability[0]).sum())
    if params.top_k:
        kept = min(kept, params.top_k)
    if params.top_p < 1.0:
        below = int((probability.cumsum(0) < params.top_p).sum())
        kept = min(kept, below + 1)
    mass = probability[: max(kept, 1)].cumsum(0)
    drawn = int(torch.searchsorted(mass, uniform(params.seed, position) * mass[-1], right=True))
    return int(tokens[min(drawn, len(mass) - 1)])


def sample_rows(
    logits: Sequence[Tensor], params: Sequence[SamplingParams], positions: Sequence[int]
) -> list[int]:
    """Draws one token a row, as :func:`sample` does; on a GPU all rows at once."""
    if logits[0].is_cuda:
        return sample_together(torch.stack(list(logits)), params, positions)
    return [sample(*row) for row in zip(logits, params, positions, strict=True)]


def sample_together(rows: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> list[int]:
    """:func:`sample` for every row of float32 ``[n, V]``, with one copy to the device and one back."""
    if all(one.temperature <= 0 for one in params):
        place = torch.arange(rows.shape[1], device=rows.device)
        best = torch.where(rows == rows.amax(1, keepdim=True), place, rows.shape[1])
        return best.amin(1).tolist()
    settings = [
        (
            one.temperature if one.temperature > 0 else 1.0,
            one.min_p,
            (one.top_k or rows.shape[1]) if one.temperature > 0 else 1,
            one.top_p if one.top_p < 1 else 2.0,
            uniform(one.seed, position),
        )
        for one, position in zip(params, positions, strict=True)
    ]
    columns = torch.tensor(settings, dtype=torch.float64).to(rows.device, non_blocking=True)
    temperature, min_p, top_k, top_p, drawn = columns[:, :, None].unbind(1)
    ordered, tokens = torch.sort(rows, dim=1, descending=True, stable=True)
    probability = torch.softmax(ordered.double() / temperature, dim=1)
    kept = (probability >= min_p * probability[:, :1]).sum(1, keepdim=True)
    below = (probability.cumsum(1) < top_p).sum(1, keepdim=True)
    kept = torch.minimum(torch.minimum(kept, top_k.long()), below + 1).clamp(min=1)
    place = torch.arange(rows.shape[1], device=rows.device)
    mass = probability.masked_fill(place >= kept, 0).cumsum(1)
    index = torch.searchsorted(mass, drawn * mass[:, -1:], right=True)
    return tokens.gather(1, torch.minimum(index, kept - 1))[:, 0].tolist()


def top_logprobs(logits: Tensor, token: int, count: int) -> tuple[float, list[int], list[float]]:
    """The log-probability of ``token`` in unadjusted logits ``[V]``, and the ``count`` likeliest tokens with
    theirs.
    """
    logprobs = torch.log_softmax(logits.double(), dim=0)
    best = torch.sort(logprobs, descending=True, stable=True)
    return float(logprobs[token]), best.indices[:count].tolist(), best.values[:count].tolist()


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on its arguments alone: splitmix64's finaliser over both, 53 bits."""
    return (_mix(_mix(seed) ^ position) >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
