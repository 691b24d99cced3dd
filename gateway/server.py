"""The HTTP application: its routes, and answers as OpenAI's clients expect them."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from google.protobuf.json_format import MessageToDict
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from gateway.answers import Answer, ContentLogprob
from gateway.api.errors import error_body, error_response, validation_error
from gateway.api.openai_chat import ChatCompletionRequest, Shape, model_object
from gateway.errors import Fault, GatewayError
from gateway.middleware import BodyLimit, RequestIds
from gateway.router import Router
from gateway.stream import EventStream, until_gone


@dataclass(frozen=True)
class ServerSettings:
    """Limits of the HTTP server.

    Attributes:
        keepalive_s: silence after which a stream gets a comment, so that nobody on the way gives it up.
        max_body_bytes: of a request.
    """

    version: str
    keepalive_s: float = 5.0
    max_body_bytes: int = 64 << 20


def create_app(router: Router, settings: ServerSettings) -> FastAPI:
    """The gateway's HTTP application on a router of the same asyncio loop."""
    app = FastAPI(title="twinspark", version=settings.version, openapi_url=None)
    app.add_middleware(BodyLimit, limit=settings.max_body_bytes)
    app.add_middleware(RequestIds)
    started = int(time.time())

    @app.exception_handler(GatewayError)
    async def _refused(_: Request, error: GatewayError) -> Response:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def _malformed(_: Request, error: RequestValidationError) -> Response:
        return error_response(validation_error(error))

    @app.exception_handler(HTTPException)
    async def _http_error(request: Request, error: HTTPException) -> Response:
        if error.status_code == 404:
            return error_response(GatewayError(Fault.NOT_FOUND, f"unknown endpoint {request.url.path}"))
        body = error_body(GatewayError(Fault.INVALID, str(error.detail)))
        return JSONResponse(body, error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def _failed(_: Request, __: Exception) -> Response:
        return error_response(GatewayError(Fault.INTERNAL, "the gateway failed; its log says why"))

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/readyz")
    async def readyz() -> Response:
        reason = router.not_ready
        if reason is None:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "not ready", "reason": reason}, 503)

    @app.get("/status")
    async def status() -> dict[str, Any]:
        engines = [
            MessageToDict(one, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
            for one in await router.statuses()
        ]
        return {"version": settings.version, "not_ready": router.not_ready, "engines": engines}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(router, started)]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        found = _model(router, started)
        if name != found["id"]:
            raise GatewayError(
                Fault.NOT_FOUND, f"no model {name!r}; this service has {found['id']!r}", param="model"
            )
        return found

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
        model = router.model
        wanted = body.chat_request(len(model.tokenizer), model.context_tokens)
        answer = await Answer.prepare(router, wanted, request.state.request_id)
        shape = Shape(
            f"chatcmpl-{uuid.uuid4().hex}", int(time.time()), body.model or model.name, answer.tokenizer
        )
        if body.stream:
            include_usage = bool(body.stream_options and body.stream_options.include_usage)
            events = _events(answer, shape, include_usage=include_usage)
            return await until_gone(request, EventStream.begin(events, settings.keepalive_s))
        return await until_gone(request, _whole(answer, shape, with_logprobs=bool(body.logprobs)))

    return app


def _model(router: Router, created: int) -> dict[str, Any]:
    model = router.model
    return model_object(model.name, created, model.context_tokens)


async def _events(answer: Answer, shape: Shape, *, include_usage: bool) -> AsyncGenerator[bytes]:
    """The stream's events as bytes; the first comes once the engine has taken the request."""
    spoken = False
    async with aclosing(answer.parts()) as parts:
        async for part in parts:
            if part.progress is not None:
                where = (
                    f"queued {part.progress.queue_position}" if part.progress.queue_position else "prefill"
                )
                yield f": {where} {part.progress.done_tokens}/{part.progress.prompt_tokens}\n\n".encode()
            if not spoken and (part.delta or part.logprobs or part.progress is None):
                spoken = True
                yield _data(shape.first_chunk())
            for chunk in shape.chunks(part):
                yield _data(chunk)
    for chunk in shape.last_chunks(answer.outcome, include_usage=include_usage):
        yield _data(chunk)
    yield b"data: [DONE]\n\n"


def _data(event: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def _whole(answer: Answer, shape: Shape, *, with_logprobs: bool) -> Response:
    reasoning, content = [], []
    logprobs: list[ContentLogprob] = []
    async with aclosing(answer.parts()) as parts:
        async for part in parts:
            reasoning.append(part.delta.reasoning)
            content.append(part.delta.content)
            logprobs += part.logprobs
    body = shape.whole(
        "".join(reasoning),
        "".join(content),
        answer.calls,
        logprobs,
        answer.outcome,
        with_logprobs=with_logprobs,
    )
    return JSONResponse(body)
