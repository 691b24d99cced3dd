"""The whole way through, as a user has it: `twinspark serve` and the official `openai` client.

The model has random weights: it hardly ever stops by itself, so that there is always something to interrupt.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import openai
import pytest
import pytest_asyncio
from support.service import Service, twinspark

from worker.gguf.presets import SMALL
from worker.gguf.synthetic import write_synthetic

QUESTION = [{"role": "user", "content": "Tell me about two boxes and one cable."}]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("service")
    model = folder / "noise.gguf"
    write_synthetic(model, SMALL, "q2", seed=4)
    started = Service(folder, str(model), "--port", "0", "--dashboard-port", "0")
    try:
        started.until_ready()
        yield started
    finally:
        started.end()


@pytest_asyncio.fixture
async def api(service: Service) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client(service) as opened:
        yield opened


def client(service: Service) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=120)


async def stream(api: openai.AsyncOpenAI, seed: int, tokens: int = 24, leave_after: int | None = None) -> str:
    """What a streamed chat says; leaves it half-way after so many pieces."""
    said = []
    answer = await api.chat.completions.create(
        model="any",
        messages=QUESTION,
        seed=seed,
        max_tokens=tokens,
        stream=True,  # type: ignore[arg-type]
    )
    async for chunk in answer:
        delta = chunk.choices[0].delta if chunk.choices else None
        said.append((getattr(delta, "reasoning_content", None) or "") + ((delta and delta.content) or ""))
        if leave_after is not None and len(said) >= leave_after:
            await answer.close()
            break
    return "".join(said)


def counters(service: Service) -> dict[str, int]:
    engine = httpx.get(f"{service.url}/status").json()["engines"][0]
    return {name: int(value) for name, value in engine["counters"].items()}


async def test_cancelling_one_stream_leaves_the_other_as_it_is_alone(
    service: Service, api: openai.AsyncOpenAI
) -> None:
    alone = await stream(api, seed=11)
    assert alone
    together, _ = await asyncio.gather(stream(api, seed=11), stream(api, seed=12, tokens=400, leave_after=8))
    assert together == alone
    async with asyncio.timeout(30):
        while counters(service)["cancelled"] < 1:
            await asyncio.sleep(0.05)


async def test_streamed_and_whole_answers_are_equal_and_counted(
    service: Service, api: openai.AsyncOpenAI
) -> None:
    whole = await api.chat.completions.create(
        model="any",
        messages=QUESTION,
        seed=5,
        max_tokens=5,
        extra_body={"thinking": False},  # type: ignore[arg-type]
    )
    chunks = await api.chat.completions.create(
        model="any", messages=QUESTION, seed=5, max_tokens=5, stream=True,  # type: ignore[arg-type]
        stream_options={"include_usage": True}, extra_body={"thinking": False},
    )  # fmt: skip
    collected = [chunk async for chunk in chunks]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in collected if chunk.choices)
    assert text == whole.choices[0].message.content
    usage = collected[-1].usage
    assert usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens == 5  # type: ignore[union-attr]
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1


async def test_a_prompt_over_the_context_is_refused_with_both_numbers(
    service: Service, api: openai.AsyncOpenAI
) -> None:
    long = [{"role": "user", "content": "word " * SMALL.context}]
    with pytest.raises(openai.BadRequestError) as caught:
        await api.chat.completions.create(model="any", messages=long)  # type: ignore[arg-type]
    assert caught.value.code == "context_length_exceeded"
    assert f"context size is {SMALL.context}" in caught.value.message


async def test_the_model_is_listed(service: Service, api: openai.AsyncOpenAI) -> None:
    models = [model.id async for model in api.models.list()]
    assert models == ["twinspark-small"]


def test_status_tells_what_runs(service: Service) -> None:
    status = service.run("status")
    assert status.returncode == 0, status.stderr
    assert service.url in status.stdout
    assert "engine-0: ready" in status.stdout
    assert httpx.get(f"{service.url}/healthz").status_code == 200


def test_the_ray_dashboard_answers(service: Service) -> None:
    found = next(line for line in service.run("status").stdout.splitlines() if "dashboard" in line)
    assert httpx.get(found.split()[-1]).status_code == 200


def test_a_second_service_on_the_same_state_is_refused(service: Service) -> None:
    second = service.run("serve", "--demo", "--port", "0")
    assert second.returncode == 1
    assert "already running" in second.stderr
    assert "twinspark stop" in second.stderr


async def test_a_killed_engine_is_replaced_and_its_request_ends_with_an_error(
    service: Service, api: openai.AsyncOpenAI
) -> None:
    (pid,) = service.engine_pids()
    answer = await api.chat.completions.create(
        model="any",
        messages=QUESTION,
        max_tokens=2000,
        seed=3,
        stream=True,  # type: ignore[arg-type]
    )
    killed_at = 0.0
    with pytest.raises(openai.APIError) as caught:  # noqa: PT012, the error comes while streaming
        async for number, _ in aenumerate(answer):
            if number == 5:
                os.kill(pid, signal.SIGKILL)
                killed_at = time.monotonic()
    assert "engine went away" in caught.value.message
    with pytest.raises(openai.InternalServerError) as refused:
        await api.chat.completions.create(model="any", messages=QUESTION)  # type: ignore[arg-type]
    assert refused.value.status_code == 503
    assert "retry-after" in refused.value.response.headers
    service.until(lambda: httpx.get(f"{service.url}/readyz").status_code == 200, 90)
    assert await stream(api, seed=11)
    print(f"first answer {time.monotonic() - killed_at:.1f} s after the kill")
    (replaced,) = service.engine_pids()
    assert replaced != pid


async def aenumerate(source: object) -> object:
    number = 0
    async for item in source:  # type: ignore[attr-defined]
        yield number, item
        number += 1


async def test_stopping_lets_running_requests_finish(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    write_synthetic(model, SMALL, "q2", seed=1)
    service = Service(tmp_path, str(model), "--port", "0", "--dashboard-port", "0", "--ctx", "1024")
    try:
        service.until_ready()
        api = client(service)
        running = asyncio.create_task(stream(api, seed=1, tokens=100))
        async with asyncio.timeout(30):
            while counters(service)["completion_tokens"] < 3:
                await asyncio.sleep(0.02)
        stopped = await asyncio.to_thread(service.run, "stop")
        assert stopped.returncode == 0, stopped.stderr
        assert await running
        await api.close()
        assert service.process.wait(20) == 0
        assert service.run("status").returncode == 3
        assert "No service" in service.run("stop").stderr
    finally:
        service.end()


def test_what_cannot_be_served_is_said_before_anything_starts(tmp_path: Path) -> None:
    state = ("--state", str(tmp_path / "state"))
    missing = twinspark("serve", str(tmp_path / "none.gguf"), *state)
    assert missing.returncode == 1
    assert "none.gguf" in missing.stderr
    assert "Traceback" not in missing.stderr
    neither = twinspark("serve", *state)
    assert "no model is given" in neither.stderr
    assert "what to do" in neither.stderr
    small = twinspark("serve", "--demo", "--memory", "1GiB", *state)
    assert small.returncode == 1
    assert "do not fit" in small.stderr
    assert "takes at least" in small.stderr
    wrong = twinspark("serve", "--demo", "--banks", "0", *state)
    assert "--banks" in wrong.stderr
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        refused = twinspark("serve", "--demo", "--port", port, *state)
        assert refused.returncode == 1
        assert f"127.0.0.1:{port}" in refused.stderr


def test_inspect_and_plan_read_a_file_without_a_service(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    written = twinspark("synthetic", str(model), "--mix", "q2")
    assert written.returncode == 0, written.stderr
    assert "tiny" in twinspark("synthetic", str(model), "--size", "huge").stderr
    assert "IQ2_XXS blocks" in twinspark("synthetic", str(model), "--size", "tiny").stderr
    shown = twinspark("inspect", str(model))
    assert shown.returncode == 0
    assert "IQ2_XXS" in shown.stdout
    assert "can be served" in shown.stdout
    planned = twinspark("plan", str(model), "--memory", "119GiB", "--banks", "2")
    assert planned.returncode == 0
    assert "2 banks of 32768 tokens" in planned.stdout
    refused = twinspark("plan", str(model), "--memory", "500MiB")
    assert refused.returncode == 1
    assert "missing" in refused.stderr
