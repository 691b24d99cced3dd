"""OpenAI's chat completions: its route, its request's schema, its answers and stream chunks."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field, StrictBool, StrictInt, StrictStr, model_validator
from starlette.responses import JSONResponse, Response

from gateway.answers import Answer, ContentLogprob, Outcome, Part, Whole
from gateway.api import sse
from gateway.api.efforts import effort_named, effort_of_model, fitting
from gateway.api.fields import Body, Text
from gateway.api.openai_errors import OpenAIErrors
from gateway.api.openai_tools import (
    MessageToolCall,
    NamedToolChoice,
    ToolDefinition,
    call_piece,
    check_messages,
    offered_tools,
    tool_choice,
    whole_call,
)
from gateway.api.sampling import SamplingFields, stop_strings
from gateway.api.service import Service
from gateway.chat.conversation import ChatRequest, Effort, Message, Role, ToolCall
from gateway.chat.tokens import ChatTokenizer
from gateway.errors import Fault, GatewayError
from gateway.stream import EventStream, until_gone

_ROLES = {
    "system": Role.SYSTEM,
    "developer": Role.SYSTEM,
    "user": Role.USER,
    "assistant": Role.ASSISTANT,
    "tool": Role.TOOL,
}


def routes(service: Service) -> APIRouter:
    """``POST /chat/completions``."""
    api = APIRouter()

    @api.post("/chat/completions")
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
        model = service.router.model
        wanted = body.chat_request(len(model.tokenizer), model.context_tokens)
        answer = await Answer.prepare(service.router, wanted, request.state.request_id)
        shape = Shape(body.model or model.name, answer.tokenizer)
        if body.stream:
            include_usage = bool(body.stream_options and body.stream_options.include_usage)
            events = _events(answer, shape, include_usage=include_usage)
            return await until_gone(request, EventStream.begin(events, shape, service.keepalive_s))
        return await until_gone(request, _whole(answer, shape, with_logprobs=bool(body.logprobs)))

    return api


class TextPart(Body):
    """A text part of a message."""

    type: Literal["text"]
    text: Text


class ChatMessage(Body):
    """One message of the request."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | list[TextPart] | None = None
    reasoning_content: Text | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: StrictStr | None = None

    @model_validator(mode="after")
    def _is_complete(self) -> ChatMessage:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a message of role {self.role} needs content")
        if self.role == "tool" and not self.tool_call_id:
            raise ValueError("a message of role tool needs tool_call_id, the id of the call it answers")
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"a message of role {self.role} cannot have tool_calls")
        return self

    def message(self) -> Message:
        """The message as the conversation has it; text parts are joined, those of results by empty lines."""
        content = self.content or ""
        if not isinstance(content, str):
            content = ("\n\n" if self.role == "tool" else "").join(part.text for part in content)
        calls = tuple(
            ToolCall(call.id, call.function.name, call.function.arguments) for call in self.tool_calls or ()
        )
        return Message(
            _ROLES[self.role],
            content,
            self.reasoning_content or "",
            calls,
            self.tool_call_id or "" if self.role == "tool" else "",
        )


class StreamOptions(Body):
    """``stream_options``."""

    include_usage: StrictBool = False


class Thinking(Body):
    """``thinking`` as DeepSeek's own API has it, with a limit as Anthropic's."""

    type: Literal["enabled", "disabled"]
    budget_tokens: Annotated[StrictInt, Field(ge=1)] | None = None


class TemplateArguments(Body):
    """``chat_template_kwargs`` as other servers have it."""

    thinking: StrictBool | None = None
    enable_thinking: StrictBool | None = None


class ResponseFormat(Body):
    """``response_format``; only plain text is served."""

    type: StrictStr


