"""Anthropic's messages over HTTP, as Anthropic's own client sees them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import grpc
import pytest

from gateway.chat.conversation import Tool, ToolCall
from gateway.chat.segments import content, template
from gateway.chat.tools import calls_block, instructions
from gateway.proto import engine_pb2 as pb

CODE = grpc.StatusCode
TEXT = "Grüße 🙂👍🏽 日本"
USER = {"role": "user", "content": "hello"}
THINKING = {"type": "enabled", "budget_tokens": 1024}
TOOL = {
    "name": "get_weather",
    "description": "Weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = ToolCall("", "get_weather", '{"city": "Köln \\"🙂\\""}')
AT_ONCE_S = 2.0


def singly(tokens: list[int]) -> list[list[int]]:
    return [[token] for token in tokens]


def block(engine: Any, *calls: ToolCall) -> list[int]:
    return list(engine.tokenizer.encode(calls_block(calls)))


async def ask(gateway: Any, *, stream: bool = False, **fields: Any) -> Any:
    """The message, put together by the client's own stream helper when streaming."""
    body = {"model": "any", "max_tokens": 500, "messages": [USER], **fields}
    if not stream:
        return await gateway.anthropic.messages.create(**body)
    async with gateway.anthropic.messages.stream(**body) as events:
        async for _ in events:
            pass
        return await events.get_final_message()


async def post(gateway: Any, path: str = "/v1/messages", **fields: Any) -> Any:
    body = {"model": "any", "max_tokens": 500, "messages": [USER], **fields}
    return await gateway.http.post(path, json=body)


async def raw_events(gateway: Any, **fields: Any) -> list[dict[str, Any]]:
    """A stream's events; each one's name is its type."""
    answer = await post(gateway, stream=True, **fields)
    assert answer.status_code == 200
    events = []
    for piece in answer.text.strip().split("\n\n"):
        name, data = piece.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


@pytest.mark.parametrize("stream", [True, False])
async def test_thinking_and_text_are_blocks(gateway: Any, stream: bool) -> None:
    engine = gateway.engine
    tokens = engine.thinking(f"think {TEXT}", TEXT)
    engine.script = engine.saying(singly(tokens))
    message = await ask(gateway, stream=stream, thinking=THINKING)
    thinking, text = message.content
    assert (thinking.type, thinking.thinking, bool(thinking.signature)) == ("thinking", f"think {TEXT}", True)
    assert (text.type, text.text) == ("text", TEXT)
    assert (message.stop_reason, message.stop_sequence, message.role) == ("end_turn", None, "assistant")
    assert (message.model, message.type) == ("any", "message")
    usage = message.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == len(engine.requests[0].prompt_tokens)
    assert usage.cache_read_input_tokens == 7
    assert usage.output_tokens == len(tokens)
    assert usage.output_tokens_details.thinking_tokens == len(engine.tokens(f"think {TEXT}")) + 1
    assert stream or message._request_id


async def test_the_events_come_in_their_order(gateway: Any) -> None:
    engine = gateway.engine
    engine.script = engine.saying(singly([*engine.thinking("hm", "so"), *block(engine, CALL)]))
    events = await raw_events(gateway, thinking=THINKING, tools=[TOOL])
    short = []
    for event in events:
        kind = event.get("delta", {}).get("type") or event.get("content_block", {}).get("type")
        one = (event["type"], event.get("index"), kind)
        if not short or short[-1] != one:
            short.append(one)
    start, delta, stop = "content_block_start", "content_block_delta", "content_block_stop"
    assert short == [
        ("message_start", None, None),
        (start, 0, "thinking"),
        (delta, 0, "thinking_delta"),
        (delta, 0, "signature_delta"),
        (stop, 0, None),
        (start, 1, "text"),
        (delta, 1, "text_delta"),
        (stop, 1, None),
        (start, 2, "tool_use"),
        (delta, 2, "input_json_delta"),
        (stop, 2, None),
        ("message_delta", None, None),
        ("message_stop", None, None),
    ]
    assert events[0]["message"]["content"] == []
    assert events[0]["message"]["usage"]["input_tokens"] == len(engine.requests[0].prompt_tokens)


