"""One chat request from conversation to finished answer: render, route, parse; independent of the API."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from gateway.chat.answer import AnswerParser, Delta
from gateway.chat.conversation import ChatRequest, Tool, ToolCall
from gateway.chat.detokenize import Detokenizer
from gateway.chat.forced import NAME_TOKENS, demanded, meant, up_to_arguments, up_to_name
from gateway.chat.render import opens_thinking, render
from gateway.chat.replay import Sampled
from gateway.chat.segments import END_THINK, Segment, template
from gateway.chat.tokens import ChatTokenizer
from gateway.errors import Fault, GatewayError
from gateway.proto import engine_pb2 as pb
from gateway.router import ModelInfo, Router

log = logging.getLogger(__name__)

_LONG_PROMPT = 20_000
"""Characters from which tokenizing takes 10 ms and more."""
_NOTHING = Delta()


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
        stop_string: the one that ended it, if one did.
        usage: the engine's numbers.
        reasoning_tokens: those of the completion's tokens that are thinking.
    """

    finish: str = ""
    stop_string: str = ""
    usage: pb.Usage = field(default_factory=pb.Usage)
    reasoning_tokens: int = 0


@dataclass(frozen=True)
class Whole:
    """All of an answer's text."""

    reasoning: str
    content: str
    logprobs: tuple[ContentLogprob, ...]


async def prompt_tokens(model: ModelInfo, request: ChatRequest) -> list[int]:
    """The prompt of a request; a long one is tokenized beside the loop, which serves other streams meanwhile.

    Raises:
        GatewayError: the model cannot call tools.
    """
    tools = _offered(request)
    if tools and model.tokenizer.dsml is None:
        raise GatewayError(Fault.INVALID, "tools: this model's vocabulary has no tool calls", param="tools")
    segments = render(request.messages, request.effort, tools, model.calls.recall)
    if sum(len(segment.text) for segment in segments) < _LONG_PROMPT:
        return model.tokenizer.encode(segments)
    return await asyncio.to_thread(model.tokenizer.encode, segments)


