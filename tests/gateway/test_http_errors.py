"""Errors over HTTP: the official client's exceptions, OpenAI's shape, broken streams."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import openai
import pytest

from gateway.proto import engine_pb2 as pb

CODE = grpc.StatusCode
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("code", "metadata", "exception", "status"),
    [
        (CODE.INVALID_ARGUMENT, (), openai.BadRequestError, 400),
        (CODE.OUT_OF_RANGE, (("n-prompt-tokens", "9"), ("n-ctx", "5")), openai.BadRequestError, 400),
        (CODE.RESOURCE_EXHAUSTED, (("retry-after-s", "2.5"),), openai.RateLimitError, 429),
        (CODE.UNAVAILABLE, (), openai.InternalServerError, 503),
        (CODE.INTERNAL, (), openai.InternalServerError, 500),
    ],
)
async def test_an_engines_refusal_is_the_clients_own_exception(
    gateway: Any, code: Any, metadata: Any, exception: type[openai.APIStatusError], status: int, stream: bool
) -> None:
    gateway.engine.script = gateway.engine.refusing(code, "because", *metadata)
    with pytest.raises(exception) as caught:
        await gateway.chat(stream=stream)
    error = caught.value
    assert error.status_code == status
    assert set(error.body) >= {"message", "type", "param", "code"}
    if code is CODE.OUT_OF_RANGE:
        assert (error.code, error.body["n_prompt_tokens"], error.body["n_ctx"]) == (
            "context_length_exceeded",
            9,
            5,
        )
    if code is CODE.RESOURCE_EXHAUSTED:
        assert error.response.headers["retry-after"] == "3"
    if code is CODE.UNAVAILABLE:
        assert int(error.response.headers["retry-after"]) >= 1
    if code not in (CODE.UNAVAILABLE,):
        assert "because" in error.body["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user"}]}, "messages[0]"),
        ({"messages": [{"role": "wizard", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "function", "content": "a", "name": "f"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "a", "tool_call_id": "1"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
         "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [{"id": "1"}]}]},
         "messages[1].tool_calls[0].function"),
        ({"messages": [{"role": "assistant", "tool_calls": [CALL]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": [CALL]}]}, "messages[0]"),
        ({"messages": [{"role": "assistant", "tool_calls": [CALL]},
                       {"role": "tool", "content": "a", "tool_call_id": "2"}]}, "messages[1].tool_call_id"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": "0.5"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a", 5]}, "stop[1]"),
        ({"stream": "yes"}, "stream"),
        ({"seed": "x"}, "seed"),
        ({"n": 2}, "n"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
        ({"tools": [{"type": "function", "function": {"name": 'f">'}}]}, "tools[0].function.name"),
        ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
         "tool_choice.function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logit_bias": {"dog": 1}}, "logit_bias"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"reasoning_effort": "heroic"}, "reasoning_effort"),
        ({"thinking": {"type": "perhaps"}}, "thinking.type"),
        ({"chat_template_kwargs": {"thinking": "on"}}, "chat_template_kwargs.thinking"),
    ],
)  # fmt: skip
async def test_a_wrong_or_unserved_field_is_named(gateway: Any, fields: dict[str, Any], param: str) -> None:
    answer = await gateway.post(**fields)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert param in error["message"]
    assert not gateway.engine.requests


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1]",
        b"\xff\xfe",
        b'"text"',
        b'{"messages": [{"role": "user", "content": "a\\',
        b"[" * 9999,
    ],
)
async def test_what_is_no_json_object_is_refused(gateway: Any, body: bytes) -> None:
    answer = await gateway.http.post(
        "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_not_a_number_is_refused(gateway: Any) -> None:
    body = b'{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}'
    answer = await gateway.http.post(
        "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "temperature")


async def test_a_prompt_over_the_context_reaches_the_client_with_its_numbers(serve: Any) -> None:
    gateway = await serve(context_tokens=64)
    message = "Prompt has 99 tokens, but the configured context size is 64 tokens"
    metadata = (("n-prompt-tokens", "99"), ("n-ctx", "64"))
    gateway.engine.script = gateway.engine.refusing(CODE.OUT_OF_RANGE, message, *metadata)
    with pytest.raises(openai.BadRequestError) as caught:
        await gateway.chat(messages=[{"role": "user", "content": "word " * 200}])
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.body["n_ctx"] == 64


async def test_unknown_endpoints_and_models_are_404_in_openais_shape(gateway: Any) -> None:
    for path in ("/nothing", "/v1/models/other"):
        answer = await gateway.http.get(path)
        assert answer.status_code == 404
        assert answer.json()["error"]["type"] == "invalid_request_error"
    assert (await gateway.http.get("/v1/chat/completions")).status_code == 405
    with pytest.raises(openai.NotFoundError):
        await gateway.openai.models.retrieve("other")


@pytest.mark.parametrize("chunked", [True, False])
async def test_a_body_over_the_limit_is_413(serve: Any, chunked: bool) -> None:
    gateway = await serve(max_body_bytes=2000)
    body = json.dumps({"messages": [{"role": "user", "content": "a" * 5000}]}).encode()

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(body), 500):
            yield body[at : at + 500]

    answer = await gateway.http.post(
        "/v1/chat/completions",
        content=pieces() if chunked else body,
        headers={"content-type": "application/json"},
    )
    assert answer.status_code == 413
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert answer.headers["x-request-id"]
    assert (await gateway.post()).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
async def test_an_engine_that_dies_before_its_first_token_is_503(
    gateway: Any, patience_s: float, stream: bool
) -> None:
    gateway.engine.script = gateway.engine.hanging()
    asking = asyncio.ensure_future(gateway.chat(stream=stream))
    async with asyncio.timeout(patience_s):
        await gateway.engine.begun.wait()
        await gateway.backend.die()
        with pytest.raises(openai.InternalServerError) as caught:
            await asking
    assert caught.value.status_code == 503
    assert int(caught.value.response.headers["retry-after"]) >= 1


async def test_an_engine_that_dies_in_mid_stream_ends_it_with_an_error_event(
    gateway: Any, patience_s: float
) -> None:
    engine = gateway.engine
    engine.script = engine.hanging(pb.GenerateReply(tokens=engine.thinking("", "half")))
    content: list[str] = []

    async def read() -> None:
        async for chunk in await gateway.chat(stream=True):
            content.append(chunk.choices[0].delta.content or "")
            if content[-1]:
                await gateway.backend.die()

    async with asyncio.timeout(patience_s):
        with pytest.raises(openai.APIError, match="engine") as caught:
            await read()
    assert "".join(content) == "half"
    assert not isinstance(caught.value, openai.APIConnectionError)


async def test_an_engine_that_ends_without_a_reason_is_an_error(gateway: Any) -> None:
    async def script(_: Any, __: Any) -> AsyncIterator[pb.GenerateReply]:
        yield pb.GenerateReply(tokens=gateway.engine.tokens("a"))

    gateway.engine.script = script
    with pytest.raises(openai.InternalServerError):
        await gateway.chat()


async def test_a_bug_in_the_gateway_is_a_500_in_openais_shape(
    gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(type(gateway.router), "pick", broken)
    with pytest.raises(openai.InternalServerError) as caught:
        await gateway.chat()
    assert caught.value.status_code == 500
    assert caught.value.body["type"] == "server_error"
