"""A request as the engine sees it, and what the engine says about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NewType

from kernels.sampling import SamplingParams
from worker.bank.banks import TokenId
from worker.errors import PromptTooLongError, RequestError, TwinsparkError

RequestId = NewType("RequestId", str)

MAX_TOP_LOGPROBS = 20


@dataclass(frozen=True)
class Request:
    """One prompt to continue.

    Attributes:
        max_tokens: tokens to generate at most; 0 means up to the end of the context.
        stop_tokens: end the answer, besides the model's own end of sequence; not part of it.
        top_logprobs: alternatives to report with each token.
        ignore_eos: go on past the model's end of sequence.
    """

    id: RequestId
    prompt: Sequence[TokenId]
    sampling: SamplingParams
    max_tokens: int = 0
    stop_tokens: frozenset[TokenId] = frozenset()
    logprobs: bool = False
    top_logprobs: int = 0
    ignore_eos: bool = False


class FinishReason(Enum):
    """Why a request ended well."""

    STOP = "stop"
    LENGTH = "length"


class AdmissionKind(Enum):
    """How a request came to its bank: going on from what the bank holds, from a restore point of its own or
    of another bank, or from nothing.
    """

    WARM = "warm"
    TRUNCATE = "truncate"
    FORK = "fork"
    COLD = "cold"


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of one sampled token and of the likeliest alternatives."""

    logprob: float
    top_tokens: Sequence[int]
    top_logprobs: Sequence[float]


@dataclass(frozen=True)
class Usage:
    """A request's numbers, at its first token or its end; seconds are wall-clock."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    queue_s: float
    ttft_s: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    admission: AdmissionKind
    stop_token: TokenId | None


@dataclass(frozen=True)
class Progress:
    """The prompt is waiting (``queue_position`` > 0) or partly processed."""

    request: RequestId
    done_tokens: int
    prompt_tokens: int
    queue_position: int


@dataclass(frozen=True)
class Token:
    """One more token of the answer; the first comes with what is known of the request so far."""

    request: RequestId
    token: TokenId
    logprob: TokenLogprob | None
    usage: Usage | None = None


@dataclass(frozen=True)
class Finished:
    """The request ended well."""

    request: RequestId
    reason: FinishReason
    usage: Usage


@dataclass(frozen=True)
class Failed:
    """The request ended with an error of its own."""

    request: RequestId
    error: TwinsparkError


Event = Progress | Token | Finished | Failed


def check_request(request: Request, vocab: int, context: int) -> None:
    """Refuses what cannot be run.

    Raises:
        PromptTooLongError: prompt and one token do not fit the context.
        RequestError: empty prompt, token ids or sampling values out of range.
    """
    if not request.prompt:
        raise RequestError("the prompt is empty", "send at least one token")
    if len(request.prompt) >= context:
        raise PromptTooLongError(len(request.prompt), context)
    for what, tokens in (
        ("prompt", request.prompt),
        ("stop_tokens", request.stop_tokens),
        ("logit_bias", request.sampling.logit_bias),
    ):
        wrong = next((token for token in tokens if not 0 <= token < vocab), None)
        if wrong is not None:
            raise RequestError(f"{what} has token id {wrong}, the vocabulary has {vocab}")
    sampling = request.sampling
    for name, value, low, high in (
        ("temperature", sampling.temperature, 0.0, 100.0),
        ("top_p", sampling.top_p, 0.0, 1.0),
        ("min_p", sampling.min_p, 0.0, 1.0),
        ("frequency_penalty", sampling.frequency_penalty, -2.0, 2.0),
        ("presence_penalty", sampling.presence_penalty, -2.0, 2.0),
        ("repetition_penalty", sampling.repetition_penalty, 0.01, 100.0),
        ("top_logprobs", request.top_logprobs, 0, MAX_TOP_LOGPROBS),
        *(("logit_bias", bias, -100.0, 100.0) for bias in sampling.logit_bias.values()),
    ):
        if not low <= value <= high:  # false for NaN too
            raise RequestError(f"{name} is {value:g}, expected {low:g} to {high:g}")
