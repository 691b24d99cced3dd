"""The HTTP application: every API's routes, errors in each API's own shape, and the service's own state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from google.protobuf.json_format import MessageToDict
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from gateway.api import anthropic_messages, models, openai_chat
from gateway.api.errors import error_response, error_shape, validation_error
from gateway.api.service import Service
from gateway.errors import Fault, GatewayError
from gateway.middleware import BodyLimit, RequestIds
from gateway.router import Router

_APIS = (models, openai_chat, anthropic_messages)


@dataclass(frozen=True)
class ServerSettings:
    """Limits of the HTTP server.

    Attributes:
        keepalive_s: silence after which a stream says that it is alive, lest somebody on the way gives it up.
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
    _translate_errors(app)
    service = Service(router, settings.keepalive_s)
    for api in _APIS:
        routes = api.routes(service)
        app.include_router(routes, prefix="/v1")
        app.include_router(routes)  # clients differ in whether their base address has the version

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

    return app


def _translate_errors(app: FastAPI) -> None:
    @app.exception_handler(GatewayError)
    async def _refused(request: Request, error: GatewayError) -> Response:
        return error_response(error, request.scope)

    @app.exception_handler(RequestValidationError)
    async def _malformed(request: Request, error: RequestValidationError) -> Response:
        return error_response(validation_error(error), request.scope)

    @app.exception_handler(HTTPException)
    async def _http_error(request: Request, error: HTTPException) -> Response:
        if error.status_code == 404:
            message = f"unknown endpoint {request.url.path}"
            return error_response(GatewayError(Fault.NOT_FOUND, message), request.scope)
        body = error_shape(request.scope).body(GatewayError(Fault.INVALID, str(error.detail)))
        return JSONResponse(body, error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def _failed(request: Request, _: Exception) -> Response:
        error = GatewayError(Fault.INTERNAL, "the gateway failed; its log says why")
        return error_response(error, request.scope)
