"""The gRPC service over a real connection, with an engine on a small random model behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from support.harness import Harness
from support.models import random_tensors, small_config

from gateway.proto import engine_pb2 as pb
from gateway.proto import engine_pb2_grpc
from worker.device import Device
from worker.engine import Engine, EngineLimits
from worker.execute import CpuExecutor
from worker.model.forward import Model
from worker.model.weights import assemble
from worker.plan import Item, MemoryPlan
from worker.service import SERVICE, EngineService, Served, start_server

SECRET = (("authorization", "Bearer s3cret"),)
PROMPT = [5, 9, 12, 40, 41, 3]


@dataclass
class Running:
    stub: engine_pb2_grpc.EngineStub
    channel: grpc.aio.Channel
    engine: Engine

    async def tokens(self, **fields: object) -> list[int]:
        call = self.stub.Generate(request(**fields), metadata=SECRET)
        return [token async for reply in call for token in reply.tokens]

    async def error(self, call: object) -> grpc.aio.AioRpcError:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:  # type: ignore[attr-defined]
                pass
        return caught.value

    async def until(self, condition: object) -> None:
        async with asyncio.timeout(30):
            while not condition():  # type: ignore[operator]
                await asyncio.sleep(0.005)


def request(prompt: list[int] = PROMPT, max_tokens: int = 8, **sampling: object) -> pb.GenerateRequest:
    request_id = str(sampling.pop("request_id", ""))
    values = {"max_tokens": max_tokens, "ignore_eos": True, **sampling}
    return pb.GenerateRequest(
        request_id=request_id,
        prompt_tokens=prompt,
        sampling=pb.SamplingParams(**values),  # type: ignore[arg-type]
    )


@pytest_asyncio.fixture
async def running() -> AsyncIterator[Running]:
    config = small_config()
    model = Model(config, assemble(config, random_tensors(config, 0).__getitem__))
    plan = MemoryPlan(512, 2, 32, Device.CPU, (Item("weights", 10), Item("reserve", 5, "why")), 100)
    description = pb.ModelDescription(name="small", context_tokens=512, vocabulary_size=config.vocab)
    service = EngineService(Served("engine-0", "1.2.3", description, plan))
    fatal: list[BaseException] = []
    engine = Engine(
        CpuExecutor(model, 2, 512), EngineLimits(512, 2, 32, queue=1, threads=1), service.hear, fatal.append
    )
    service.attach(engine)
    engine.start()
    server, port = await start_server(service, "127.0.0.1", "s3cret")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield Running(engine_pb2_grpc.EngineStub(channel), channel, engine)
    await server.stop(grace=0)
    engine.stop()
    assert not fatal


async def test_streams_what_the_engine_generates(running: Running) -> None:
    with Harness() as harness:
        expected = harness.run("a", PROMPT, max_tokens=8, ignore_eos=True).tokens
    replies = [reply async for reply in running.stub.Generate(request(), metadata=SECRET)]
    assert [token for reply in replies for token in reply.tokens] == expected
    assert replies[-1].finish_reason == pb.FINISH_REASON_LENGTH
    usage = replies[-1].usage
    assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (6, 0, 8)
    assert usage.admission == "cold"
    assert 0 < usage.ttft_s < 60
    assert usage.decode_tokens_per_s > 0


async def test_seeded_sampling_repeats_and_two_streams_do_not_mix(running: Running) -> None:
    fields = {"temperature": 1.0, "seed": 2**63 + 5, "max_tokens": 20}
    alone = await running.tokens(**fields)
    other = {**fields, "seed": 7}
    first, second = await asyncio.gather(running.tokens(**fields), running.tokens(**other))
    assert first == alone != second


async def test_calls_without_the_secret_are_refused(running: Running) -> None:
    for metadata in (None, (("authorization", "Bearer wrong"),)):
        for call in (running.stub.Status(pb.StatusRequest(), metadata=metadata),):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        error = await running.error(running.stub.Generate(request(), metadata=metadata))
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_errors_have_their_promised_status(running: Running) -> None:
    too_long = await running.error(running.stub.Generate(request([1] * 600), metadata=SECRET))
    assert too_long.code() is grpc.StatusCode.OUT_OF_RANGE
    assert dict(too_long.trailing_metadata()) | {"n-prompt-tokens": "600", "n-ctx": "512"} == dict(
        too_long.trailing_metadata()
    )
    bad = await running.error(running.stub.Generate(request(temperature=-1), metadata=SECRET))
    assert bad.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "temperature" in (bad.details() or "")


async def test_a_full_queue_says_when_to_come_back(running: Running) -> None:
    calls = [running.stub.Generate(request(max_tokens=400), metadata=SECRET) for _ in range(2)]
    for call in calls:
        await call.read()
    await running.until(lambda: running.engine.view.running == 2)
    waiting = running.stub.Generate(request(max_tokens=1), metadata=SECRET)
    assert (await waiting.read()).prefill.queue_position == 1
    busy = await running.error(running.stub.Generate(request(), metadata=SECRET))
    assert busy.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert float(str(dict(busy.trailing_metadata())["retry-after-s"])) > 0
    for call in calls:
        call.cancel()
    assert (await waiting.read()).tokens


async def test_cancelling_the_call_frees_the_bank(running: Running) -> None:
    call = running.stub.Generate(request(max_tokens=500), metadata=SECRET)
    await call.read()
    call.cancel()
    await running.until(lambda: running.engine.view.counters.cancelled == 1)
    assert running.engine.view.running == 0


async def test_a_request_id_can_be_used_once_at_a_time(running: Running) -> None:
    call = running.stub.Generate(request(max_tokens=400, request_id="r"), metadata=SECRET)
    await call.read()
    error = await running.error(running.stub.Generate(request(request_id="r"), metadata=SECRET))
    assert error.code() is grpc.StatusCode.ALREADY_EXISTS
    assert (await call.read()).tokens
    call.cancel()


async def test_status_tells_plan_banks_and_counts(running: Running) -> None:
    await running.tokens(max_tokens=3)
    await running.until(lambda: running.engine.view.running == 0)
    status = await running.stub.Status(pb.StatusRequest(), metadata=SECRET)
    assert (status.engine_id, status.state, status.version) == ("engine-0", "ready", "1.2.3")
    assert [bank.state for bank in status.banks] == ["idle", "free"]
    assert status.banks[0].tokens == len(PROMPT) + 2
    assert [(item.name, item.bytes) for item in status.memory.plan] == [("weights", 10), ("reserve", 5)]
    assert status.memory.planned_bytes == 15
    assert status.memory.available_bytes > 1 << 20
    assert status.counters.completion_tokens == 3
    assert (await running.stub.Describe(pb.DescribeRequest(), metadata=SECRET)).name == "small"


async def test_draining_waits_for_running_streams(running: Running) -> None:
    call = running.stub.Generate(request(max_tokens=60), metadata=SECRET)
    replies = aiter(call)
    tokens = list((await anext(replies)).tokens)
    drain = asyncio.ensure_future(running.stub.Drain(pb.DrainRequest(timeout_s=30), metadata=SECRET))
    await running.until(lambda: running.engine._draining)
    refused = await running.error(running.stub.Generate(request(), metadata=SECRET))
    assert refused.code() is grpc.StatusCode.UNAVAILABLE
    async for reply in replies:
        tokens += reply.tokens
    assert len(tokens) == 60
    assert (await drain).unfinished == 0


async def test_health_and_reflection_answer(running: Running) -> None:
    health = health_pb2_grpc.HealthStub(running.channel)
    answer = await health.Check(health_pb2.HealthCheckRequest(service=SERVICE))
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    reflection = reflection_pb2_grpc.ServerReflectionStub(running.channel)
    listing = reflection_pb2.ServerReflectionRequest(list_services="")
    async for reply in reflection.ServerReflectionInfo(iter([listing])):
        names = {service.name for service in reply.list_services_response.service}
        assert SERVICE in names
        break
