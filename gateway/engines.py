"""One engine as the gateway calls it: gRPC in, tokens out, its errors in the gateway's terms."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress

import grpc

from gateway.errors import Fault, GatewayError
from gateway.proto import engine_pb2 as pb
from gateway.proto import engine_pb2_grpc

_MAX_MESSAGE_BYTES = 64 << 20
_ANSWER_S = 10.0
_DESCRIBE_S = 60.0
_OPTIONS = [
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
]


class EngineClient:
    """A connection to the engine at ``address``; every call carries the cluster's secret."""

    def __init__(self, address: str, secret: str) -> None:
        self.address = address
        self.streams = 0
        self._closed = False
        self._metadata = (("authorization", f"Bearer {secret}"),)
        self._channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        self._stub = engine_pb2_grpc.EngineStub(self._channel)

    async def generate(self, request: pb.GenerateRequest) -> AsyncGenerator[pb.GenerateReply]:
        """Streams one request's replies. Leaving the iteration early, in whatever way, cancels the call.

        Raises:
            GatewayError: the engine refused or failed the request, or is gone.
        """
        call = self._stub.Generate(request, metadata=self._metadata)
        self.streams += 1
        try:
            async for reply in call:
                yield reply
        except grpc.aio.AioRpcError as error:
            raise gateway_error(error) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._closed and task is not None and not task.cancelling():
                raise _gone() from None  # the connection was closed under the call; nobody cancelled us
            raise
        finally:
            self.streams -= 1
            call.cancel()

    async def describe(self) -> pb.ModelDescription:
        """What the engine serves, its vocabulary included."""
        try:
            description: pb.ModelDescription = await self._stub.Describe(
                pb.DescribeRequest(), metadata=self._metadata, timeout=_DESCRIBE_S, wait_for_ready=True
            )
        except grpc.aio.AioRpcError as error:
            raise gateway_error(error) from error
        return description

    async def status(self) -> pb.EngineStatus:
        """The engine's state as of its last step."""
        try:
            status: pb.EngineStatus = await self._stub.Status(
                pb.StatusRequest(), metadata=self._metadata, timeout=_ANSWER_S
            )
        except grpc.aio.AioRpcError as error:
            raise gateway_error(error) from error
        return status

    async def drain(self, timeout_s: float) -> int:
        """Refuses new requests and waits for running ones; returns how many were left when the time was
        over.
        """
        try:
            reply = await self._stub.Drain(
                pb.DrainRequest(timeout_s=timeout_s), metadata=self._metadata, timeout=timeout_s + _ANSWER_S
            )
        except grpc.aio.AioRpcError as error:
            raise gateway_error(error) from error
        return int(reply.unfinished)

    async def close(self) -> None:
        """Ends the connection and its calls."""
        self._closed = True
        await self._channel.close(grace=None)


def gateway_error(error: grpc.aio.AioRpcError) -> GatewayError:
    """An engine's status in the gateway's terms."""
    code, message = error.code(), error.details() or "the engine gave no reason"
    metadata = {key: str(value) for key, value in error.trailing_metadata() or ()}
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return GatewayError(Fault.INVALID, message)
    if code is grpc.StatusCode.OUT_OF_RANGE:
        numbers = {}
        with suppress(KeyError, ValueError):
            numbers = {"n_prompt_tokens": int(metadata["n-prompt-tokens"]), "n_ctx": int(metadata["n-ctx"])}
        return GatewayError(Fault.CONTEXT_LENGTH, message, numbers=numbers)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        retry_after_s = 1.0
        with suppress(KeyError, ValueError):
            retry_after_s = float(metadata["retry-after-s"])
        return GatewayError(Fault.BUSY, message, retry_after_s=retry_after_s)
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED):
        return _gone()
    return GatewayError(Fault.INTERNAL, message)


def _gone() -> GatewayError:
    return GatewayError(
        Fault.UNAVAILABLE,
        "the engine went away; it is being restarted, send the request again in a moment",
        retry_after_s=2.0,
    )
