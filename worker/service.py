"""The engine's gRPC service: messages in and out, on one asyncio loop beside the engine's thread."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from gateway.proto import engine_pb2 as pb
from gateway.proto import engine_pb2_grpc
from kernels.sampling import SamplingParams
from worker.bank.banks import TokenId
from worker.engine import Engine
from worker.errors import BusyError, DrainingError, PromptTooLongError, RequestError, TwinsparkError
from worker.memory import available_bytes
from worker.plan import MemoryPlan
from worker.schedule.request import (
    Event,
    Failed,
    Finished,
    FinishReason,
    Progress,
    Request,
    RequestId,
    Token,
    Usage,
)

log = logging.getLogger(__name__)

SERVICE = pb.DESCRIPTOR.services_by_name["Engine"].full_name
_MAX_MESSAGE_BYTES = 64 << 20
_DRAIN_POLL_S = 0.05
_FINISH_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}


@dataclass(frozen=True)
class Served:
    """What an engine serves, fixed from its start on."""

    engine_id: str
    version: str
    description: pb.ModelDescription
    plan: MemoryPlan


class EngineService(engine_pb2_grpc.EngineServicer):
    """Answers for one engine. Built on the loop it answers on; :meth:`hear` is the engine's sink."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._started_at = time.monotonic()
        self._loop = asyncio.get_running_loop()
        self._streams: dict[RequestId, asyncio.Queue[list[Event]]] = {}
        self._engine: Engine | None = None
        self._draining = False

    def attach(self, engine: Engine) -> None:
        """Names the engine to answer for, before the first call."""
        self._engine = engine

    def hear(self, events: Sequence[Event]) -> None:
        """Takes a step's events on the engine's thread."""
        self._loop.call_soon_threadsafe(self._dispatch, events)

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateReply]:
        engine = self._attached()
        wanted = _request(request)
        if wanted.id in self._streams:
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, f"request id {wanted.id!r} is in use")
        stream: asyncio.Queue[list[Event]] = asyncio.Queue()
        self._streams[wanted.id] = stream
        ended = False
        try:
            engine.submit(wanted)
            while not ended:
                events = await stream.get()
                last = events[-1]
                if isinstance(last, Failed):
                    ended = True
                    await _abort(context, last.error)
                ended = isinstance(last, Finished)
                yield _reply(events)
        finally:
            del self._streams[wanted.id]
            if not ended:
                engine.cancel(wanted.id)

    async def Describe(
        self, request: pb.DescribeRequest, context: grpc.aio.ServicerContext
    ) -> pb.ModelDescription:
        return self._served.description

    async def Status(self, request: pb.StatusRequest, context: grpc.aio.ServicerContext) -> pb.EngineStatus:
        engine, served = self._attached(), self._served
        view, plan = engine.view, served.plan
        return pb.EngineStatus(
            engine_id=served.engine_id,
            state="draining" if self._draining else "ready",
            model=served.description.name,
            version=served.version,
            uptime_s=time.monotonic() - self._started_at,
            running=view.running,
            queued=view.queued,
            queue_limit=engine.limits.queue,
            context_tokens=engine.limits.context,
            banks=[
                pb.BankStatus(
                    bank=number,
                    state=bank.state,
                    tokens=bank.tokens,
                    request_id=bank.request or "",
                    idle_s=bank.idle_s,
                )
                for number, bank in enumerate(view.banks)
            ],
            memory=pb.MemoryStatus(
                plan=[pb.MemoryItem(name=item.name, bytes=item.bytes, note=item.note) for item in plan.items],
                planned_bytes=plan.total_bytes,
                available_at_start_bytes=plan.available_bytes,
                available_bytes=available_bytes(),
                pages_total=view.pages_total,
                pages_free=view.pages_free,
            ),
            counters=pb.Counters(**vars(view.counters)),
        )

    async def Drain(self, request: pb.DrainRequest, context: grpc.aio.ServicerContext) -> pb.DrainReply:
        engine = self._attached()
        self._draining = True
        engine.drain()
        give_up_at = time.monotonic() + request.timeout_s
        while self._streams and time.monotonic() < give_up_at:
            await asyncio.sleep(_DRAIN_POLL_S)
        return pb.DrainReply(unfinished=len(self._streams))

    def _attached(self) -> Engine:
        assert self._engine is not None, "the server starts after the engine is attached"
        return self._engine

    def _dispatch(self, events: Sequence[Event]) -> None:
        by_request: dict[RequestId, list[Event]] = {}
        for event in events:
            by_request.setdefault(event.request, []).append(event)
        for request, group in by_request.items():
            stream = self._streams.get(request)
            if stream is not None:  # a cancelled request may still have events on their way
                stream.put_nowait(group)


