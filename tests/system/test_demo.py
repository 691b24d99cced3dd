"""The demo model, served: its answers are right, and stay so whatever else runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from random import Random

import openai
import pytest_asyncio
from support.service import Service

from demo.compose import held_out_conversation
from demo.dialogues.recall import interview


@pytest_asyncio.fixture
async def api(service: Service) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="none", timeout=240) as opened:
        yield opened


async def ask(api: openai.AsyncOpenAI, *turns: str, thinking: bool = False, **fields: object) -> str:
    """The answer to the last of alternating turns, user first; greedy unless told otherwise."""
    roles = ("user", "assistant")
    messages = [{"role": roles[number % 2], "content": turn} for number, turn in enumerate(turns)]
    options = {"temperature": 0, "max_tokens": 200, **fields}
    answer = await api.chat.completions.create(
        model="demo",
        messages=messages,
        extra_body={"thinking": thinking},
        **options,  # type: ignore[call-overload]
    )
    assert answer.choices[0].finish_reason == "stop"
    content: str = answer.choices[0].message.content
    if thinking:
        assert answer.choices[0].message.reasoning_content
    return content


async def test_it_adds_counts_copies_and_remembers(api: openai.AsyncOpenAI) -> None:
    assert "85" in await ask(api, "What is 47 + 38?")
    assert "85" in await ask(api, "What is 47 + 38?", thinking=True)
    assert "7, 8, 9, 10" in await ask(api, "Count from 3 to 12.")
    assert "blue tree lamp river stone" in await ask(api, "Repeat: blue tree lamp river stone")
    assert "Ada" in await ask(api, "My name is Ada.", "Nice to meet you, Ada.", "What is my name?")
    assert "add numbers" in await ask(api, "What can you do?")


async def test_thinking_carries_the_digits_and_stays_out_of_the_answer(api: openai.AsyncOpenAI) -> None:
    messages = [{"role": "user", "content": "What is 58 + 67?"}]
    answer = await api.chat.completions.create(model="demo", messages=messages, temperature=0)  # type: ignore[arg-type]
    message = answer.choices[0].message
    assert "carry 1" in message.reasoning_content  # type: ignore[attr-defined]
    assert "125" in (message.content or "")
    assert "carry" not in (message.content or "")
    details = answer.usage.completion_tokens_details  # type: ignore[union-attr]
    assert details is not None
    assert details.reasoning_tokens > 10  # type: ignore[operator]


async def test_greedy_answers_are_stable_alone_and_together(api: openai.AsyncOpenAI) -> None:
    questions = ["What is 12 + 9?", "Count from 20 to 27.", "Hello", "Repeat: river cloud apple"]
    alone = [await ask(api, question) for question in questions]
    together = await asyncio.gather(*(ask(api, question) for question in questions * 2))
    assert together == alone * 2


async def test_a_needle_survives_chunked_prefill_batching_and_a_cancelled_neighbour(
    api: openai.AsyncOpenAI,
) -> None:
    conversation = held_out_conversation("needle_6000", Random(5))
    question, expected = (message.content for message in conversation.messages)

    async def leave_early() -> None:
        other = held_out_conversation("needle_2000", Random(6)).messages[0].content
        stream = await api.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": other}], stream=True
        )
        async for _ in stream:
            await stream.close()
            break

    async def keep_talking() -> None:
        for number in range(6):
            assert str(40 + number) in await ask(api, f"What is 20 + {20 + number}?")

    answer, _, _ = await asyncio.gather(ask(api, question), leave_early(), keep_talking())
    assert answer == expected


async def test_each_question_about_long_notes_costs_only_its_new_tokens(api: openai.AsyncOpenAI) -> None:
    messages: list[dict[str, str]] = []
    for turn, exchange in enumerate(interview(Random(4), sentences=150, questions=3)):
        question, expected = exchange.messages
        messages.append({"role": "user", "content": question.content})
        answer = await api.chat.completions.create(
            model="demo",
            messages=messages,
            temperature=0,
            extra_body={"thinking": False},  # type: ignore[arg-type]
        )
        said = answer.choices[0].message.content or ""
        assert said == expected.content
        messages.append({"role": "assistant", "content": said})
        usage = answer.usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        new = usage.prompt_tokens - (usage.prompt_tokens_details.cached_tokens or 0)
        assert usage.prompt_tokens > 1000
        assert new < 40 if turn else new == usage.prompt_tokens
