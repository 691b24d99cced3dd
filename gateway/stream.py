"""Responses that notice when nobody listens any more, and streams that are never silent for long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from typing import Protocol

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.errors import GatewayError

_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


class Voice(Protocol):
    """How an API's stream speaks beside its events."""

    def keepalive(self) -> bytes:
        """What is sent after a silence."""

    def failed(self, error: GatewayError) -> bytes:
        """What ends a stream whose headers are out already."""


async def until_gone(request: Request, work: Awaitable[Response]) -> Response:
    """Does the work unless the client disconnects first; then the work is cancelled at once."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        return Response(status_code=499)  # nobody reads it
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A server-sent-event response that ends its source as soon as the client is gone.

    The first event is awaited before the headers go out, so that a refused request still gets its proper
    status.
    """

    def __init__(self, events: AsyncGenerator[bytes], first: bytes, voice: Voice, keepalive_s: float) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._events = events
        self._first = first
        self._voice = voice
        self._keepalive_s = keepalive_s

    @classmethod
    async def begin(cls, events: AsyncGenerator[bytes], voice: Voice, keepalive_s: float) -> EventStream:
        """Starts the source, waiting no longer for its first event than for any other."""
        pending = asyncio.ensure_future(anext(events))
        try:
            await asyncio.wait((pending,), timeout=keepalive_s)
        except asyncio.CancelledError:
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)
            raise
        if pending.done():
            return cls(events, pending.result(), voice, keepalive_s)
        return cls(_resumed(pending, events), voice.keepalive(), voice, keepalive_s)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        sending = asyncio.ensure_future(self._send_all(send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((sending, gone), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            for task in (sending, gone):
                task.cancel()
            await asyncio.gather(sending, gone, return_exceptions=True)

    async def _send_all(self, send: Send) -> None:
        async def push(data: bytes) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": True})

        try:
            await push(self._first)
            kept_alive = _with_keepalive(self._events, self._voice, self._keepalive_s)
            async with aclosing(kept_alive) as events:
                async for event in events:
                    await push(event)
        except GatewayError as error:
            await push(self._voice.failed(error))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _resumed(pending: asyncio.Future[bytes], events: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """The events from one that is already awaited on."""
    try:
        yield await pending
        async for event in events:
            yield event
    finally:
        pending.cancel()
        await asyncio.gather(pending, return_exceptions=True)
        await events.aclose()


async def _with_keepalive(
    events: AsyncGenerator[bytes], voice: Voice, keepalive_s: float
) -> AsyncGenerator[bytes]:
    """The events, and a sign of life after every silence of ``keepalive_s``."""
    pending: asyncio.Future[bytes] | None = None
    try:
        while True:
            pending = pending or asyncio.ensure_future(anext(events))
            await asyncio.wait((pending,), timeout=keepalive_s)
            if not pending.done():
                yield voice.keepalive()
                continue
            done, pending = pending, None
            try:
                yield done.result()
            except StopAsyncIteration:
                return
    finally:
        if pending is not None:
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)
        await events.aclose()
