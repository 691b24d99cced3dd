"""A thinking budget ends the thinking and not the answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from gateway.chat.conversation import ToolCall
from gateway.chat.tools import calls_block
from gateway.proto import engine_pb2 as pb

USER = {"role": "user", "content": "hello"}
TOOL = {"name": "f", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}
CALL = ToolCall("", "f", '{"city": "x"}')
AT_ONCE_S = 2.0


async def ask(gateway: Any, budget: int, *, stream: bool = False, **fields: Any) -> Any:
    body = {"model": "any", "max_tokens": 500, "messages": [USER], **fields}
    body["thinking"] = {"type": "enabled", "budget_tokens": budget}
    if not stream:
        return await gateway.anthropic.messages.create(**body)
    async with gateway.anthropic.messages.stream(**body) as events:
        return await events.get_final_message()


def writing(engine: Any, tokens: list[int]) -> Any:
    """A model that writes these tokens, going on wherever a prompt ends that holds some of them, and answers
    with its second half as soon as its thinking has been ended for it.
    """
    end = engine.special("</think>")

    async def script(request: pb.GenerateRequest, _: Any) -> AsyncIterator[pb.GenerateReply]:
        prompt = list(request.prompt_tokens)
        done = prompt[len(engine.requests[0].prompt_tokens) :]
        rest = tokens[len(done) :] if done == tokens[: len(done)] else tokens[tokens.index(end) + 1 :]
        limit = request.sampling.max_tokens
        said = rest[:limit] if limit else rest
        for token in said:
            yield pb.GenerateReply(tokens=[token])
        cut = len(said) < len(rest)
        yield engine.last(request, len(said), pb.FINISH_REASON_LENGTH if cut else pb.FINISH_REASON_STOP)

    return script


@pytest.mark.parametrize("stream", [True, False])
async def test_thinking_over_its_budget_is_ended_and_the_answer_goes_on(gateway: Any, stream: bool) -> None:
    engine = gateway.engine
    thought = engine.tokens("a long thought about everything")
    engine.script = writing(engine, [*thought, engine.special("</think>"), *engine.tokens("answer")])
    message = await ask(gateway, 5, stream=stream)
    thinking, text = message.content
    assert thinking.thinking == engine.tokenizer.decode(thought[:5])
    assert text.text == "answer"
    assert message.stop_reason == "end_turn"
    first, second = engine.requests
    assert first.sampling.max_tokens == 5
    written = [*thought[:5], engine.special("</think>")]
    assert list(second.prompt_tokens) == [*first.prompt_tokens, *written]
    assert second.sampling.seed == first.sampling.seed
    assert second.sampling.max_tokens == 495
    usage = message.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == len(first.prompt_tokens)
    assert usage.output_tokens == 5 + len(engine.tokens("answer"))
    assert usage.output_tokens_details.thinking_tokens == 5


@pytest.mark.parametrize("stream", [True, False])
async def test_thinking_within_its_budget_is_left_alone(gateway: Any, stream: bool) -> None:
    """Even where the answer goes beyond it: it comes out as if it had never been interrupted."""
    engine = gateway.engine
    tokens = engine.thinking("hm", "a long answer 🙂")
    engine.script = writing(engine, tokens)
    whole = await ask(gateway, 400, stream=stream)
    assert len(engine.requests) == 1
    engine.requests.clear()
    for budget in range(len(engine.tokens("hm")) + 1, len(tokens)):
        message = await ask(gateway, budget, stream=stream)
        assert [one.to_dict() | {"signature": ""} for one in message.content] == [
            one.to_dict() | {"signature": ""} for one in whole.content
        ]
        assert message.usage.output_tokens == whole.usage.output_tokens == len(tokens)
        first, second = engine.requests
        assert list(second.prompt_tokens) == [*first.prompt_tokens, *tokens[:budget]]
        engine.requests.clear()


async def test_a_budget_beyond_max_tokens_changes_nothing(gateway: Any) -> None:
    engine = gateway.engine
    engine.script = writing(engine, engine.thinking("a long thought", "answer"))
    message = await ask(gateway, 9, max_tokens=9)
    assert message.stop_reason == "max_tokens"
    assert [one.type for one in message.content] == ["thinking"]
    assert len(engine.requests) == 1
    assert message.usage.output_tokens == 9


async def test_max_tokens_count_thinking_and_answer(gateway: Any) -> None:
    engine = gateway.engine
    engine.script = writing(engine, engine.thinking("a long thought", "a long answer"))
    message = await ask(gateway, 4, max_tokens=9)
    assert message.stop_reason == "max_tokens"
    assert message.content[1].text == engine.tokenizer.decode(engine.tokens("a long answer")[:5])
    assert message.usage.output_tokens == 9


async def test_half_a_character_at_the_end_of_the_budget_is_replaced(gateway: Any) -> None:
    engine = gateway.engine
    engine.script = writing(engine, engine.thinking("🙂🙂", "answer"))
    message = await ask(gateway, 6)
    assert message.content[0].thinking == "🙂\ufffd"
    assert message.content[1].text == "answer"


@pytest.mark.parametrize("choice", ["auto", "any"])
async def test_calls_come_after_ended_thinking(gateway: Any, choice: str) -> None:
    engine = gateway.engine

    async def script(request: pb.GenerateRequest, _: Any) -> AsyncIterator[pb.GenerateReply]:
        if len(engine.requests) == 1:
            yield pb.GenerateReply(tokens=engine.tokens("thought")[:4])
            yield engine.last(request, 4, pb.FINISH_REASON_LENGTH)
            return
        rest = engine.tokenizer.encode(calls_block([CALL]))
        prompt = list(request.prompt_tokens)
        held = next((at for at in range(len(rest), 0, -1) if prompt[-at:] == rest[:at]), 0)
        yield pb.GenerateReply(tokens=rest[held:])
        yield engine.last(request, len(rest) - held)

    engine.script = script
    message = await ask(gateway, 4, tools=[TOOL], tool_choice={"type": choice})
    assert [one.type for one in message.content] == ["thinking", "tool_use"]
    assert message.content[1].input == {"city": "x"}
    assert message.stop_reason == "tool_use"
    closed = "</think>\n\n<｜DSML｜tool_calls>" if choice == "any" else "</think>"
    assert closed in engine.tokenizer.decode(engine.requests[1].prompt_tokens)


async def test_a_context_that_is_full_by_then_ends_the_answer_by_its_length(gateway: Any) -> None:
    engine = gateway.engine

    async def script(request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateReply]:
        if len(engine.requests) > 1:
            await context.abort(grpc.StatusCode.OUT_OF_RANGE, "full")
        yield pb.GenerateReply(tokens=engine.tokens("thought")[:4])
        yield engine.last(request, 4, pb.FINISH_REASON_LENGTH)

    engine.script = script
    message = await ask(gateway, 4)
    assert message.stop_reason == "max_tokens"
    assert message.usage.output_tokens == 4


@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_after_the_budget_cancels_the_engines_work(serve: Any, stream: bool) -> None:
    gateway = await serve(keepalive_s=60.0)
    engine = gateway.engine
    going_on = asyncio.Event()

    async def script(request: pb.GenerateRequest, _: Any) -> AsyncIterator[pb.GenerateReply]:
        if len(engine.requests) == 1:
            yield pb.GenerateReply(tokens=engine.tokens("thought")[:4])
            yield engine.last(request, 4, pb.FINISH_REASON_LENGTH)
            return
        going_on.set()
        await asyncio.Event().wait()

    engine.script = script
    asking = asyncio.ensure_future(ask(gateway, 4, stream=stream))
    await asyncio.wait_for(going_on.wait(), AT_ONCE_S)
    asking.cancel()
    await asyncio.wait_for(engine.cancelled.wait(), AT_ONCE_S)


async def test_openais_chat_has_the_budget_too(gateway: Any) -> None:
    engine = gateway.engine
    engine.script = writing(engine, engine.thinking("a long thought", "answer"))
    thinking = {"type": "enabled", "budget_tokens": 4}
    whole = await gateway.chat(extra_body={"thinking": thinking})
    assert whole.choices[0].message.content == "answer"
    assert whole.usage.completion_tokens_details.reasoning_tokens == 4
