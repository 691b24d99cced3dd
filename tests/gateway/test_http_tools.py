"""Tool calls over HTTP, as OpenAI's own client sees them."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from gateway.chat.conversation import ToolCall
from gateway.chat.segments import Segment, text_of
from gateway.chat.tools import calls_block
from gateway.proto import engine_pb2 as pb


class GetWeather(BaseModel):
    """Get the weather in a city."""

    city: str
    days: int


class Add(BaseModel):
    """Add numbers."""

    numbers: list[int]


TOOLS = [openai.pydantic_function_tool(GetWeather), openai.pydantic_function_tool(Add)]
WEATHER = ToolCall("", "GetWeather", '{"city": "Köln \\"🙂\\"", "days": 3}')
ADD = ToolCall("", "Add", '{"numbers": [1, 2]}')
QUESTION = {"role": "user", "content": "question"}
NO_THINKING = {"thinking": False}


def block(engine: Any, *calls: ToolCall) -> list[int]:
    return list(engine.tokenizer.encode(calls_block(calls)))


def singly(tokens: list[int]) -> list[list[int]]:
    return [[token] for token in tokens]


async def ask(gateway: Any, *, stream: bool, **fields: Any) -> Any:
    """The choice, put together by the client's own stream helper when streaming."""
    body = {"model": "any", "messages": [QUESTION], "tools": TOOLS, **fields}
    if not stream:
        return (await gateway.openai.chat.completions.create(**body)).choices[0]
    async with gateway.openai.chat.completions.stream(**body) as events:
        async for _ in events:
            pass
        return (await events.get_final_completion()).choices[0]