@pytest.mark.parametrize(
    ("fields", "thinks"),
    [
        ({}, False),
        ({"model": "deepseek-reasoner"}, True),
        ({"thinking": {"type": "disabled"}}, False),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, True),
        ({"thinking": {"type": "adaptive"}}, True),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}, True),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "none"}}, False),
    ],
)
async def test_every_switch_for_thinking_is_heard(gateway: Any, fields: dict[str, Any], thinks: bool) -> None:
    assert (await post(gateway, **fields)).status_code == 200
    tag = "<think>" if thinks else "</think>"
    assert gateway.engine.requests[0].prompt_tokens[-1] == gateway.engine.special(tag)


@pytest.mark.parametrize("stream", [True, False])
async def test_calls_are_blocks_with_their_input(gateway: Any, stream: bool) -> None:
    engine = gateway.engine
    engine.script = engine.saying(singly([*engine.tokens("so"), *block(engine, CALL, CALL)]))
    message = await ask(gateway, stream=stream, tools=[TOOL])
    text, first, second = message.content
    assert text.text == "so"
    assert message.stop_reason == "tool_use"
    for call in (first, second):
        assert (call.type, call.name, call.input) == ("tool_use", "get_weather", json.loads(CALL.arguments))
        assert call.id.startswith("toolu_")
    assert first.id != second.id


@pytest.mark.parametrize("stream", [True, False])
async def test_a_call_cut_by_max_tokens_keeps_its_complete_values(gateway: Any, stream: bool) -> None:
    engine = gateway.engine
    call = ToolCall("", "get_weather", '{"city": "x", "country": "Öland"}')
    tokens = engine.tokenizer.encode(calls_block([call]))
    end = tokens.index(engine.tokens("Ö")[0])
    engine.script = engine.saying(singly(tokens[: end + 3]), pb.FINISH_REASON_LENGTH)
    message = await ask(gateway, stream=stream, tools=[TOOL])
    assert message.stop_reason == "max_tokens"
    assert message.content[0].input == {"city": "x"}


async def test_a_turn_sent_back_is_read_as_it_was_written(gateway: Any) -> None:
    """With the tokens the model sampled, its thinking included: the next prompt goes on from the first."""
    engine = gateway.engine
    tokens = [*engine.thinking("hm", "so"), *block(engine, CALL)]
    engine.script = engine.saying([tokens])
    message = await ask(gateway, thinking=THINKING, tools=[TOOL])
    call = next(one for one in message.content if one.type == "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
    history = [
        USER,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result, {"type": "text", "text": "and now?"}]},
    ]
    await ask(gateway, thinking=THINKING, tools=[TOOL], messages=history)
    first, second = (list(request.prompt_tokens) for request in engine.requests)
    end = [engine.tokenizer.encode([template("<｜end▁of▁sentence｜><｜User｜>")])]
    assert second[: len(first) + len(tokens)] == [*first, *tokens]
    assert second[len(first) + len(tokens) :][:2] == end[0]
    assert "rain" in engine.tokenizer.decode(second)
    assert engine.tokenizer.decode(second).endswith("\n\nand now?<｜Assistant｜><think>")


def prompt(engine: Any, number: int = 0) -> str:
    return str(engine.tokenizer.decode(engine.requests[number].prompt_tokens))