class ChatCompletionRequest(SamplingFields):
    """The body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    model: StrictStr = ""
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    stop: Text | list[Text] | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = None
    n: StrictInt | None = None
    reasoning_effort: StrictStr | None = None
    thinking: Thinking | StrictBool | None = None
    think: StrictBool | None = None
    chat_template_kwargs: TemplateArguments | None = None
    response_format: ResponseFormat | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: StrictBool | None = None
    functions: list[Any] | None = None
    function_call: Any = None
    audio: Any = None
    web_search_options: Any = None
    modalities: list[StrictStr] | None = None

    def chat_request(self, vocabulary_size: int, context_tokens: int) -> ChatRequest:
        """The request in the gateway's terms.

        Raises:
            GatewayError: something is asked for that is not served; it is never silently left out.
        """
        self._refuse_unserved()
        sampling = self.sampling(
            vocabulary_size,
            max_tokens=self.max_completion_tokens or self.max_tokens,
            logprobs=self.logprobs,
            top_logprobs=self.top_logprobs,
        )
        messages = tuple(one.message() for one in self.messages)
        check_messages(messages)
        tools = offered_tools(self.tools or ())
        return ChatRequest(
            messages,
            fitting(self._effort(), context_tokens),
            sampling,
            stop_strings(self.stop),
            tools,
            tool_choice(self.tool_choice, tools),
            parallel_tool_calls=self.parallel_tool_calls is not False,
            thinking_tokens=(isinstance(self.thinking, Thinking) and self.thinking.budget_tokens) or 0,
        )

    def _refuse_unserved(self) -> None:
        wanted = {
            "n": self.n is not None and self.n != 1,
            "audio": self.audio is not None,
            "web_search_options": self.web_search_options is not None,
            "response_format": self.response_format is not None and self.response_format.type != "text",
            "modalities": bool(self.modalities) and self.modalities != ["text"],
        }
        for param, is_wanted in wanted.items():
            if is_wanted:
                raise GatewayError(
                    Fault.INVALID, f"{param}: not served by this version; leave it out", param=param
                )
        old = {
            "functions": (bool(self.functions), "tools"),
            "function_call": (self.function_call not in (None, "none", "auto"), "tool_choice"),
        }
        for param, (is_wanted, instead) in old.items():
            if is_wanted:
                raise GatewayError(Fault.INVALID, f"{param}: no longer served; use {instead}", param=param)
        if self.top_logprobs and not self.logprobs:
            raise GatewayError(Fault.INVALID, "top_logprobs: needs logprobs to be true", param="top_logprobs")

    def _effort(self) -> Effort:
        """Thinking is on unless switched off; the most specific field decides."""
        arguments = self.chat_template_kwargs
        switches = (
            self.thinking.type == "enabled" if isinstance(self.thinking, Thinking) else self.thinking,
            self.think,
            arguments.thinking if arguments else None,
            arguments.enable_thinking if arguments else None,
        )
        on = next((switch for switch in switches if switch is not None), None)
        if self.reasoning_effort is not None:
            effort = effort_named(self.reasoning_effort, "reasoning_effort")
            return Effort.NONE if on is False else effort
        if on is not None:
            return Effort.HIGH if on else Effort.NONE
        return effort_of_model(self.model) or Effort.HIGH


class Shape:
    """Builds one response, streamed or whole; the id and time are the same throughout."""

    def __init__(self, model: str, tokenizer: ChatTokenizer) -> None:
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._tokenizer = tokenizer

    def keepalive(self) -> bytes:
        """Said after a silence."""
        return sse.comment("waiting")

    def failed(self, error: GatewayError) -> bytes:
        """Ends a stream."""
        return OpenAIErrors("messages").event(error)

    def first_chunk(self) -> dict[str, Any]:
        """Says who speaks."""
        return self._chunk({"role": "assistant", "content": ""})

    def chunks(self, part: Part) -> list[dict[str, Any]]:
        """Thinking, content and calls go out in chunks of their own."""
        out = []
        if part.delta.reasoning:
            out.append(self._chunk({"reasoning_content": part.delta.reasoning}))
        if part.delta.content or part.logprobs:
            out.append(self._chunk({"content": part.delta.content}, part.logprobs))
        if part.delta.calls:
            out.append(self._chunk({"tool_calls": [call_piece(one) for one in part.delta.calls]}))
        return out

    def last_chunks(self, outcome: Outcome, *, include_usage: bool) -> list[dict[str, Any]]:
        """Why it ended; and, when asked for, the numbers."""
        out = [self._chunk({}, finish=outcome.finish)]
        if include_usage:
            out.append(self._object("chat.completion.chunk", [], **_numbers(outcome)))
        return out

    def whole(
        self, whole: Whole, calls: Sequence[ToolCall], outcome: Outcome, *, with_logprobs: bool
    ) -> dict[str, Any]:
        """The response of a request that does not stream."""
        message: dict[str, Any] = {"role": "assistant", "content": whole.content, "refusal": None}
        if whole.reasoning:
            message["reasoning_content"] = whole.reasoning
        if calls:
            message["content"] = whole.content or None
            message["tool_calls"] = [whole_call(call) for call in calls]
        choice = {
            "index": 0,
            "message": message,
            "logprobs": self._logprobs(whole.logprobs) if with_logprobs else None,
            "finish_reason": outcome.finish,
        }
        return self._object("chat.completion", [choice], **_numbers(outcome))

    def _chunk(
        self, delta: dict[str, Any], logprobs: tuple[ContentLogprob, ...] = (), finish: str | None = None
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": finish}
        if logprobs:
            choice["logprobs"] = self._logprobs(logprobs)
        return self._object("chat.completion.chunk", [choice])

    def _object(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {**self._head, "object": kind, "choices": choices, **more}

    def _logprobs(self, logprobs: tuple[ContentLogprob, ...]) -> dict[str, Any]:
        def entry(token: int, logprob: float) -> dict[str, Any]:
            raw = self._tokenizer.token_bytes(token)
            return {"token": raw.decode("utf-8", errors="replace"), "logprob": logprob, "bytes": list(raw)}

        return {
            "content": [
                {**entry(one.token, one.logprob), "top_logprobs": [entry(*other) for other in one.top]}
                for one in logprobs
            ],
            "refusal": None,
        }


def _numbers(outcome: Outcome) -> dict[str, Any]:
    usage = outcome.usage
    return {
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": outcome.reasoning_tokens},
        },
        "timings": {
            "queue_s": round(usage.queue_s, 4),
            "ttft_s": round(usage.ttft_s, 4),
            "prefill_tokens_per_s": round(usage.prefill_tokens_per_s, 1),
            "decode_tokens_per_s": round(usage.decode_tokens_per_s, 1),
            "admission": usage.admission,
        },
    }


async def _events(answer: Answer, shape: Shape, *, include_usage: bool) -> AsyncGenerator[bytes]:
    """The stream's events; the first comes once the engine has taken the request."""
    spoken = False
    async with aclosing(answer.parts()) as parts:
        async for part in parts:
            if part.progress is not None:
                yield sse.progress_comment(part.progress)
            if not spoken and (part.delta or part.logprobs or part.progress is None):
                spoken = True
                yield sse.event(shape.first_chunk())
            for chunk in shape.chunks(part):
                yield sse.event(chunk)
    for chunk in shape.last_chunks(answer.outcome, include_usage=include_usage):
        yield sse.event(chunk)
    yield sse.DONE


async def _whole(answer: Answer, shape: Shape, *, with_logprobs: bool) -> Response:
    whole = await answer.whole()
    return JSONResponse(shape.whole(whole, answer.calls, answer.outcome, with_logprobs=with_logprobs))
