"""OpenAI's chat completions: its request's schema, and its answers and stream chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictInt, StrictStr, model_validator

from gateway.answers import ContentLogprob, Outcome, Part
from gateway.api.fields import Body, Number, Text
from gateway.api.openai_tools import (
    MessageToolCall,
    NamedToolChoice,
    ToolDefinition,
    call_piece,
    check_calls,
    offered_tools,
    tool_choice,
    whole_call,
)
from gateway.chat.conversation import ChatRequest, Effort, Message, Role, Sampling, ToolCall
from gateway.chat.tokens import ChatTokenizer
from gateway.errors import Fault, GatewayError

_ROLES = {
    "system": Role.SYSTEM,
    "developer": Role.SYSTEM,
    "user": Role.USER,
    "assistant": Role.ASSISTANT,
    "tool": Role.TOOL,
}
_EFFORTS = {
    "none": Effort.NONE,
    "minimal": Effort.HIGH,
    "low": Effort.HIGH,
    "medium": Effort.HIGH,
    "high": Effort.HIGH,
    "xhigh": Effort.HIGH,
    "max": Effort.MAX,
}
_EFFORT_OF_MODEL = {"deepseek-chat": Effort.NONE, "deepseek-reasoner": Effort.HIGH}
_MAX_EFFORT_CONTEXT = 393216
"""Think Max is meant for contexts from here on; in shorter ones it is served as high."""


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
    """``thinking`` as DeepSeek's own API has it."""

    type: Literal["enabled", "disabled"]


class TemplateArguments(Body):
    """``chat_template_kwargs`` as other servers have it."""

    thinking: StrictBool | None = None
    enable_thinking: StrictBool | None = None


class ResponseFormat(Body):
    """``response_format``; only plain text is served."""

    type: StrictStr


class ChatCompletionRequest(Body):
    """The body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    model: StrictStr = ""
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    temperature: Annotated[Number, Field(ge=0, le=100)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[StrictInt, Field(ge=-1)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[Number, Field(ge=0.01, le=100)] | None = None
    logit_bias: dict[str, Annotated[Number, Field(ge=-100, le=100)]] | None = None
    seed: StrictInt | None = None
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
        given = {
            "max_tokens": self.max_completion_tokens or self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": None if self.top_k is None else max(self.top_k, 0),
            "min_p": self.min_p,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
            "repetition_penalty": self.repetition_penalty,
            "logit_bias": self._logit_bias(vocabulary_size),
            "seed": self.seed,
            "logprobs": self.logprobs,
            "top_logprobs": self.top_logprobs,
        }
        sampling = Sampling(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        effort = self._effort()
        if effort is Effort.MAX and context_tokens < _MAX_EFFORT_CONTEXT:
            effort = Effort.HIGH
        messages = tuple(one.message() for one in self.messages)
        check_calls(messages)
        tools = offered_tools(self.tools or ())
        return ChatRequest(
            messages,
            effort,
            sampling,
            stops,
            tools,
            tool_choice(self.tool_choice, tools),
            parallel_tool_calls=self.parallel_tool_calls is not False,
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

    def _logit_bias(self, vocabulary_size: int) -> dict[int, float] | None:
        if self.logit_bias is None:
            return None
        bias = {}
        for token, value in self.logit_bias.items():
            if not token.isascii() or not token.isdigit() or int(token) >= vocabulary_size:
                raise GatewayError(
                    Fault.INVALID,
                    f"logit_bias: {token!r} is no token id below {vocabulary_size}",
                    param="logit_bias",
                )
            bias[int(token)] = value
        return bias

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
            if self.reasoning_effort not in _EFFORTS:
                allowed = ", ".join(_EFFORTS)
                raise GatewayError(
                    Fault.INVALID,
                    f"reasoning_effort: {self.reasoning_effort!r} is none of {allowed}",
                    param="reasoning_effort",
                )
            return Effort.NONE if on is False else _EFFORTS[self.reasoning_effort]
        if on is not None:
            return Effort.HIGH if on else Effort.NONE
        return _EFFORT_OF_MODEL.get(self.model, Effort.HIGH)


class Shape:
    """Builds one response, streamed or whole; the id and time are the same throughout."""

    def __init__(self, response_id: str, created: int, model: str, tokenizer: ChatTokenizer) -> None:
        self._head = {"id": response_id, "created": created, "model": model}
        self._tokenizer = tokenizer

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
        self,
        reasoning: str,
        content: str,
        calls: Sequence[ToolCall],
        logprobs: list[ContentLogprob],
        outcome: Outcome,
        *,
        with_logprobs: bool,
    ) -> dict[str, Any]:
        """The response of a request that does not stream."""
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["content"] = content or None
            message["tool_calls"] = [whole_call(call) for call in calls]
        choice = {
            "index": 0,
            "message": message,
            "logprobs": self._logprobs(logprobs) if with_logprobs else None,
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

    def _logprobs(self, logprobs: tuple[ContentLogprob, ...] | list[ContentLogprob]) -> dict[str, Any]:
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


def model_object(name: str, created: int, context_tokens: int) -> dict[str, Any]:
    """One entry of ``GET /v1/models``."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "twinspark",
        "context_length": context_tokens,
    }
