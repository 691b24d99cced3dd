"""Anthropic's messages: the routes, answers whole and as events."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from pydantic_core import from_json
from starlette.responses import JSONResponse, Response

from gateway.answers import Answer, Outcome, Part, prompt_tokens
from gateway.api import sse
from gateway.api.anthropic_errors import AnthropicErrors
from gateway.api.anthropic_request import CountTokensRequest, MessagesRequest
from gateway.api.service import Service
from gateway.chat.answer import CallDelta
from gateway.chat.conversation import ToolCall
from gateway.errors import GatewayError
from gateway.stream import EventStream, until_gone


def routes(service: Service) -> APIRouter:
    """``POST /messages`` and ``POST /messages/count_tokens``."""
    api = APIRouter()

    @api.post("/messages")
    async def messages(body: MessagesRequest, request: Request) -> Response:
        model = service.router.model
        wanted = body.chat_request(len(model.tokenizer), model.context_tokens)
        request_id = request.state.request_id
        answer = await Answer.prepare(service.router, wanted, request_id)
        name = body.model or model.name
        if body.stream:
            events = MessageEvents(name, answer.prompt_tokens, AnthropicErrors(request_id))
            stream = EventStream.begin(_events(answer, events), events, service.keepalive_s)
            return await until_gone(request, stream)
        return await until_gone(request, _whole(answer, name))

    @api.post("/messages/count_tokens")
    async def count_tokens(body: CountTokensRequest) -> dict[str, int]:
        model = service.router.model
        wanted = body.chat_request(len(model.tokenizer), model.context_tokens)
        return {"input_tokens": len(await prompt_tokens(model, wanted))}

    return api


class MessageEvents:
    """Builds one stream's events: blocks one after the other, each opened and closed."""

    def __init__(self, model: str, prompt_tokens: int, errors: AnthropicErrors) -> None:
        self._id = _new_id()
        self._model = model
        self._prompt_tokens = prompt_tokens
        self._errors = errors
        self._begun = False
        self._blocks = 0
        self._open = ""

    def keepalive(self) -> bytes:
        """Said after a silence, and while the prompt is being read."""
        return self.begin() + _event("ping")

    def failed(self, error: GatewayError) -> bytes:
        """Ends the stream."""
        return self._errors.event(error)

    def begin(self) -> bytes:
        """The message without content, once."""
        if self._begun:
            return b""
        self._begun = True
        usage = {**_usage(Outcome()), "input_tokens": self._prompt_tokens}
        return _event("message_start", message=_message(self._id, self._model, [], None, None, usage))

    def part(self, part: Part) -> bytes:
        """A piece of the answer."""
        out = b"" if part.progress is not None else self.begin()
        if part.delta.reasoning:
            out += self._in("thinking", {"thinking": "", "signature": ""})
            out += self._delta("thinking_delta", thinking=part.delta.reasoning)
        if part.delta.content:
            out += self._in("text", {"text": ""})
            out += self._delta("text_delta", text=part.delta.content)
        for call in part.delta.calls:
            out += self._call(call)
        return out

    def end(self, outcome: Outcome) -> bytes:
        """Why it ended, and the numbers."""
        reason, sequence = _stop(outcome)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        out = self.begin() + self._close()
        return out + _event("message_delta", delta=delta, usage=_usage(outcome)) + _event("message_stop")

    def _call(self, call: CallDelta) -> bytes:
        out = b""
        if call.id:
            out += self._close()
            out += self._in("tool_use", {"id": _tool_use_id(call.id), "name": call.name, "input": {}})
        if call.arguments:
            out += self._delta("input_json_delta", partial_json=call.arguments)
        return out

    def _in(self, kind: str, empty: dict[str, Any]) -> bytes:
        """Opens a block of this kind unless it is open."""
        if self._open == kind:
            return b""
        out = self._close()
        self._open = kind
        block = {"type": kind, **empty}
        return out + _event("content_block_start", index=self._blocks, content_block=block)

    def _delta(self, kind: str, **fields: str) -> bytes:
        return _event("content_block_delta", index=self._blocks, delta={"type": kind, **fields})

    def _close(self) -> bytes:
        if not self._open:
            return b""
        out = self._delta("signature_delta", signature=self._id) if self._open == "thinking" else b""
        out += _event("content_block_stop", index=self._blocks)
        self._open = ""
        self._blocks += 1
        return out


async def _events(answer: Answer, events: MessageEvents) -> AsyncGenerator[bytes]:
    """The stream; its first event comes once the engine has taken the request."""
    async with aclosing(answer.parts()) as parts:
        async for part in parts:
            if part.progress is not None:
                yield events.keepalive()
            if piece := events.part(part):
                yield piece
    yield events.end(answer.outcome)


async def _whole(answer: Answer, model: str) -> Response:
    whole = await answer.whole()
    message_id = _new_id()
    content: list[dict[str, Any]] = []
    if whole.reasoning:
        content.append({"type": "thinking", "thinking": whole.reasoning, "signature": message_id})
    if whole.content:
        content.append({"type": "text", "text": whole.content})
    content += [_tool_use(call) for call in answer.calls]
    reason, sequence = _stop(answer.outcome)
    return JSONResponse(_message(message_id, model, content, reason, sequence, _usage(answer.outcome)))


def _message(
    message_id: str,
    model: str,
    content: list[dict[str, Any]],
    reason: str | None,
    sequence: str | None,
    usage: dict[str, Any],
) -> dict[str, Any]:
    return {
        "id": message_id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": reason,
        "stop_sequence": sequence,
        "usage": usage,
    }


def _tool_use(call: ToolCall) -> dict[str, Any]:
    """A call; of arguments that were cut off, what is complete."""
    try:
        given = from_json(call.arguments or "{}", allow_partial=True)
    except ValueError:
        given = None
    arguments = given if isinstance(given, dict) else {"arguments": call.arguments}
    return {"type": "tool_use", "id": _tool_use_id(call.id), "name": call.name, "input": arguments}


def _tool_use_id(call_id: str) -> str:
    return f"toolu_{call_id.rpartition('_')[2]}"


def _new_id() -> str:
    return f"msg_{uuid.uuid4().hex}"


def _stop(outcome: Outcome) -> tuple[str, str | None]:
    """``stop_reason`` and ``stop_sequence``."""
    if outcome.stop_string:
        return "stop_sequence", outcome.stop_string
    return {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}[outcome.finish], None


def _usage(outcome: Outcome) -> dict[str, Any]:
    """This API counts cached tokens apart."""
    usage = outcome.usage
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": outcome.reasoning_tokens},
    }


def _event(kind: str, **fields: Any) -> bytes:
    return sse.event({"type": kind, **fields}, kind)
