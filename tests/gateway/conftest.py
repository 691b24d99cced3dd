"""A gateway on real sockets: a scripted engine behind real gRPC, the application behind real uvicorn."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

import anthropic
import grpc
import httpx
import openai
import pytest
import pytest_asyncio
import uvicorn

from gateway.chat.segments import Segment
from gateway.chat.tokens import ChatTokenizer
from gateway.proto import engine_pb2 as pb
from gateway.proto import engine_pb2_grpc
from gateway.router import EngineAddress, Router
from gateway.server import ServerSettings, create_app
from worker.gguf.vocabulary import synthetic_vocabulary

SECRET = "s3cret"
PATIENCE_S = 20.0
Script = Callable[[pb.GenerateRequest, grpc.aio.ServicerContext], AsyncIterator[pb.GenerateReply]]


def description(fingerprint: str = "f1", context_tokens: int = 4096) -> pb.ModelDescription:
    """A model with one token a byte, a few merges and the special tokens."""
    words = synthetic_vocabulary(320)
    return pb.ModelDescription(
        name="Fake Model",
        fingerprint=fingerprint,
        context_tokens=context_tokens,
        vocabulary_size=len(words.tokens),
        vocabulary=pb.Vocabulary(
            model="gpt2",
            pre="joyai-llm",
            tokens=words.tokens,
            token_types=words.types,
            merges=words.merges,
            bos_token=words.bos,
            eos_token=words.eos,
        ),
    )


class FakeEngine(engine_pb2_grpc.EngineServicer):
    """An engine that says what its script says, and tells what becomes of the calls."""

    def __init__(self, described: pb.ModelDescription) -> None:
        self.described = described
        self.tokenizer = ChatTokenizer(described.vocabulary)
        self.script: Script = self.saying([self.tokens("ok")])
        self.requests: list[pb.GenerateRequest] = []
        self.begun = asyncio.Event()
        self.cancelled = asyncio.Event()

    def tokens(self, text: str) -> list[int]:
        """Ids of plain text."""
        return self.tokenizer.encode([Segment(text, template=False)])

    def special(self, text: str) -> int:
        """The id of a special token."""
        (token,) = self.tokenizer.encode([Segment(text, template=True)])
        return token

    def thinking(self, reasoning: str, content: str) -> list[int]:
        """Ids of a thinking answer, from inside the thinking on."""
        return [*self.tokens(reasoning), self.special("</think>"), *self.tokens(content)]

    def saying(
        self, pieces: Sequence[Sequence[int]], finish: pb.FinishReason = pb.FINISH_REASON_STOP
    ) -> Script:
        """A script of one reply a piece, ending well."""

        async def script(
            request: pb.GenerateRequest, _: grpc.aio.ServicerContext
        ) -> AsyncIterator[pb.GenerateReply]:
            for piece in pieces:
                yield pb.GenerateReply(tokens=piece)
            yield self.last(request, sum(map(len, pieces)), finish)

        return script

    def hanging(self, *replies: pb.GenerateReply) -> Script:
        """A script of these replies and then silence."""

        async def script(
            _: pb.GenerateRequest, __: grpc.aio.ServicerContext
        ) -> AsyncIterator[pb.GenerateReply]:
            for reply in replies:
                yield reply
            await asyncio.Event().wait()

        return script

    def refusing(self, code: grpc.StatusCode, message: str, *metadata: tuple[str, str]) -> Script:
        """A script of one refusal."""

        async def script(
            _: pb.GenerateRequest, context: grpc.aio.ServicerContext
        ) -> AsyncIterator[pb.GenerateReply]:
            await context.abort(code, message, metadata)
            yield pb.GenerateReply()

        return script

    def last(
        self, request: pb.GenerateRequest, tokens: int, finish: pb.FinishReason = pb.FINISH_REASON_STOP
    ) -> pb.GenerateReply:
        """The reply that ends an answer."""
        return pb.GenerateReply(
            finish_reason=finish,
            usage=pb.Usage(
                prompt_tokens=len(request.prompt_tokens),
                cached_tokens=7,
                completion_tokens=tokens,
                queue_s=0.25,
                ttft_s=0.5,
                prefill_tokens_per_s=300.0,
                decode_tokens_per_s=14.5,
                admission="warm",
            ),
        )

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateReply]:
        if dict(context.invocation_metadata()).get("authorization") != f"Bearer {SECRET}":
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no secret")
        # The generator itself hears of a cancellation only while it waits, not while a reply is being sent.
        said_all = False
        context.add_done_callback(lambda _: None if said_all else self.cancelled.set())
        self.requests.append(request)
        self.begun.set()
        async for reply in self.script(request, context):
            yield reply
        said_all = True

    async def Describe(self, _: pb.DescribeRequest, __: grpc.aio.ServicerContext) -> pb.ModelDescription:
        return self.described

    async def Status(self, _: pb.StatusRequest, __: grpc.aio.ServicerContext) -> pb.EngineStatus:
        return pb.EngineStatus(engine_id="fake", state="ready", model=self.described.name, queue_limit=3)


@dataclass
class EngineServer:
    """A fake engine with its server."""

    engine: FakeEngine
    server: grpc.aio.Server
    address: EngineAddress

    async def die(self) -> None:
        """Ends all calls and connections at once."""
        await self.server.stop(grace=None)


@dataclass
class Gateway:
    """A served gateway; ``engine`` is the one it was started with."""

    engine: FakeEngine
    backend: EngineServer
    router: Router
    port: int
    openai: openai.AsyncOpenAI
    anthropic: anthropic.AsyncAnthropic
    http: httpx.AsyncClient

    def chat(self, **fields: object) -> Awaitable[object]:
        """One request through the official client."""
        body = {"model": "any", "messages": [{"role": "user", "content": "hello"}], **fields}
        return self.openai.chat.completions.create(**body)  # type: ignore[no-any-return, call-overload]

    async def post(self, **fields: object) -> httpx.Response:
        """One request as plain HTTP."""
        body = {"messages": [{"role": "user", "content": "hello"}], **fields}
        return await self.http.post("/v1/chat/completions", json=body)


StartEngine = Callable[..., Awaitable[EngineServer]]
Serve = Callable[..., Awaitable[Gateway]]


@pytest_asyncio.fixture
async def start_engine() -> AsyncIterator[StartEngine]:
    """Starts fake engines; all end with the test."""
    async with AsyncExitStack() as stack:

        async def start(name: str = "fake", **described: object) -> EngineServer:
            engine = FakeEngine(description(**described))  # type: ignore[arg-type]
            server = grpc.aio.server()
            engine_pb2_grpc.add_EngineServicer_to_server(engine, server)
            port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            stack.push_async_callback(server.stop, None)
            return EngineServer(engine, server, EngineAddress(name, f"127.0.0.1:{port}", SECRET))

        yield start


@pytest_asyncio.fixture
async def serve(start_engine: StartEngine) -> AsyncIterator[Serve]:
    """Starts gateways with one fake engine each; keywords are those of the settings."""
    async with AsyncExitStack() as stack:

        async def start(*, ready: bool = True, context_tokens: int = 4096, **settings: object) -> Gateway:
            backend = await start_engine(context_tokens=context_tokens)
            router = Router()
            if ready:
                await router.set_engines([backend.address])
            stack.push_async_callback(router.close)
            listening = socket.create_server(("127.0.0.1", 0), backlog=64)
            app = create_app(router, ServerSettings("0", **settings))  # type: ignore[arg-type]
            server = uvicorn.Server(
                uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=1)
            )
            task = asyncio.create_task(server.serve(sockets=[listening]))

            async def stop() -> None:
                server.should_exit = True
                await asyncio.wait_for(task, PATIENCE_S)

            stack.push_async_callback(stop)
            port = listening.getsockname()[1]
            url = f"http://127.0.0.1:{port}"
            client = openai.AsyncOpenAI(api_key="x", base_url=f"{url}/v1", max_retries=0, timeout=PATIENCE_S)
            other = anthropic.AsyncAnthropic(api_key="x", base_url=url, max_retries=0, timeout=PATIENCE_S)
            http = httpx.AsyncClient(base_url=url, timeout=PATIENCE_S)
            for one in (client.close, other.close, http.aclose):
                stack.push_async_callback(one)
            return Gateway(backend.engine, backend, router, port, client, other, http)

        yield start


@pytest_asyncio.fixture
async def gateway(serve: Serve) -> Gateway:
    """A gateway with default settings."""
    return await serve()


@pytest.fixture
def patience_s() -> float:
    """Seconds after which a wait for something that must happen is a failure."""
    return PATIENCE_S
