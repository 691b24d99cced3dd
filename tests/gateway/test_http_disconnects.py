"""A client that goes away, in whatever way and at whatever moment, ends its work in the engine at once."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from typing import Any

import openai
import pytest

from gateway.proto import engine_pb2 as pb

AT_ONCE_S = 2.0
"""Far less than the keep-alive's silence, so that only the disconnect itself can be what ended the work."""
KEEPALIVE_S = 60.0


def request_bytes(*, stream: bool) -> bytes:
    body = json.dumps({"messages": [{"role": "user", "content": "hello"}], "stream": stream}).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def phases(engine: Any) -> dict[str, list[pb.GenerateReply]]:
    """What the engine has said when the client leaves."""
    progress = pb.GenerateReply(prefill=pb.PrefillProgress(done_tokens=2, prompt_tokens=9))
    return {
        "silent": [],
        "prefill": [progress],
        "answering": [progress, pb.GenerateReply(tokens=engine.tokens("abc"))],
    }


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("phase", ["silent", "prefill", "answering"])
@pytest.mark.parametrize("way", ["fin", "half_close", "rst"])
async def test_leaving_cancels_the_engines_work(
    serve: Any, patience_s: float, way: str, phase: str, stream: bool
) -> None:
    gateway = await serve(keepalive_s=KEEPALIVE_S)
    engine = gateway.engine
    replies = phases(engine)[phase]
    engine.script = engine.hanging(*replies)
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(request_bytes(stream=stream))
    async with asyncio.timeout(patience_s):
        await engine.begun.wait()
        if stream and replies:
            await reader.readuntil(b"\r\n\r\n")
        if stream and phase == "answering":
            await reader.readuntil(b"abc")
    if way == "rst":
        raw = writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
    elif way == "half_close":
        writer.write_eof()
    else:
        writer.close()
    await asyncio.wait_for(engine.cancelled.wait(), AT_ONCE_S)
    writer.close()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_clients_timeout_cancels_the_engines_work(serve: Any, stream: bool) -> None:
    gateway = await serve(keepalive_s=KEEPALIVE_S)
    gateway.engine.script = gateway.engine.hanging()
    with pytest.raises(openai.APITimeoutError):
        await gateway.chat(stream=stream, timeout=0.3)
    await asyncio.wait_for(gateway.engine.cancelled.wait(), AT_ONCE_S)


async def test_closing_a_stream_cancels_the_engines_work(gateway: Any) -> None:
    engine = gateway.engine
    engine.script = engine.hanging(pb.GenerateReply(tokens=engine.tokens("abc")))
    stream = await gateway.chat(stream=True)
    async for chunk in stream:
        if getattr(chunk.choices[0].delta, "reasoning_content", None):
            break
    await stream.close()
    await asyncio.wait_for(engine.cancelled.wait(), AT_ONCE_S)


async def test_one_client_leaving_leaves_the_others_alone(gateway: Any, patience_s: float) -> None:
    engine = gateway.engine
    go_on = asyncio.Event()

    async def script(request: Any, _: Any) -> Any:
        yield pb.GenerateReply(tokens=[engine.special("</think>"), *engine.tokens("first ")])
        if request.sampling.seed == 1:
            await asyncio.Event().wait()
        await go_on.wait()
        yield pb.GenerateReply(tokens=engine.tokens("second"))
        yield engine.last(request, 2)

    engine.script = script
    leaving = await gateway.chat(stream=True, seed=1)
    staying = await gateway.chat(stream=True, seed=2)
    await anext(aiter(leaving))
    await leaving.close()
    await asyncio.wait_for(engine.cancelled.wait(), AT_ONCE_S)
    go_on.set()
    async with asyncio.timeout(patience_s):
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in staying])
    assert text == "first second"


async def test_silence_is_filled_with_comments(serve: Any, patience_s: float) -> None:
    """The engine says where its prompt is, then nothing: comments come all the same, and no data."""
    gateway = await serve(keepalive_s=0.05)
    gateway.engine.script = gateway.engine.hanging(
        pb.GenerateReply(prefill=pb.PrefillProgress(prompt_tokens=9, queue_position=2)),
        pb.GenerateReply(prefill=pb.PrefillProgress(done_tokens=4, prompt_tokens=9)),
    )
    body = {"messages": [{"role": "user", "content": "a"}], "stream": True}
    lines: list[str] = []
    async with (
        asyncio.timeout(patience_s),
        gateway.http.stream("POST", "/v1/chat/completions", json=body) as answer,
    ):
        async for line in answer.aiter_lines():
            lines += [line] if line else []
            if len(lines) == 6:
                break
    assert all(line.startswith(":") for line in lines)
    assert any("prefill" in line and "4/9" in line for line in lines)
    await asyncio.wait_for(gateway.engine.cancelled.wait(), AT_ONCE_S)


async def test_the_official_client_does_not_mind_comments(serve: Any) -> None:
    gateway = await serve(keepalive_s=0.02)
    engine = gateway.engine
    beats = asyncio.Event()

    async def script(request: Any, _: Any) -> Any:
        yield pb.GenerateReply(prefill=pb.PrefillProgress(done_tokens=4, prompt_tokens=9))
        await beats.wait()
        yield pb.GenerateReply(tokens=engine.thinking("hm", "fine"))
        yield engine.last(request, 2)

    engine.script = script
    stream = await gateway.chat(stream=True)
    asyncio.get_running_loop().call_later(0.2, beats.set)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "fine"
