"""What every request passes: an id for its logs, and a limit on its size."""

from __future__ import annotations

import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.api.errors import error_response
from gateway.errors import Fault, GatewayError


class RequestIds:
    """Gives every request an id, the client's own if it sends one, and says it in the response,
    under OpenAI's name and Anthropic's."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        request_id = given if given.isascii() and given.isprintable() and 0 < len(given) <= 128 else ""
        request_id = request_id.replace(" ", "_") or uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                said = [(name, request_id.encode()) for name in (b"x-request-id", b"request-id")]
                message["headers"] = [*message["headers"], *said]
            await send(message)

        await self._app(scope, receive, send_with_id)


class BodyLimit:
    """Refuses bodies over a limit, whether or not their length is announced."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > self._limit:
            await self._refuse(scope, receive, send)
            return
        seen = 0
        too_large = False

        async def counted() -> Message:
            nonlocal seen, too_large
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._limit:
                too_large = True
                raise _TooLargeError
            return message

        async def unless_too_large(message: Message) -> None:
            if not too_large:
                await send(message)

        try:
            await self._app(scope, counted, unless_too_large)
        except Exception:
            if not too_large:
                raise
        if too_large:  # whatever the application made of the interrupted reading
            await self._refuse(scope, receive, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = f"the body is larger than {self._limit} bytes; send fewer or shorter messages"
        await error_response(GatewayError(Fault.TOO_LARGE, message), scope)(scope, receive, send)


class _TooLargeError(Exception):
    """Ends the reading of a body that is over the limit."""