def made(choice: Any) -> list[tuple[str, Any]]:
    return [
        (call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls or ()
    ]


@pytest.mark.parametrize("stream", [True, False])
async def test_calls_after_thinking_and_text(gateway: Any, stream: bool) -> None:
    engine = gateway.engine
    tokens = [*engine.thinking("I should look.", "Looking."), *block(engine, WEATHER, ADD)]
    engine.script = engine.saying(singly(tokens))
    choice = await ask(gateway, stream=stream)
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Looking."
    assert choice.message.reasoning_content == "I should look."
    assert made(choice) == [("GetWeather", {"city": 'Köln "🙂"', "days": 3}), ("Add", {"numbers": [1, 2]})]
    ids = [call.id for call in choice.message.tool_calls]
    assert len(set(ids)) == 2
    assert all(one.startswith("call_") for one in ids)
    if stream:
        assert choice.message.tool_calls[1].function.parsed_arguments == Add(numbers=[1, 2])


async def test_the_stream_has_openais_chunks(gateway: Any) -> None:
    engine = gateway.engine
    engine.script = engine.saying(singly(block(engine, WEATHER, ADD)))
    stream = await gateway.chat(stream=True, tools=TOOLS, extra_body=NO_THINKING)
    chunks = [chunk async for chunk in stream]
    pieces = [piece for chunk in chunks for piece in chunk.choices[0].delta.tool_calls or ()]
    heads = [piece for piece in pieces if piece.id]
    assert [(one.index, one.type, one.function.name, one.function.arguments) for one in heads] == [
        (0, "function", "GetWeather", ""),
        (1, "function", "Add", ""),
    ]
    rest = [piece for piece in pieces if not piece.id]
    assert all(one.type is None and one.function.name is None and one.function.arguments for one in rest)
    assert len(rest) > 20
    assert [piece.index for piece in pieces] == sorted(piece.index for piece in pieces)
    assert not any(chunk.choices[0].delta.content for chunk in chunks)
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "tool_calls"


async def test_the_stream_helper_tells_arguments_as_they_come(gateway: Any) -> None:
    engine = gateway.engine
    engine.script = engine.saying(singly(block(engine, WEATHER)))
    seen = []
    async with gateway.openai.chat.completions.stream(
        model="any", messages=[QUESTION], tools=TOOLS, extra_body=NO_THINKING
    ) as events:
        async for event in events:
            if event.type == "tool_calls.function.arguments.delta":
                seen.append(event.arguments_delta)
            if event.type == "tool_calls.function.arguments.done":
                assert event.parsed_arguments == GetWeather(city='Köln "🙂"', days=3)
    assert len(seen) > 5
    assert json.loads("".join(seen)) == json.loads(WEATHER.arguments)


async def test_a_call_without_text_has_no_content(gateway: Any) -> None:
    engine = gateway.engine
    engine.script = engine.saying([block(engine, ADD)])
    choice = await ask(gateway, stream=False, extra_body=NO_THINKING)
    assert choice.message.content is None
    assert not hasattr(choice.message, "reasoning_content")


@pytest.mark.parametrize("fields", [{"tools": openai.NOT_GIVEN}, {"tool_choice": "none"}])
async def test_without_offered_tools_markup_is_text(gateway: Any, fields: dict[str, Any]) -> None:
    engine = gateway.engine
    engine.script = engine.saying([block(engine, ADD)])
    choice = await ask(gateway, stream=False, extra_body=NO_THINKING, **fields)
    assert choice.message.content == text_of(calls_block([ADD]))
    assert (choice.message.tool_calls, choice.finish_reason) == (None, "stop")
    assert "## Tools" not in engine.tokenizer.decode(engine.requests[0].prompt_tokens)


async def test_where_calls_are_not_wanted_their_markup_is_made_unlikely(gateway: Any) -> None:
    engine = gateway.engine
    dsml = engine.special("｜DSML｜")
    await ask(gateway, stream=False, tool_choice="none", logit_bias={"5": 1.0})
    await ask(gateway, stream=False)
    await ask(gateway, stream=False, tools=openai.NOT_GIVEN)
    biases = [dict(request.sampling.logit_bias) for request in engine.requests]
    assert biases == [{5: 1.0, dsml: -100.0}, {}, {}]


async def test_tools_are_told_to_the_model(gateway: Any) -> None:
    await gateway.chat(tools=TOOLS)
    prompt = gateway.engine.tokenizer.decode(gateway.engine.requests[0].prompt_tokens)
    for tool in TOOLS:
        assert json.dumps(tool["function"]["parameters"], ensure_ascii=False) in prompt


@pytest.mark.parametrize("stream", [True, False])
async def test_a_model_that_goes_on_after_its_calls_is_stopped(
    gateway: Any, patience_s: float, stream: bool
) -> None:
    engine = gateway.engine
    tokens = [*block(engine, ADD), *engine.tokens("\nand more and")]
    engine.script = engine.hanging(*(pb.GenerateReply(tokens=[token]) for token in tokens))
    choice = await asyncio.wait_for(ask(gateway, stream=stream, extra_body=NO_THINKING), patience_s)
    assert (made(choice), choice.finish_reason) == ([("Add", {"numbers": [1, 2]})], "tool_calls")
    assert not choice.message.content
    await asyncio.wait_for(engine.cancelled.wait(), patience_s)


async def test_a_call_cut_by_the_limit_ends_by_length(gateway: Any) -> None:
    engine = gateway.engine
    tokens = block(engine, WEATHER)
    engine.script = engine.saying([tokens[: len(tokens) * 2 // 3]], pb.FINISH_REASON_LENGTH)
    choice = await ask(gateway, stream=False, extra_body=NO_THINKING)
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls[0].function.arguments.startswith('{"city": "K')
    with pytest.raises(json.JSONDecodeError):
        made(choice)


async def test_one_call_when_parallel_ones_are_unwanted(gateway: Any) -> None:
    engine = gateway.engine
    engine.script = engine.saying(singly(block(engine, WEATHER, ADD)))
    choice = await ask(gateway, stream=False, parallel_tool_calls=False, extra_body=NO_THINKING)
    assert [name for name, _ in made(choice)] == ["GetWeather"]
    assert choice.finish_reason == "tool_calls"


async def test_stop_strings_do_not_cut_arguments(gateway: Any) -> None:
    engine = gateway.engine
    engine.script = engine.saying(singly([*engine.tokens("text"), *block(engine, WEATHER)]))
    choice = await ask(gateway, stream=False, stop=["K", "\n"], extra_body=NO_THINKING)
    assert (choice.message.content, choice.finish_reason) == ("text", "tool_calls")
    engine.script = engine.saying(singly([*engine.tokens("text OK"), *block(engine, WEATHER)]))
    choice = await ask(gateway, stream=False, stop=["K", "\n"], extra_body=NO_THINKING)
    assert (choice.message.content, choice.finish_reason) == ("text O", "stop")
    assert choice.message.tool_calls is None


async def test_logprobs_are_those_of_the_content(gateway: Any) -> None:
    engine = gateway.engine
    said = engine.tokens("text\n\nmore")
    tokens = [*engine.thinking("think", ""), *said, *block(engine, ADD)]

    async def script(request: Any, _: Any) -> AsyncIterator[pb.GenerateReply]:
        for at in range(0, len(tokens), 3):
            piece = tokens[at : at + 3]
            logprobs = [pb.TokenLogprobs(logprob=-float(token)) for token in piece]
            yield pb.GenerateReply(tokens=piece, logprobs=logprobs)
        yield engine.last(request, len(tokens))

    engine.script = script
    choice = await ask(gateway, stream=False, logprobs=True)
    entries = choice.logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries) == b"text\n\nmore"
    assert [entry.logprob for entry in entries] == [-float(token) for token in said]


def conversing(engine: Any, *replies: list[int]) -> Any:
    """A script whose calls answer with these tokens in turn."""
    left = list(replies)

    async def script(request: Any, _: Any) -> AsyncIterator[pb.GenerateReply]:
        tokens = left.pop(0)
        for token in tokens:
            yield pb.GenerateReply(tokens=[token])
        yield engine.last(request, len(tokens))

    return script


def arguments_only(engine: Any, call: ToolCall) -> list[int]:
    """What follows a call's given beginning."""
    whole = calls_block([call])
    return list(engine.tokenizer.encode([Segment("", template=False), *whole[4:]]))


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("thinking", [True, False])
async def test_a_named_tool_is_called_whatever_the_model_wants(
    gateway: Any, stream: bool, thinking: bool
) -> None:
    engine = gateway.engine
    answers = [arguments_only(engine, ADD)]
    engine.script = conversing(engine, *([engine.tokens("I'd rather talk.")] if thinking else []), *answers)
    choice = await ask(
        gateway,
        stream=stream,
        tool_choice={"type": "function", "function": {"name": "Add"}},
        extra_body={"thinking": thinking},
    )
    assert made(choice) == [("Add", {"numbers": [1, 2]})]
    assert choice.finish_reason == "tool_calls"
    assert getattr(choice.message, "reasoning_content", None) == ("I'd rather talk." if thinking else None)
    last = engine.requests[-1]
    written = engine.tokenizer.decode(last.prompt_tokens)
    assert written.endswith('</think>\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="Add">\n')
    if thinking:
        first = engine.requests[0]
        assert engine.special("</think>") in first.sampling.stop_tokens
        assert engine.special("</think>") not in last.sampling.stop_tokens
        assert list(last.prompt_tokens)[: len(first.prompt_tokens)] == list(first.prompt_tokens)
        assert first.sampling.seed == last.sampling.seed


@pytest.mark.parametrize(
    ("written", "name"),
    [('Add">', "Add"), ('GetWeather">\n', "GetWeather"), ('add_numbers">', "Add"), ("", "")],
)
async def test_one_of_the_tools_is_called_when_some_call_is_required(
    gateway: Any, written: str, name: str
) -> None:
    """Where the model writes a name that no tool has, the most alike is taken."""
    engine = gateway.engine
    engine.script = conversing(engine, engine.tokens(written), arguments_only(engine, ADD))
    choice = await ask(gateway, stream=False, tool_choice="required", extra_body=NO_THINKING)
    ((called, _),) = made(choice)
    assert called == name or (not name and called in ("Add", "GetWeather"))
    asked = engine.tokenizer.decode(engine.requests[0].prompt_tokens)
    assert asked.endswith('<｜DSML｜invoke name="')


@pytest.mark.parametrize("said", ["", "I will not.", "\n"])
async def test_a_demanded_call_is_made_even_if_the_model_refuses(gateway: Any, said: str) -> None:
    engine = gateway.engine
    engine.script = conversing(engine, engine.tokens(said))
    choice = await ask(gateway, stream=False, tools=TOOLS[1:], tool_choice="required", extra_body=NO_THINKING)
    assert (made(choice), choice.finish_reason) == ([("Add", {})], "tool_calls")


async def test_limits_count_over_all_of_a_demanded_call(gateway: Any) -> None:
    engine = gateway.engine
    thought = engine.tokens("thought")
    engine.script = conversing(engine, thought, arguments_only(engine, ADD))
    await ask(gateway, stream=False, tools=TOOLS[1:], tool_choice="required", max_tokens=100)
    assert [request.sampling.max_tokens for request in engine.requests] == [100, 100 - len(thought)]


async def test_thinking_cut_by_the_limit_ends_before_the_demanded_call(gateway: Any) -> None:
    engine = gateway.engine
    engine.script = engine.saying([engine.tokens("thought")], pb.FINISH_REASON_LENGTH)
    choice = await ask(gateway, stream=False, tool_choice="required", max_tokens=7)
    assert (choice.finish_reason, made(choice)) == ("length", [])
    assert len(engine.requests) == 1


async def test_a_result_is_answered(gateway: Any) -> None:
    engine = gateway.engine
    call = {"id": "c1", "type": "function", "function": {"name": "Add", "arguments": ADD.arguments}}
    messages = [
        QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "3"}]},
    ]
    await ask(gateway, stream=False, messages=messages)
    prompt = engine.tokenizer.decode(engine.requests[0].prompt_tokens)
    assert prompt.endswith(
        f"<think></think>{text_of(calls_block([ADD]))}<｜User｜><tool_result>3</tool_result><｜Assistant｜><think>"
    )