async def start_server(service: EngineService, host: str, secret: str) -> tuple[grpc.aio.Server, int]:
    """Serves on a free port of ``host``, with standard health checking and reflection; returns server and
    port.
    """
    server = grpc.aio.server(
        interceptors=[_SecretInterceptor(secret)],
        options=[
            ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
            ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
            ("grpc.so_reuseport", 0),
        ],
    )
    engine_pb2_grpc.add_EngineServicer_to_server(service, server)
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    for name in ("", SERVICE):
        await health_servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
    reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    port = server.add_insecure_port(f"{host}:0")
    await server.start()
    return server, port


class _SecretInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses calls to the engine without the cluster's secret; health checking and reflection stay open."""

    def __init__(self, secret: str) -> None:
        self._expected = f"Bearer {secret}".encode()

        async def refuse(request: object, context: grpc.aio.ServicerContext) -> None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the call lacks the cluster's secret")

        self._refusal = grpc.unary_unary_rpc_method_handler(refuse)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        if details.method.startswith(f"/{SERVICE}/"):
            given = dict(details.invocation_metadata or ()).get("authorization", "")
            if not hmac.compare_digest(str(given).encode(), self._expected):
                return self._refusal
        return await continuation(details)


def _request(message: pb.GenerateRequest) -> Request:
    sampling = message.sampling
    return Request(
        id=RequestId(message.request_id or uuid.uuid4().hex),
        prompt=[TokenId(token) for token in message.prompt_tokens],
        sampling=SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p or 1.0,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            frequency_penalty=sampling.frequency_penalty,
            presence_penalty=sampling.presence_penalty,
            repetition_penalty=sampling.repetition_penalty or 1.0,
            logit_bias=dict(sampling.logit_bias),
            seed=sampling.seed,
        ),
        max_tokens=sampling.max_tokens,
        stop_tokens=frozenset(TokenId(token) for token in sampling.stop_tokens),
        logprobs=sampling.logprobs,
        top_logprobs=sampling.top_logprobs,
        ignore_eos=sampling.ignore_eos,
    )


def _reply(events: Sequence[Event]) -> pb.GenerateReply:
    reply = pb.GenerateReply()
    for event in events:
        if isinstance(event, Token):
            reply.tokens.append(event.token)
            if event.usage is not None:
                reply.usage.CopyFrom(_usage(event.usage))
            if event.logprob is not None:
                reply.logprobs.add(
                    logprob=event.logprob.logprob,
                    top_tokens=event.logprob.top_tokens,
                    top_logprobs=event.logprob.top_logprobs,
                )
        elif isinstance(event, Progress):
            reply.prefill.done_tokens = event.done_tokens
            reply.prefill.prompt_tokens = event.prompt_tokens
            reply.prefill.queue_position = event.queue_position
        elif isinstance(event, Finished):
            reply.finish_reason = _FINISH_REASONS[event.reason]
            reply.usage.CopyFrom(_usage(event.usage))
    return reply


def _usage(usage: Usage) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
        queue_s=usage.queue_s,
        ttft_s=usage.ttft_s,
        prefill_tokens_per_s=usage.prefill_tokens_per_s,
        decode_tokens_per_s=usage.decode_tokens_per_s,
        admission=usage.admission.value,
        stop_token=usage.stop_token or 0,
        has_stop_token=usage.stop_token is not None,
    )


async def _abort(context: grpc.aio.ServicerContext, error: TwinsparkError) -> None:
    """Ends the call with the status that engine.proto promises for the error."""
    code = grpc.StatusCode.INTERNAL
    metadata: tuple[tuple[str, str], ...] = ()
    if isinstance(error, PromptTooLongError):
        code = grpc.StatusCode.OUT_OF_RANGE
        metadata = (("n-prompt-tokens", str(error.prompt_tokens)), ("n-ctx", str(error.context_tokens)))
    elif isinstance(error, RequestError):
        code = grpc.StatusCode.INVALID_ARGUMENT
    elif isinstance(error, BusyError):
        code, metadata = grpc.StatusCode.RESOURCE_EXHAUSTED, (("retry-after-s", f"{error.retry_after_s:g}"),)
    elif isinstance(error, DrainingError):
        code = grpc.StatusCode.UNAVAILABLE
    await context.abort(code, str(error), metadata)
