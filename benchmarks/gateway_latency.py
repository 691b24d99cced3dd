"""What the gateway adds to each token of a stream.

Three processes: an engine that emits tokens at a fixed pace over gRPC, the gateway, and this one, an HTTP
client that reads all streams. Every token says when the engine emitted it, on the clock that all processes of
a machine share, so the way of each through gRPC, gateway and HTTP is measured. A client that asks the engine
itself over gRPC, without the gateway, says how much of that the transport and the busy machine take anyway;
the difference is what the gateway adds.

    python benchmarks/gateway_latency.py --streams 8 --tokens 220 --tokens-per-s 30 --rounds 6
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import re
import shlex
import socket
import sys
import time
from collections.abc import AsyncIterator, Sequence
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path

import grpc
import uvicorn

sys.path.insert(0, str(Path(__file__).parents[1]))

from gateway.chat.segments import Segment
from gateway.chat.tokens import ChatTokenizer
from gateway.proto import engine_pb2 as pb
from gateway.proto import engine_pb2_grpc
from gateway.router import EngineAddress, Router
from gateway.server import ServerSettings, create_app
from worker.gguf.vocabulary import synthetic_vocabulary

RESULT = Path(__file__).parent / "results" / "gateway_latency.json"
_SECRET = "benchmark"
_WARM_UP_TOKENS = 20
_START_S = 60.0
_DIGITS = 16
"""Of a stamp: nanoseconds of the monotonic clock."""
_STAMP = re.compile(rb'"content":"(\d{%d}) "' % _DIGITS)


def vocabulary() -> pb.Vocabulary:
    """A small one; the way of a token does not depend on it."""
    words = synthetic_vocabulary(320)
    return pb.Vocabulary(
        model="gpt2",
        pre="joyai-llm",
        tokens=words.tokens,
        token_types=words.types,
        merges=words.merges,
        bos_token=words.bos,
        eos_token=words.eos,
    )


class PacedEngine(engine_pb2_grpc.EngineServicer):
    """Emits one reply a stream at every tick, for all streams at once, as an engine's steps do.

    A reply's tokens are the digits of the time of its emission and a space.
    """

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        tokenizer = ChatTokenizer(vocabulary())
        self._token = {one: tokenizer.encode([Segment(one, template=False)])[0] for one in "0123456789 "}

    async def Generate(  # noqa: N802, the name is gRPC's
        self, request: pb.GenerateRequest, _: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateReply]:
        replies = request.sampling.max_tokens
        for _reply in range(replies):
            await asyncio.sleep(self._period_s - time.monotonic() % self._period_s)
            stamp = f"{time.monotonic_ns():0{_DIGITS}d} "
            yield pb.GenerateReply(tokens=[self._token[digit] for digit in stamp])
        yield pb.GenerateReply(
            finish_reason=pb.FINISH_REASON_LENGTH,
            usage=pb.Usage(prompt_tokens=len(request.prompt_tokens), completion_tokens=replies),
        )

    async def Describe(  # noqa: N802
        self, _: pb.DescribeRequest, __: grpc.aio.ServicerContext
    ) -> pb.ModelDescription:
        return pb.ModelDescription(
            name="paced", fingerprint="paced", context_tokens=1 << 20, vocabulary=vocabulary()
        )


def run_engine(period_s: float, ready: Connection) -> None:
    """The engine's process; tells its port."""

    async def serve() -> None:
        server = grpc.aio.server()
        engine_pb2_grpc.add_EngineServicer_to_server(PacedEngine(period_s), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        ready.send(port)
        await server.wait_for_termination()

    asyncio.run(serve())


def run_gateway(engine_port: int, ready: Connection) -> None:
    """The gateway's process; tells its port."""

    async def serve() -> None:
        router = Router()
        await router.set_engines([EngineAddress("paced", f"127.0.0.1:{engine_port}", _SECRET)])
        listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
        ready.send(listening.getsockname()[1])
        app = create_app(router, ServerSettings("benchmark"))
        await uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off")).serve([listening])

    asyncio.run(serve())


async def through_gateway(port: int, streams: int, tokens: int) -> list[float]:
    """Milliseconds from emission to receipt of every token, warm-up left out.

    A plain socket, because an HTTP library's own time would be counted as the gateway's.
    """

    async def one() -> list[float]:
        body = json.dumps(
            {
                "messages": [{"role": "user", "content": "hello"}],
                "stream": True,
                "think": False,
                "max_tokens": tokens,
            }
        ).encode()
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode() + body)
        delays, unread = [], b""
        while b"[DONE]" not in unread:
            piece = await reader.read(1 << 16)
            received = time.monotonic_ns()
            if not piece:
                raise RuntimeError(f"the gateway closed the stream: {unread[-500:]!r}")
            unread += piece
            end = 0
            for stamp in _STAMP.finditer(unread):
                delays.append((received - int(stamp[1])) / 1e6)
                end = stamp.end()
            unread = unread[end:]
        writer.close()
        if len(delays) != tokens:
            raise RuntimeError(f"{len(delays)} of {tokens} tokens arrived")
        return delays[_WARM_UP_TOKENS:]

    return [delay for each in await asyncio.gather(*(one() for _ in range(streams))) for delay in each]