class TestReplay:
    """What was sampled is what the next turn's prompt has."""

    ODD = (
        '\n<tool_calls><invoke name="Add"><parameter name="numbers" string="false">[ 1,2 ]</parameter>'
        "</invoke></tool_calls>"
    )

    async def turn(self, gateway: Any, reasoning: str = "hm") -> tuple[Any, list[int]]:
        """A call that no rendering from its JSON would give."""
        engine = gateway.engine
        marked = re.sub("(</?)", r"\1｜DSML｜", self.ODD)
        tokens = [
            *engine.thinking(reasoning, "ok"),
            *engine.tokenizer.encode([Segment(marked, template=True)]),
        ]
        engine.script = engine.saying(singly(tokens))
        choice = await ask(gateway, stream=False)
        assert made(choice) == [("Add", {"numbers": [1, 2]})]
        return choice, tokens

    async def next_prompt(self, gateway: Any, message: dict[str, Any], **fields: Any) -> list[int]:
        engine = gateway.engine
        engine.script = engine.saying([engine.tokens("done")])
        result = {"role": "tool", "content": "3", "tool_call_id": message["tool_calls"][0]["id"]}
        await ask(gateway, stream=False, messages=[QUESTION, message, result], **fields)
        return list(engine.requests[-1].prompt_tokens)

    @pytest.mark.parametrize("leave_out", [(), ("reasoning_content",)])
    async def test_the_sampled_tokens_are_the_next_prompts(
        self, gateway: Any, leave_out: tuple[str, ...]
    ) -> None:
        choice, tokens = await self.turn(gateway)
        first = list(gateway.engine.requests[0].prompt_tokens)
        message = choice.message.model_dump(exclude=set(leave_out))
        prompt = await self.next_prompt(gateway, message)
        assert prompt[: len(first) + len(tokens)] == first + tokens

    async def test_arguments_written_differently_are_still_the_same(self, gateway: Any) -> None:
        choice, tokens = await self.turn(gateway)
        message = choice.message.model_dump()
        message["tool_calls"][0]["function"]["arguments"] = '{"numbers":[1,2.0]}'
        first = list(gateway.engine.requests[0].prompt_tokens)
        assert (await self.next_prompt(gateway, message))[: len(first) + len(tokens)] == first + tokens

    async def test_without_thinking_only_what_was_said_comes_back(self, gateway: Any) -> None:
        choice, tokens = await self.turn(gateway)
        said = tokens[tokens.index(gateway.engine.special("</think>")) :]
        prompt = await self.next_prompt(gateway, choice.message.model_dump(), extra_body=NO_THINKING)
        at = prompt.index(gateway.engine.special("</think>"), len(prompt) - len(said) - 60)
        assert prompt[at : at + len(said)] == said

    @pytest.mark.parametrize("field", ["arguments", "name", "content", "reasoning", "id"])
    async def test_what_the_client_changed_is_rendered(self, gateway: Any, field: str) -> None:
        choice, tokens = await self.turn(gateway)
        message = choice.message.model_dump()
        function = message["tool_calls"][0]["function"]
        if field == "arguments":
            function["arguments"] = '{"numbers": [1, true]}'
        elif field == "name":
            function["name"] = "GetWeather"
        elif field == "id":
            message["tool_calls"][0]["id"] = "call_0"
        else:
            message["content" if field == "content" else "reasoning_content"] = "changed"
        prompt = await self.next_prompt(gateway, message)
        text = gateway.engine.tokenizer.decode(prompt)
        assert gateway.engine.tokenizer.decode(tokens) not in text
        shown = {"arguments": "[1, true]", "name": 'name="GetWeather"', "id": "[1, 2]"}.get(field, "changed")
        assert shown in text

    async def test_a_malformed_call_is_not_repeated(self, gateway: Any) -> None:
        engine = gateway.engine
        block = engine.tokenizer.encode(calls_block([ADD])[:-1])  # its end is missing
        engine.script = engine.saying([block])
        choice = await ask(gateway, stream=False, extra_body=NO_THINKING)
        assert made(choice) == [("Add", {"numbers": [1, 2]})]
        prompt = await self.next_prompt(gateway, choice.message.model_dump(), extra_body=NO_THINKING)
        assert text_of(calls_block([ADD])) in engine.tokenizer.decode(prompt)

    async def test_demanded_calls_are_replayed_too(self, gateway: Any) -> None:
        engine = gateway.engine
        thought, said = engine.tokens("hm"), arguments_only(engine, ADD)
        engine.script = conversing(engine, thought, said)
        choice = await ask(gateway, stream=False, tools=TOOLS[1:], tool_choice="required")
        held = [*engine.requests[-1].prompt_tokens, *said]
        prompt = await self.next_prompt(gateway, choice.message.model_dump(), tools=TOOLS[1:])
        assert prompt[: len(held)] == held