async def test_all_blocks_find_their_place_in_the_prompt(gateway: Any) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "u1"}, {"type": "text", "text": "u2"}]},
        {"role": "assistant", "content": [
            {"type": "redacted_thinking", "data": "xxxx"},
            {"type": "thinking", "thinking": "t", "signature": "anything"},
            {"type": "text", "text": "a", "citations": None, "cache_control": {"type": "ephemeral"}},
            {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "x"}},
            {"type": "tool_use", "id": "toolu_2", "name": "get_weather", "input": {}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "r1"},
                                                                         {"type": "text", "text": "r2"}]},
            {"type": "tool_result", "tool_use_id": "toolu_2", "is_error": True, "content": "no such city"},
        ]},
    ]  # fmt: skip
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: 1"},
        {"type": "text", "text": "s1", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "s2"},
    ]
    await ask(gateway, system=system, messages=messages, tools=[TOOL], thinking=THINKING)
    text = prompt(gateway.engine)
    tool = Tool(TOOL["name"], TOOL["description"], TOOL["input_schema"])
    tools = "".join(segment.text for segment in instructions([tool]))
    assert text.startswith(f"s1\ns2\n\n{tools}<｜User｜>u1\n\nu2<｜Assistant｜><think>t</think>a\n\n")
    assert text.endswith(
        "<｜User｜><tool_result>r1\n\nr2</tool_result>\n\n<tool_result>Error: no such city</tool_result>"
        "<｜Assistant｜><think>"
    )


@pytest.mark.parametrize("stream", [True, False])
async def test_stop_sequences_count_outside_thinking(gateway: Any, patience_s: float, stream: bool) -> None:
    engine = gateway.engine
    tokens = engine.thinking("END of thought", "before EN and END after")
    engine.script = engine.hanging(*(pb.GenerateReply(tokens=[token]) for token in tokens))
    async with asyncio.timeout(patience_s):
        message = await ask(gateway, stream=stream, thinking=THINKING, stop_sequences=["never", "END"])
        await engine.cancelled.wait()
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert message.content[1].text == "before EN and "
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "END")


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_cut_inside_thinking_has_no_text(gateway: Any, stream: bool) -> None:
    engine = gateway.engine
    engine.script = engine.saying([engine.tokens("still thinking")], pb.FINISH_REASON_LENGTH)
    message = await ask(gateway, stream=stream, thinking={"type": "adaptive"})
    assert [block.type for block in message.content] == ["thinking"]
    assert message.stop_reason == "max_tokens"


@pytest.mark.parametrize(
    ("choice", "begins"),
    [({"type": "any"}, '<｜DSML｜invoke name="get_weather">\n'),
     ({"type": "tool", "name": "get_weather"}, '<｜DSML｜invoke name="get_weather">\n')],
)  # fmt: skip
async def test_a_demanded_call_is_begun_for_the_model(
    gateway: Any, choice: dict[str, Any], begins: str
) -> None:
    await ask(gateway, tools=[TOOL], tool_choice=choice)
    assert prompt(gateway.engine).endswith(begins)


async def test_tools_withheld_are_not_in_the_prompt(gateway: Any) -> None:
    await ask(gateway, tools=[TOOL], tool_choice={"type": "none"})
    assert "get_weather" not in prompt(gateway.engine)


async def test_one_call_is_enough_where_parallel_ones_are_off(gateway: Any) -> None:
    engine = gateway.engine
    engine.script = engine.saying([block(engine, CALL, CALL)])
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    message = await ask(gateway, tools=[TOOL], tool_choice=choice)
    assert [one.type for one in message.content] == ["tool_use"]


async def test_tokens_are_counted_as_the_prompt_has_them(gateway: Any) -> None:
    fields = {"system": "be brief", "tools": [TOOL], "thinking": THINKING}
    counted = await gateway.anthropic.messages.count_tokens(model="any", messages=[USER], **fields)
    assert not gateway.engine.requests
    await ask(gateway, **fields)
    assert counted.input_tokens == len(gateway.engine.requests[0].prompt_tokens)


