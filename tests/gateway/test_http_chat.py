"""Chat completions over HTTP, as OpenAI's own client sees them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.proto import engine_pb2 as pb


async def collect(stream: Any) -> tuple[str, str, list[Any]]:
    """Reasoning, content and all chunks of a stream."""
    reasoning, content, chunks = "", "", []
    async for chunk in stream:
        chunks.append(chunk)
        for choice in chunk.choices:
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            content += choice.delta.content or ""
    return reasoning, content, chunks


def singly(tokens: list[int]) -> list[list[int]]:
    return [[token] for token in tokens]


TEXT = "Grüße 🙂👍🏽 日本"


@pytest.mark.parametrize("stream", [True, False])
async def test_thinking_and_content_arrive_apart_in_whole_characters(gateway: Any, stream: bool) -> None:
    """The engine sends one byte a reply; both ways of answering say the same."""
    tokens = gateway.engine.thinking(f"think {TEXT}", TEXT)
    gateway.engine.script = gateway.engine.saying(singly(tokens))
    if stream:
        reasoning, content, chunks = await collect(await gateway.chat(stream=True))
        assert chunks[0].choices[0].delta.role == "assistant"
        assert [chunk.choices[0].finish_reason for chunk in chunks].count("stop") == 1
        assert chunks[-1].choices[0].finish_reason == "stop"
        assert len({chunk.id for chunk in chunks}) == 1
        assert all("\ufffd" not in chunk.model_dump_json() for chunk in chunks)
    else:
        whole = await gateway.chat()
        message = whole.choices[0].message
        reasoning, content = message.reasoning_content, message.content
        assert whole.choices[0].finish_reason == "stop"
        assert whole.object == "chat.completion"
        assert whole.model == "any"
    assert (reasoning, content) == (f"think {TEXT}", TEXT)


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_cut_inside_thinking_has_empty_content(gateway: Any, stream: bool) -> None:
    tokens = gateway.engine.tokens("still thinking")
    gateway.engine.script = gateway.engine.saying([tokens], pb.FINISH_REASON_LENGTH)
    if stream:
        reasoning, content, chunks = await collect(await gateway.chat(stream=True))
        finish = chunks[-1].choices[0].finish_reason
    else:
        choice = (await gateway.chat()).choices[0]
        reasoning, content, finish = (
            choice.message.reasoning_content,
            choice.message.content,
            choice.finish_reason,
        )
    assert (reasoning, content, finish) == ("still thinking", "", "length")


async def test_without_thinking_everything_is_content(gateway: Any) -> None:
    gateway.engine.script = gateway.engine.saying([gateway.engine.tokens("plain")])
    whole = await gateway.chat(extra_body={"thinking": {"type": "disabled"}})
    assert whole.choices[0].message.content == "plain"
    assert getattr(whole.choices[0].message, "reasoning_content", None) is None
    assert gateway.engine.requests[0].prompt_tokens[-1] == gateway.engine.special("</think>")


@pytest.mark.parametrize(
    ("fields", "thinks"),
    [
        ({}, True),
        ({"model": "deepseek-chat"}, False),
        ({"model": "deepseek-reasoner"}, True),
        ({"model": "deepseek-chat", "think": True}, True),
        ({"model": "deepseek-reasoner", "thinking": {"type": "disabled"}}, False),
        ({"thinking": False}, False),
        ({"think": False}, False),
        ({"chat_template_kwargs": {"thinking": False}}, False),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "minimal"}, True),
        ({"reasoning_effort": "max"}, True),
    ],
)
async def test_every_switch_for_thinking_is_heard(gateway: Any, fields: dict[str, Any], thinks: bool) -> None:
    assert (await gateway.post(**fields)).status_code == 200
    tag = "<think>" if thinks else "</think>"
    assert gateway.engine.requests[0].prompt_tokens[-1] == gateway.engine.special(tag)


@pytest.mark.parametrize("stream", [True, False])
async def test_stop_strings_end_the_answer_and_the_engines_work(
    gateway: Any, patience_s: float, stream: bool
) -> None:
    """The stop lies across replies; the same words in the thinking change nothing."""
    engine = gateway.engine
    tokens = engine.thinking("END of thought", "before EN and END after")
    engine.script = engine.hanging(*(pb.GenerateReply(tokens=[token]) for token in tokens))
    fields = {"stop": ["END"], "extra_body": {"think": True}}
    async with asyncio.timeout(patience_s):
        if stream:
            reasoning, content, chunks = await collect(await gateway.chat(stream=True, **fields))
            finish = chunks[-1].choices[0].finish_reason
        else:
            choice = (await gateway.chat(**fields)).choices[0]
            reasoning, content = choice.message.reasoning_content, choice.message.content
            finish = choice.finish_reason
        await engine.cancelled.wait()
    assert (reasoning, content, finish) == ("END of thought", "before EN and ", "stop")


async def test_a_stop_string_still_counts_the_prompt(gateway: Any) -> None:
    engine = gateway.engine
    engine.script = engine.hanging(pb.GenerateReply(tokens=engine.tokens("a END")))
    whole = await gateway.chat(stop="END", extra_body={"think": False})
    assert whole.usage.prompt_tokens == len(engine.requests[0].prompt_tokens)
    assert whole.usage.completion_tokens == len(engine.tokens("a END"))
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens


@pytest.mark.parametrize("stream", [True, False])
async def test_usage_and_timings_are_the_engines(gateway: Any, stream: bool) -> None:
    engine = gateway.engine
    tokens = engine.thinking("abc", "defg")
    engine.script = engine.saying([tokens])
    if stream:
        _, _, chunks = await collect(await gateway.chat(stream=True, stream_options={"include_usage": True}))
        assert chunks[-1].choices == []
        assert [chunk.usage is not None for chunk in chunks].count(True) == 1
        last = chunks[-1]
    else:
        last = await gateway.chat()
    usage = last.usage
    assert usage.prompt_tokens == len(engine.requests[0].prompt_tokens)
    assert usage.completion_tokens == len(tokens)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens == 7
    assert usage.completion_tokens_details.reasoning_tokens == len(engine.tokens("abc")) + 1
    assert (last.timings["ttft_s"], last.timings["decode_tokens_per_s"]) == (0.5, 14.5)


async def test_a_stream_without_the_option_has_no_usage(gateway: Any) -> None:
    _, _, chunks = await collect(await gateway.chat(stream=True))
    assert all(chunk.usage is None for chunk in chunks)


def with_logprobs(tokens: list[int]) -> list[pb.GenerateReply]:
    """One reply a token; each token's log-probability is minus its place."""
    return [
        pb.GenerateReply(
            tokens=[token],
            logprobs=[pb.TokenLogprobs(logprob=-at, top_tokens=[token, 40], top_logprobs=[-at, -50.0])],
        )
        for at, token in enumerate(tokens)
    ]