async def straight(port: int, streams: int, tokens: int) -> list[float]:
    """The same from the engine itself, over gRPC."""
    tokenizer = ChatTokenizer(vocabulary())

    async def one(stub: engine_pb2_grpc.EngineStub) -> list[float]:
        delays = []
        request = pb.GenerateRequest(prompt_tokens=[1], sampling=pb.SamplingParams(max_tokens=tokens))
        async for reply in stub.Generate(request):
            received = time.monotonic_ns()
            if reply.tokens:
                delays.append((received - int(tokenizer.decode(reply.tokens))) / 1e6)
        return delays[_WARM_UP_TOKENS:]

    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = engine_pb2_grpc.EngineStub(channel)
        return [
            delay for each in await asyncio.gather(*(one(stub) for _ in range(streams))) for delay in each
        ]


def summary(delays: Sequence[float]) -> dict[str, float]:
    """Percentiles in milliseconds."""
    ordered = sorted(delays)

    def at(share: float) -> float:
        return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 3)

    return {
        "tokens": len(ordered),
        "p50_ms": at(0.5),
        "p90_ms": at(0.9),
        "p99_ms": at(0.99),
        "max_ms": at(1.0),
    }


def measure(streams: int, tokens: int, tokens_per_s: float, rounds: int) -> dict[str, object]:
    """Both ways in turn, so that a disturbance of the machine meets both; against the same engine."""
    context = multiprocessing.get_context("spawn")
    children = []

    def start(run: object, argument: float) -> int:
        here, there = context.Pipe()
        child = context.Process(target=run, args=(argument, there), daemon=True)  # type: ignore[arg-type]
        child.start()
        children.append(child)
        if not here.poll(_START_S):
            raise RuntimeError("a process of the benchmark did not start")
        return int(here.recv())

    direct: list[list[float]] = []
    through: list[list[float]] = []
    try:
        engine_port = start(run_engine, 1 / tokens_per_s)
        gateway_port = start(run_gateway, engine_port)
        for _ in range(rounds):
            direct.append(asyncio.run(straight(engine_port, streams, tokens)))
            through.append(asyncio.run(through_gateway(gateway_port, streams, tokens)))
    finally:
        for child in children:
            child.terminate()
    whole, alone = summary(list(chain(*through))), summary(list(chain(*direct)))
    medians = [
        round(summary(with_gateway)["p50_ms"] - summary(without)["p50_ms"], 3)
        for with_gateway, without in zip(through, direct, strict=True)
    ]
    return {
        "through_gateway": whole,
        "engine_alone": alone,
        "added": {key: round(whole[key] - alone[key], 3) for key in ("p50_ms", "p99_ms")},
        "added_p50_ms_of_each_round": medians,
    }


def main() -> None:
    """Measures, prints and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=220, help="tokens a stream")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--tokens-per-s", type=float, default=30.0, help="pace of each stream")
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    result = {
        "command": "python " + shlex.join([f"benchmarks/{Path(__file__).name}", *sys.argv[1:]]),
        "machine": {
            "cpus": os.cpu_count(),
            "system": platform.platform(),
            "python": platform.python_version(),
        },
        "load_before": round(os.getloadavg()[0], 2),
        "settings": {
            "streams": options.streams,
            "tokens": options.tokens,
            "tokens_per_s": options.tokens_per_s,
            "rounds": options.rounds,
        },
        **measure(options.streams, options.tokens, options.tokens_per_s, options.rounds),
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
