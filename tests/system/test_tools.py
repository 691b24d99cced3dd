"""The demo model calls tools: through the official client, streamed and whole, turn after turn."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import openai
import pytest
import pytest_asyncio
from pydantic import BaseModel
from support.service import Service

from demo.compose import held_out_conversation
from demo.dialogues.message import Conversation


class GetWeather(BaseModel):
    """Get the weather in a city."""

    city: str


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city.",
        "strict": True,
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
QUESTION = {"role": "user", "content": "What is the weather in Paris?"}


@pytest_asyncio.fixture
async def api(service: Service) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="none", timeout=240) as opened:
        yield opened


async def ask(api: openai.AsyncOpenAI, messages: list[Any], *, thinking: bool = False, **fields: Any) -> Any:
    """The completion, streamed through the client's helper when ``stream`` is among the fields."""
    body = {
        "model": "demo",
        "messages": messages,
        "temperature": 0,
        "max_tokens": 200,
        "extra_body": {"thinking": thinking},
        **fields,
    }
    if not body.pop("stream", False):
        return await api.chat.completions.create(**body)
    async with api.chat.completions.stream(**body, stream_options={"include_usage": True}) as events:
        async for _ in events:
            pass
        return await events.get_final_completion()


def calls_of(completion: Any) -> list[tuple[str, Any]]:
    return [
        (call.function.name, json.loads(call.function.arguments))
        for call in completion.choices[0].message.tool_calls or ()
    ]


def function_tools(conversation: Conversation) -> list[dict[str, Any]]:
    """Strict ones: the client's stream helper takes no others."""
    return [{"type": "function", "function": {**tool, "strict": True}} for tool in conversation.tools]


def cached(completion: Any) -> int:
    return int(completion.usage.prompt_tokens_details.cached_tokens)


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_it_calls_and_answers_from_the_result_at_the_cost_of_new_tokens(
    api: openai.AsyncOpenAI, stream: bool, thinking: bool
) -> None:
    """Turn two finds all of turn one, question, thinking and call, in the engine."""
    conversation = held_out_conversation("tool_call", Random(21), thinking)
    question, calling, result, answer = conversation.messages
    tools = function_tools(conversation)
    messages: list[Any] = [{"role": "user", "content": question.content}]
    first = await ask(api, messages, thinking=thinking, stream=stream, tools=tools)
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls"
    assert calls_of(first) == [(call.name, call.arguments) for call in calling.calls]
    assert not message.content
    if thinking:
        assert message.reasoning_content == calling.reasoning
    # Most clients send no reasoning back.
    messages.append(message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True))
    messages.append({"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": result.content})
    second = await ask(api, messages, thinking=thinking, stream=stream, tools=tools)
    assert second.choices[0].message.content == answer.content
    assert second.choices[0].finish_reason == "stop"
    assert cached(second) >= first.usage.prompt_tokens + first.usage.completion_tokens - 1


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
async def test_a_demanded_call_is_made_where_there_is_nothing_to_call_for(
    api: openai.AsyncOpenAI, thinking: bool, choice: Any
) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    free = await ask(api, messages, thinking=thinking, tools=[WEATHER, ADD])
    assert calls_of(free) == []
    demanded = await ask(api, messages, thinking=thinking, tools=[WEATHER, ADD], tool_choice=choice)
    assert demanded.choices[0].finish_reason == "tool_calls"
    name = demanded.choices[0].message.tool_calls[0].function.name
    assert name in (("get_weather", "add") if choice == "required" else ("get_weather",))
    if thinking:
        assert demanded.choices[0].message.reasoning_content


async def test_a_required_call_is_the_one_that_fits(api: openai.AsyncOpenAI) -> None:
    for question, call in [
        ("What is the weather in Paris?", ("get_weather", {"city": "Paris"})),
        ("Use the tool to add 512 and 77.", ("add", {"a": 512, "b": 77})),
    ]:
        messages = [{"role": "user", "content": question}]
        completion = await ask(api, messages, tools=[WEATHER, ADD], tool_choice="required")
        assert calls_of(completion) == [call]


async def test_with_tools_withheld_it_writes_no_call(api: openai.AsyncOpenAI) -> None:
    """The demo model answers this question with a call even where no tool is offered."""
    free = await ask(api, [QUESTION])
    assert calls_of(free) == []
    assert "get_weather" in free.choices[0].message.content
    for stream in (False, True):
        withheld = await ask(api, [QUESTION], tools=[WEATHER], tool_choice="none", stream=stream)
        assert calls_of(withheld) == []
        assert withheld.choices[0].finish_reason in ("stop", "length")
        assert "DSML" not in (withheld.choices[0].message.content or "")


async def test_pydantic_tools_come_parsed(api: openai.AsyncOpenAI) -> None:
    tool = openai.pydantic_function_tool(GetWeather, name="get_weather", description=GetWeather.__doc__)
    completion = await ask(api, [QUESTION], stream=True, tools=[tool])
    assert completion.choices[0].message.tool_calls[0].function.parsed_arguments == GetWeather(city="Paris")