class Answer:
    """The answer to one request; iterate :meth:`parts` once, then read :attr:`outcome`.

    Rendering and routing happen in :meth:`prepare`, so that what cannot be served fails before a response
    begins.
    """

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The tools called so far."""
        return self._parser.calls

    @classmethod
    async def prepare(cls, router: Router, request: ChatRequest, request_id: str) -> Answer:
        """Renders the prompt and picks an engine.

        Raises:
            GatewayError: no engine serves, or the model cannot call tools.
        """
        return cls(router, request, request_id, await prompt_tokens(router.model, request))

    def __init__(self, router: Router, request: ChatRequest, request_id: str, prompt: list[int]) -> None:
        model = router.model
        self.tokenizer: ChatTokenizer = model.tokenizer
        self.outcome = Outcome()
        self.model_name = model.name
        self._memory = model.calls
        self._engine = router.pick()
        self._request_id = request_id
        self._sampling = request.sampling
        self._seed = (
            secrets.randbits(64) if request.sampling.seed is None else request.sampling.seed % (1 << 64)
        )
        self._bias = {**request.sampling.logit_bias, **_no_calls(request, self.tokenizer)}
        self._demanded = demanded(request)
        self._thinking_tokens = request.thinking_tokens
        self.prompt_tokens = len(prompt)
        self._context = prompt
        self._parser = AnswerParser(
            self.tokenizer,
            thinking=opens_thinking(request.messages, request.effort),
            stops=request.stops,
            tools=bool(_offered(request)),
            single_call=not request.parallel_tool_calls,
        )
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._logprobs: deque[pb.TokenLogprobs] = deque()
        self._rounds = 0
        self._thought_for_it = 0
        self._tokens = 0
        self._started_at = 0.0
        self._first_token_s = 0.0

    async def parts(self) -> AsyncGenerator[Part]:
        """The answer as it comes. Leaving early cancels the engine's work.

        Raises:
            GatewayError: the engine refused the request, failed, or went away.
        """
        self._started_at = time.monotonic()
        ended = "cancelled"
        try:
            async with aclosing(self._called() if self._demanded else self._answered()) as parts:
                async for part in parts:
                    yield part
            self._remember()
            ended = self.outcome.finish
        except GatewayError as error:
            ended = error.fault.value
            raise
        finally:
            self.outcome.stop_string = self._parser.stop_string
            self.outcome.reasoning_tokens = self._parser.reasoning_tokens - self._thought_for_it
            if self._rounds > 1:
                self.outcome.usage.completion_tokens = self._tokens
            self._log(ended)

    async def whole(self) -> Whole:
        """The answer once it is complete, instead of :meth:`parts`.

        Raises:
            GatewayError: the engine refused the request, failed, or went away.
        """
        reasoning, content = [], []
        logprobs: list[ContentLogprob] = []
        async with aclosing(self.parts()) as parts:
            async for part in parts:
                reasoning.append(part.delta.reasoning)
                content.append(part.delta.content)
                logprobs += part.logprobs
        return Whole("".join(reasoning), "".join(content), tuple(logprobs))

    async def _answered(self) -> AsyncGenerator[Part]:
        """The answer; thinking that uses up its tokens is ended for the model, which goes on from there."""
        closing = _NOTHING
        if self._parser.thinking and self._thinking_tokens:
            async with aclosing(self._round(limit=self._thinking_tokens)) as parts:
                async for part in parts:
                    yield part
            if self.outcome.finish:
                return
            closing = self._end_thinking()
        async with aclosing(self._round(closing)) as parts:
            async for part in parts:
                yield part

    async def _called(self) -> AsyncGenerator[Part]:
        """Thinking, and then a call of a demanded tool, whose beginning is given to the model.

        Each step goes on where the engine holds the one before.
        """
        if self._parser.thinking:
            async with aclosing(self._round(thinking=True, limit=self._thinking_tokens)) as parts:
                async for part in parts:
                    yield part
            if self.outcome.finish == "length":
                return
            if delta := self._end_thinking():
                yield self._part(delta)
        name = self._demanded[0]
        if len(self._demanded) > 1:
            written = ""
            async with aclosing(self._name()) as texts:
                async for text in texts:
                    written += text
            name = meant(written, self._demanded)
        opening = self._write(up_to_arguments(name))
        async with aclosing(self._round(opening)) as parts:
            async for part in parts:
                yield part

    async def _round(
        self, written: Delta = _NOTHING, *, thinking: bool = False, limit: int = 0
    ) -> AsyncGenerator[Part]:
        """What the engine generates from the context on, up to the end of the answer or of its thinking.

        Args:
            written: what was written in the model's place; it goes out once the engine has taken the request.
            thinking: end where the thinking does.
            limit: end after that many tokens; the answer is then not finished.
        """
        finish = ""
        complete = self._parser.complete
        up_to = self._tokens + limit
        async with aclosing(self._replies(thinking=thinking, max_tokens=limit)) as replies:
            async for reply in replies:
                if reply.HasField("prefill"):
                    yield Part(progress=reply.prefill)
                if complete and reply.tokens:
                    finish = self._cut()
                    break
                if reply.finish_reason:
                    finish = _FINISH[reply.finish_reason]
                if written and (reply.tokens or finish):
                    yield Part(written)
                    written = _NOTHING
                if reply.tokens:
                    yield self._push(reply)
                if self._parser.stopped:
                    finish = self._cut()
                    break
                complete = self._parser.complete
        if not finish:
            raise GatewayError(Fault.INTERNAL, "the engine ended the answer without a reason")
        if limit and finish == "length" and up_to == self._tokens != self._sampling.max_tokens:
            self.outcome.finish = ""
            return
        if not self._parser.stopped and not (thinking and finish == "stop"):
            yield self._part(self._parser.finish(cut=finish == "length"))
        self.outcome.finish = "tool_calls" if finish == "stop" and self._parser.calls else finish

    async def _name(self) -> AsyncGenerator[str]:
        """The name that the model writes where a call has to follow, quotation mark and all."""
        text = Detokenizer(self.tokenizer)
        begun = self.tokenizer.encode(up_to_name())
        async with aclosing(self._replies(begun, max_tokens=NAME_TOKENS)) as replies:
            async for reply in replies:
                piece = text.push(reply.tokens)
                yield piece
                if '"' in piece:
                    break

    async def _replies(
        self, more: Sequence[int] = (), *, thinking: bool = False, max_tokens: int = 0
    ) -> AsyncGenerator[pb.GenerateReply]:
        """One call of the engine, its numbers accounted for. A later one that does not fit any more ends the
        answer by its length.
        """
        sampling = self._sampling
        left = sampling.max_tokens - self._tokens
        if sampling.max_tokens and left <= 0:
            yield pb.GenerateReply(finish_reason=pb.FINISH_REASON_LENGTH)
            return
        limits = [one for one in (max_tokens, left) if one > 0]
        request = self._message([*self._context, *more], min(limits, default=0), thinking=thinking)
        self._rounds += 1
        try:
            async with aclosing(self._engine.generate(request)) as replies:
                async for reply in replies:
                    if reply.tokens and not self._first_token_s:
                        self._first_token_s = time.monotonic() - self._started_at
                    if reply.HasField("usage"):
                        self._account(reply.usage)
                    yield reply
        except GatewayError as error:
            if error.fault is not Fault.CONTEXT_LENGTH or self._rounds == 1:
                raise
            yield pb.GenerateReply(finish_reason=pb.FINISH_REASON_LENGTH)

    def _message(self, prompt: Sequence[int], max_tokens: int, *, thinking: bool) -> pb.GenerateRequest:
        sampling = self._sampling
        # A model that begins somebody's turn has ended its own.
        stop_tokens = [*self.tokenizer.turns]
        if thinking and self.tokenizer.end_think is not None:
            stop_tokens.append(self.tokenizer.end_think)
        return pb.GenerateRequest(
            request_id=f"{self._request_id}.{uuid.uuid4().hex[:8]}",
            prompt_tokens=prompt,
            sampling=pb.SamplingParams(
                max_tokens=max_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                min_p=sampling.min_p,
                frequency_penalty=sampling.frequency_penalty,
                presence_penalty=sampling.presence_penalty,
                repetition_penalty=sampling.repetition_penalty,
                logit_bias=self._bias,
                seed=self._seed,
                stop_tokens=stop_tokens,
                logprobs=sampling.logprobs,
                top_logprobs=sampling.top_logprobs,
            ),
        )

    def _end_thinking(self) -> Delta:
        """Ends the thinking in the model's place, where it has not done so."""
        if not self._parser.thinking:
            return _NOTHING
        delta = self._write([template(END_THINK)])
        self._thought_for_it += 1
        return delta

    def _write(self, segments: Sequence[Segment]) -> Delta:
        """Writes in the model's place."""
        tokens = self.tokenizer.encode(segments)
        self._context += tokens
        return self._parser.push(tokens)

    def _push(self, reply: pb.GenerateReply) -> Part:
        """What the reply's tokens say."""
        self._tokens += len(reply.tokens)
        self._context += reply.tokens
        thought = self._parser.reasoning_tokens
        delta = self._parser.push(reply.tokens)
        self._logprobs += reply.logprobs[self._parser.reasoning_tokens - thought :]
        return self._part(delta)

    def _part(self, delta: Delta) -> Part:
        """With the log-probabilities of the tokens that turned out to be content."""
        self._reasoning.append(delta.reasoning)
        self._content.append(delta.content)
        if not self._logprobs:
            return Part(delta)
        entries = [(token, self._logprobs.popleft()) for token in delta.content_tokens]
        return Part(
            delta,
            tuple(
                ContentLogprob(token, one.logprob, tuple(zip(one.top_tokens, one.top_logprobs, strict=True)))
                for token, one in entries
            ),
        )

    def _remember(self) -> None:
        """Keeps sound calls' tokens for when the client sends the calls back."""
        parser = self._parser
        if parser.flaws:
            log.warning("event=tool_calls_flawed id=%s flaws=%r", self._request_id, ", ".join(parser.flaws))
        elif parser.complete and self.outcome.finish == "tool_calls":
            reasoning, content = "".join(self._reasoning), "".join(self._content)
            self._memory.remember(
                Sampled(reasoning, content, parser.calls, tuple(parser.thought), tuple(parser.said))
            )

    def _account(self, usage: pb.Usage) -> None:
        """The first call's numbers are the answer's, but for what was generated since."""
        if self._rounds == 1:
            self.outcome.usage.CopyFrom(usage)
            return
        self.outcome.usage.completion_tokens = self._tokens
        if usage.decode_tokens_per_s:
            self.outcome.usage.decode_tokens_per_s = usage.decode_tokens_per_s

    def _cut(self) -> str:
        """Ends the answer before the engine has sent its last numbers; returns the reason."""
        usage = self.outcome.usage
        usage.prompt_tokens = self.prompt_tokens
        usage.completion_tokens = self._tokens
        usage.ttft_s = self._first_token_s
        if self._tokens > 1:
            seconds = time.monotonic() - self._started_at - self._first_token_s
            usage.decode_tokens_per_s = (self._tokens - 1) / max(seconds, 1e-9)
        return "stop"

    def _log(self, ended: str) -> None:
        usage = self.outcome.usage
        log.info(
            "event=request id=%s finish=%s prompt=%d cached=%d completion=%d ttft_s=%.3f seconds=%.3f "
            "prefill_tps=%.1f decode_tps=%.1f admission=%s",
            self._request_id,
            ended,
            self.prompt_tokens,
            usage.cached_tokens,
            self._tokens,
            usage.ttft_s,
            time.monotonic() - self._started_at,
            usage.prefill_tokens_per_s,
            usage.decode_tokens_per_s,
            usage.admission or "-",
        )


_FINISH = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}


def _offered(request: ChatRequest) -> tuple[Tool, ...]:
    """The tools that the model hears of."""
    return () if request.tool_choice.mode == "none" else request.tools


def _no_calls(request: ChatRequest, tokenizer: ChatTokenizer) -> dict[int, float]:
    """Keeps a model that has seen calls, or whose tools are withheld, from writing a call as text."""
    if _offered(request) or tokenizer.dsml is None:
        return {}
    if request.tools or any(message.tool_calls for message in request.messages):
        return {tokenizer.dsml: -100.0}
    return {}