@pytest.mark.parametrize("stream", [True, False])
async def test_logprobs_cover_the_content_byte_for_byte(gateway: Any, stream: bool) -> None:
    engine = gateway.engine
    thought, said = engine.tokens("hm"), engine.tokens(TEXT)
    tokens = [*thought, engine.special("</think>"), *said]

    async def script(request: Any, _: Any) -> AsyncIterator[pb.GenerateReply]:
        for reply in with_logprobs(tokens):
            yield reply
        yield engine.last(request, len(tokens))

    engine.script = script
    fields = {"logprobs": True, "top_logprobs": 2}
    if stream:
        _, _, chunks = await collect(await gateway.chat(stream=True, **fields))
        entries = [
            entry
            for chunk in chunks
            for choice in chunk.choices
            if choice.logprobs
            for entry in choice.logprobs.content
        ]
    else:
        entries = (await gateway.chat(**fields)).choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == TEXT
    assert [entry.logprob for entry in entries] == [-float(at) for at in range(len(thought) + 1, len(tokens))]
    assert all([other.logprob for other in entry.top_logprobs][1] == -50.0 for entry in entries)
    sampling = engine.requests[0].sampling
    assert (sampling.logprobs, sampling.top_logprobs) == (True, 2)


async def test_sampling_reaches_the_engine(gateway: Any) -> None:
    values = {
        "temperature": 0.25,
        "top_p": 0.5,
        "frequency_penalty": 1.5,
        "presence_penalty": -0.5,
        "seed": -1,
    }
    more = {"top_k": 9, "min_p": 0.125, "repetition_penalty": 1.25}
    await gateway.chat(**values, max_tokens=11, logit_bias={"5": -3.0}, extra_body=more)
    sampling = gateway.engine.requests[0].sampling
    assert sampling.seed == 2**64 - 1
    assert sampling.max_tokens == 11
    assert dict(sampling.logit_bias) == {5: -3.0}
    for name, value in {**values, **more}.items():
        assert name == "seed" or getattr(sampling, name) == value


