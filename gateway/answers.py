"""One chat request from conversation to finished answer: render, route, parse; independent of the API."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from gateway.chat.answer import AnswerParser, Delta
from gateway.chat.conversation import ChatRequest
from gateway.chat.render import opens_thinking, render
from gateway.chat.tokens import ChatTokenizer
from gateway.errors import Fault, GatewayError
from gateway.proto import engine_pb2 as pb
from gateway.router import Router

log = logging.getLogger(__name__)

_LONG_PROMPT = 20_000
"""Characters from which tokenizing takes 10 ms and more."""


@dataclass(frozen=True)
class ContentLogprob:
    """One content token's log-probability, with the likeliest alternatives."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Part:
    """What one engine reply brought: progress of the prompt, or a piece of the answer."""

    delta: Delta = field(default_factory=Delta)
    logprobs: tuple[ContentLogprob, ...] = ()
    progress: pb.PrefillProgress | None = None


@dataclass
class Outcome:
    """How an answer ended; complete once its parts are exhausted.

    Attributes:
        finish: ``stop``, ``length`` or ``tool_calls``.
        usage: the engine's numbers.
    """

    finish: str = ""
    usage: pb.Usage = field(default_factory=pb.Usage)
    reasoning_tokens: int = 0


class Answer:
    """The answer to one request; iterate :meth:`parts` once, then read :attr:`outcome`.

    Rendering and routing happen in :meth:`prepare`, so that what cannot be served fails before a response
    begins.
    """

    @classmethod
    async def prepare(cls, router: Router, request: ChatRequest, request_id: str) -> Answer:
        """Renders the prompt and picks an engine; a long prompt is tokenized beside the loop, which serves
        other streams meanwhile.

        Raises:
            GatewayError: no engine serves.
        """
        tokenizer = router.model.tokenizer
        segments = render(request.messages, request.effort)
        if sum(len(segment.text) for segment in segments) < _LONG_PROMPT:
            prompt = tokenizer.encode(segments)
        else:
            prompt = await asyncio.to_thread(tokenizer.encode, segments)
        return cls(router, request, request_id, prompt)

    def __init__(self, router: Router, request: ChatRequest, request_id: str, prompt: list[int]) -> None:
        model = router.model
        self.tokenizer: ChatTokenizer = model.tokenizer
        self.outcome = Outcome()
        self.model_name = model.name
        self._engine = router.pick()
        self._request_id = request_id
        self._sampling = request.sampling
        self._prompt = prompt
        thinking = opens_thinking(request.messages, request.effort)
        self._parser = AnswerParser(self.tokenizer, thinking=thinking, stops=request.stops)

    async def parts(self) -> AsyncGenerator[Part]:
        """The answer as it comes. Leaving early cancels the engine's work.

        Raises:
            GatewayError: the engine refused the request, failed, or went away.
        """
        started_at = time.monotonic()
        tokens = 0
        first_token_s = 0.0
        ended = "cancelled"
        replies = self._engine.generate(self._message())
        try:
            async for reply in replies:
                if reply.HasField("prefill"):
                    yield Part(progress=reply.prefill)
                if reply.tokens:
                    first_token_s = first_token_s or time.monotonic() - started_at
                    tokens += len(reply.tokens)
                    delta = self._parser.push(reply.tokens)
                    yield Part(delta, self._logprobs(reply, delta))
                if reply.HasField("usage"):
                    self.outcome.usage.CopyFrom(reply.usage)
                if reply.finish_reason:
                    self.outcome.finish = _FINISH[reply.finish_reason]
                if self._parser.stopped:
                    self._cut(tokens, first_token_s, time.monotonic() - started_at)
                    break
            if not self.outcome.finish:
                raise GatewayError(Fault.INTERNAL, "the engine ended the answer without a reason")
            if not self._parser.stopped:
                yield Part(self._parser.finish())
            ended = self.outcome.finish
        except GatewayError as error:
            ended = error.fault.value
            raise
        finally:
            await replies.aclose()
            self.outcome.reasoning_tokens = self._parser.reasoning_tokens
            self._log(ended, tokens, time.monotonic() - started_at)

    def _message(self) -> pb.GenerateRequest:
        sampling = self._sampling
        return pb.GenerateRequest(
            request_id=f"{self._request_id}.{uuid.uuid4().hex[:8]}",
            prompt_tokens=self._prompt,
            sampling=pb.SamplingParams(
                max_tokens=sampling.max_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                min_p=sampling.min_p,
                frequency_penalty=sampling.frequency_penalty,
                presence_penalty=sampling.presence_penalty,
                repetition_penalty=sampling.repetition_penalty,
                logit_bias=dict(sampling.logit_bias),
                seed=secrets.randbits(64) if sampling.seed is None else sampling.seed % (1 << 64),
                # A model that begins somebody's turn has ended its own.
                stop_tokens=self.tokenizer.turns,
                logprobs=sampling.logprobs,
                top_logprobs=sampling.top_logprobs,
            ),
        )

    def _logprobs(self, reply: pb.GenerateReply, delta: Delta) -> tuple[ContentLogprob, ...]:
        """Those of the content's tokens, which are the last of the reply's."""
        count = len(delta.content_tokens)
        if not reply.logprobs or not count:
            return ()
        return tuple(
            ContentLogprob(token, one.logprob, tuple(zip(one.top_tokens, one.top_logprobs, strict=True)))
            for token, one in zip(delta.content_tokens, reply.logprobs[-count:], strict=True)
        )

    def _cut(self, tokens: int, first_token_s: float, seconds: float) -> None:
        """Ends the answer at a stop string, before the engine has sent its last numbers."""
        usage = self.outcome.usage
        self.outcome.finish = "stop"
        usage.prompt_tokens = len(self._prompt)
        usage.completion_tokens = tokens
        usage.ttft_s = first_token_s
        if tokens > 1:
            usage.decode_tokens_per_s = (tokens - 1) / max(seconds - usage.ttft_s, 1e-9)

    def _log(self, ended: str, tokens: int, seconds: float) -> None:
        usage = self.outcome.usage
        log.info(
            "event=request id=%s finish=%s prompt=%d cached=%d completion=%d ttft_s=%.3f seconds=%.3f "
            "prefill_tps=%.1f decode_tps=%.1f admission=%s",
            self._request_id,
            ended,
            len(self._prompt),
            usage.cached_tokens,
            tokens,
            usage.ttft_s,
            seconds,
            usage.prefill_tokens_per_s,
            usage.decode_tokens_per_s,
            usage.admission or "-",
        )


_FINISH = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}
