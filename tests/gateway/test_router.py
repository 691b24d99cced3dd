"""Which engine takes a request, what is known of the model, and why nothing can be served."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.engines import EngineClient
from gateway.errors import GatewayError
from gateway.proto import engine_pb2 as pb
from gateway.router import Router, least_loaded


class Loaded(EngineClient):
    """An engine's load without its connection."""

    def __init__(self, streams: int) -> None:
        self.streams = streams


@given(st.lists(st.integers(0, 9), max_size=6))
def test_the_first_of_the_least_loaded_is_chosen(loads: list[int]) -> None:
    engines = [Loaded(load) for load in loads]
    chosen = least_loaded(engines)
    if not engines:
        assert chosen is None
    else:
        assert chosen is engines[loads.index(min(loads))]


async def test_readiness_says_why_not(serve: Any) -> None:
    gateway = await serve(ready=False)
    gateway.router.update_state("loading 43%")
    assert (await gateway.http.get("/healthz")).status_code == 200
    answer = await gateway.http.get("/readyz")
    assert answer.status_code == 503
    assert "loading 43%" in answer.text
    with pytest.raises(openai.InternalServerError, match="loading 43%") as caught:
        await gateway.chat()
    assert caught.value.status_code == 503
    assert int(caught.value.response.headers["retry-after"]) >= 1
    await gateway.router.set_engines([gateway.backend.address])
    assert (await gateway.http.get("/readyz")).status_code == 200
    assert (await gateway.chat()).choices[0].finish_reason == "stop"


async def test_requests_spread_over_the_engines(gateway: Any, start_engine: Any) -> None:
    other = await start_engine("other")
    await gateway.router.set_engines([gateway.backend.address, other.address])
    for engine in (gateway.engine, other.engine):
        engine.script = engine.hanging(pb.GenerateReply(tokens=engine.tokens("a")))
    streams = [await gateway.chat(stream=True) for _ in range(4)]
    assert [len(engine.requests) for engine in (gateway.engine, other.engine)] == [2, 2]
    for stream in streams:
        await stream.close()


async def test_a_restarted_engine_with_another_model_is_asked_again(start_engine: Any) -> None:
    router = Router()
    old = await start_engine(fingerprint="old", context_tokens=100)
    await router.set_engines([old.address])
    tokenizer = router.model.tokenizer
    same = await start_engine(fingerprint="old", context_tokens=200)
    await router.set_engines([same.address])
    assert (router.model.context_tokens, router.model.tokenizer is tokenizer) == (200, True)
    new = await start_engine(fingerprint="new", context_tokens=300)
    await router.set_engines([new.address])
    assert (router.model.context_tokens, router.model.tokenizer is tokenizer) == (300, False)
    await router.set_engines([])
    with pytest.raises(GatewayError, match="no engine"):
        router.pick()
    await router.close()


async def test_models_and_status_tell_what_is_served(gateway: Any) -> None:
    listed = (await gateway.openai.models.list()).data
    assert [(model.id, model.context_length) for model in listed] == [("fake-model", 4096)]
    assert (await gateway.openai.models.retrieve("fake-model")).id == "fake-model"
    status = (await gateway.http.get("/status")).json()
    assert status["not_ready"] is None
    (engine,) = status["engines"]
    assert (engine["engine_id"], engine["state"], engine["queue_limit"]) == ("fake", "ready", 3)


async def test_a_draining_gateway_takes_nothing_more(gateway: Any) -> None:
    gateway.router.start_draining()
    assert (await gateway.http.get("/readyz")).status_code == 503
    assert (await gateway.post()).status_code == 503


@pytest.mark.parametrize(("given_id", "kept"), [("abc-123", True), ("", False), ("x" * 500, False)])
async def test_every_response_has_a_request_id(gateway: Any, given_id: str, kept: bool) -> None:
    headers = {"x-request-id": given_id}
    body = {"messages": [{"role": "user", "content": "a"}]}
    shown = set()
    for path in ("/v1/chat/completions", "/nothing"):
        answer = await gateway.http.post(path, json=body, headers=headers)
        shown.add(answer.headers["x-request-id"])
    assert shown == {given_id} if kept else given_id not in shown and len(shown) == 2
    assert gateway.engine.requests[0].request_id


async def test_a_request_is_logged_in_one_line(gateway: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="gateway"):
        await gateway.http.post(
            "/v1/chat/completions",
            json={"messages": [{"role": "user", "content": "a"}]},
            headers={"x-request-id": "mine"},
        )
    (line,) = [record.getMessage() for record in caplog.records if "event=request" in record.getMessage()]
    fields = dict(part.split("=", 1) for part in line.split())
    assert fields["id"] == "mine"
    assert (fields["cached"], fields["finish"], fields["admission"]) == ("7", "stop", "warm")