async def test_unset_sampling_has_the_defaults_and_a_seed_of_its_own(gateway: Any) -> None:
    await asyncio.gather(gateway.chat(), gateway.chat())
    first, second = (request.sampling for request in gateway.engine.requests)
    assert (first.temperature, first.top_p, first.top_k) == (1.0, 1.0, 0)
    assert first.min_p == pytest.approx(0.05)
    assert first.seed != second.seed


async def test_a_model_that_begins_somebodys_turn_has_ended_its_own(gateway: Any) -> None:
    await gateway.chat()
    engine = gateway.engine
    turns = {engine.special("<｜User｜>"), engine.special("<｜Assistant｜>")}
    assert set(engine.requests[0].sampling.stop_tokens) == turns


async def test_content_parts_and_unknown_fields_are_taken(gateway: Any) -> None:
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    await gateway.post(
        messages=[{"role": "user", "content": parts}], metadata={"x": "y"}, service_tier="auto"
    )
    await gateway.post(messages=[{"role": "user", "content": "a b", "name": "me", "weird": 1}])
    first, second = (list(request.prompt_tokens) for request in gateway.engine.requests)
    assert first == second


@pytest.mark.parametrize(
    "fields", [{"tools": []}, {"tool_choice": "none"}, {"n": 1},
               {"response_format": {"type": "text"}}, {"modalities": ["text"]}],
)  # fmt: skip
async def test_asking_for_nothing_more_than_text_is_fine(gateway: Any, fields: dict[str, Any]) -> None:
    assert (await gateway.post(**fields)).status_code == 200


async def test_special_tokens_in_a_clients_text_stay_text(gateway: Any) -> None:
    engine = gateway.engine
    await gateway.post(messages=[{"role": "user", "content": "</think><｜User｜>"}], think=False)
    prompt = list(engine.requests[0].prompt_tokens)
    assert prompt.count(engine.special("</think>")) == 1
    assert prompt.count(engine.special("<｜User｜>")) == 1


async def test_half_an_emoji_in_a_message_is_replaced(gateway: Any) -> None:
    """Clients that cut text by UTF-16 units send lone surrogates."""
    body = b'{"messages": [{"role": "user", "content": "cut \\ud83d"}]}'
    answer = await gateway.http.post(
        "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
    )
    assert answer.status_code == 200
    assert set(gateway.engine.tokens("cut \ufffd")) <= set(gateway.engine.requests[0].prompt_tokens)


async def test_concurrent_streams_do_not_mix(gateway: Any) -> None:
    engine = gateway.engine

    async def echo(request: Any, _: Any) -> AsyncIterator[pb.GenerateReply]:
        for token in [engine.special("</think>"), *engine.tokens(f"seed {request.sampling.seed}")]:
            yield pb.GenerateReply(tokens=[token])
        yield engine.last(request, 1)

    engine.script = echo

    async def one(seed: int) -> str:
        return (await collect(await gateway.chat(stream=True, seed=seed)))[1]

    assert await asyncio.gather(*map(one, range(8))) == [f"seed {seed}" for seed in range(8)]


async def test_the_stream_is_events_that_end_in_done(gateway: Any) -> None:
    answer = await gateway.post(stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.text.strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    assert all(json.loads(event.removeprefix("data: "))["object"] for event in events[:-1])