async def test_sampling_reaches_the_engine(gateway: Any) -> None:
    await post(gateway, max_tokens=11, temperature=0.25, top_p=0.5, top_k=9)
    sampling = gateway.engine.requests[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (11, 0.25, 0.5, 9)


@pytest.mark.parametrize("path", ["/v1/messages", "/messages", "/v1/messages?beta=true"])
async def test_headers_and_fields_nobody_knows_are_let_pass(gateway: Any, path: str) -> None:
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "a-1,b-2", "x-api-key": "anything"}
    body = {"model": "x", "max_tokens": 9, "messages": [{**USER, "weird": 1}], "metadata": {"user_id": "u"},
            "service_tier": "auto", "context_management": {"edits": []}, "weird": {}}  # fmt: skip
    answer = await gateway.http.post(path, json=body, headers=headers)
    assert answer.status_code == 200
    assert answer.json()["content"] == [{"type": "text", "text": "ok"}]


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}
USE = {"type": "tool_use", "id": "1", "name": "f", "input": {}}


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "9"}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "a"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, IMAGE]}]},
         "messages.0.content.1"),
        ({"messages": [{"role": "user", "content": [{}]}]}, "messages.0.content.0.type"),
        ({"messages": [{"role": "user", "content": [USE]}]}, "messages.0.content.0"),
        ({"messages": [USER, {"role": "assistant", "content": [{**USE, "input": "x"}]}, USER]},
         "messages.1.content.0.input"),
        ({"messages": [USER, {"role": "assistant", "content": [USE]}]}, "messages.1.content"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "9"}]}]},
         "messages.0.content.0.tool_use_id"),
        ({"messages": [USER, {"role": "assistant", "content": [USE]},
                       {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1",
                                                     "content": [IMAGE]}]}]},
         "messages.2.content.0.content.0"),
        ({"system": 5}, "system"),
        ({"system": [IMAGE]}, "system.0.type"),
        ({"temperature": "hot"}, "temperature"),
        ({"stop_sequences": "END"}, "stop_sequences"),
        ({"stop_sequences": [5]}, "stop_sequences.0"),
        ({"thinking": {"type": "perhaps"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        ({"output_config": {"effort": "heroic"}}, "output_config.effort"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema"),
        ({"tools": [TOOL, TOOL]}, "tools.1.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name"),
        ({"stream": "yes"}, "stream"),
    ],
)  # fmt: skip
async def test_a_wrong_or_unserved_field_is_named(gateway: Any, fields: dict[str, Any], path: str) -> None:
    body = {"model": "any", "max_tokens": 500, "messages": [USER], **fields}
    if fields.get("max_tokens", 0) is None:
        del body["max_tokens"]
    answer = await gateway.http.post("/v1/messages", json=body)
    assert answer.status_code == 400
    told = answer.json()
    assert (told["type"], told["error"]["type"]) == ("error", "invalid_request_error")
    assert told["error"]["message"].startswith(f"{path}: ")
    assert told["request_id"] == answer.headers["request-id"]
    assert not gateway.engine.requests


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("code", "metadata", "exception", "kind"),
    [
        (CODE.INVALID_ARGUMENT, (), anthropic.BadRequestError, "invalid_request_error"),
        (CODE.OUT_OF_RANGE, (("n-prompt-tokens", "9"), ("n-ctx", "5")), anthropic.BadRequestError,
         "invalid_request_error"),
        (CODE.RESOURCE_EXHAUSTED, (("retry-after-s", "2.5"),), anthropic.RateLimitError, "rate_limit_error"),
        (CODE.UNAVAILABLE, (), anthropic.InternalServerError, "overloaded_error"),
        (CODE.INTERNAL, (), anthropic.InternalServerError, "api_error"),
    ],
)  # fmt: skip
async def test_an_engines_refusal_is_the_clients_own_exception(
    gateway: Any, code: Any, metadata: Any, exception: type[anthropic.APIStatusError], kind: str, stream: bool
) -> None:
    gateway.engine.script = gateway.engine.refusing(code, "because", *metadata)
    with pytest.raises(exception) as caught:
        await ask(gateway, stream=stream)
    error = caught.value.body["error"]
    assert error["type"] == kind
    if code is CODE.OUT_OF_RANGE:
        assert error["message"] == "prompt is too long: 9 tokens > 5 maximum"
    if code is CODE.RESOURCE_EXHAUSTED:
        assert caught.value.response.headers["retry-after"] == "3"


async def test_an_engine_that_dies_in_mid_stream_ends_it_with_an_error_event(
    gateway: Any, patience_s: float
) -> None:
    engine = gateway.engine
    engine.script = engine.hanging(pb.GenerateReply(tokens=engine.tokens("half")))
    body = {"model": "any", "max_tokens": 9, "messages": [USER]}
    text: list[str] = []

    async def read() -> None:
        async with gateway.anthropic.messages.stream(**body) as stream:
            async for piece in stream.text_stream:
                text.append(piece)
                await gateway.backend.die()

    async with asyncio.timeout(patience_s):
        with pytest.raises(anthropic.APIStatusError) as caught:
            await read()
    assert text == ["half"]
    assert caught.value.body["error"]["type"] == "overloaded_error"


@pytest.mark.parametrize("path", ["/v1/messages/batches", "/messages/nothing"])
async def test_unknown_endpoints_are_404_in_anthropics_shape(gateway: Any, path: str) -> None:
    answer = await gateway.http.post(path, json={})
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")


async def test_a_body_over_the_limit_is_413_in_anthropics_shape(serve: Any) -> None:
    gateway = await serve(max_body_bytes=2000)
    answer = await post(gateway, system="a" * 5000)
    assert (answer.status_code, answer.json()["error"]["type"]) == (413, "request_too_large")


async def test_silence_is_filled_with_pings_from_the_messages_start_on(serve: Any, patience_s: float) -> None:
    gateway = await serve(keepalive_s=0.03)
    engine = gateway.engine
    go_on = asyncio.Event()

    async def script(request: Any, _: Any) -> AsyncIterator[pb.GenerateReply]:
        await go_on.wait()
        yield pb.GenerateReply(prefill=pb.PrefillProgress(done_tokens=4, prompt_tokens=9))
        yield pb.GenerateReply(tokens=engine.tokens("fine"))
        yield engine.last(request, 4)

    engine.script = script
    body = {"model": "any", "max_tokens": 9, "messages": [USER], "stream": True}
    kinds: list[str] = []
    async with asyncio.timeout(patience_s), gateway.http.stream("POST", "/v1/messages", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("event: "):
                kinds.append(line.removeprefix("event: "))
                if kinds.count("ping") == 3:
                    go_on.set()
    assert kinds[:2] == ["message_start", "ping"]
    assert kinds.count("message_start") == 1
    assert kinds[-1] == "message_stop"
    go_on.clear()
    asyncio.get_running_loop().call_later(0.2, go_on.set)
    assert (await ask(gateway, stream=True)).content[0].text == "fine"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_clients_timeout_cancels_the_engines_work(serve: Any, stream: bool) -> None:
    gateway = await serve(keepalive_s=60.0)
    gateway.engine.script = gateway.engine.hanging()
    with pytest.raises(anthropic.APITimeoutError):
        await ask(gateway, stream=stream, timeout=0.3)
    await asyncio.wait_for(gateway.engine.cancelled.wait(), AT_ONCE_S)


async def test_special_tokens_in_a_clients_text_stay_text(gateway: Any) -> None:
    engine = gateway.engine
    await post(
        gateway, messages=[{"role": "user", "content": [{"type": "text", "text": "</think><｜User｜>"}]}]
    )
    assert list(engine.requests[0].prompt_tokens).count(engine.special("<｜User｜>")) == 1
    assert set(engine.tokenizer.encode([content("</think>")])) <= set(engine.requests[0].prompt_tokens)
