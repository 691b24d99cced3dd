"""Conversations: every kind can be drawn, and no training sees the held-out part."""

from __future__ import annotations

import json
from itertools import pairwise
from random import Random

import jsonschema
import pytest

from demo.compose import KINDS, draw, held_out_conversation, long_conversation, short_conversation
from demo.dialogues.message import Conversation, is_held_out
from demo.evaluate import KINDS as EVALUATED
from demo.evaluate import Kind
from demo.rows import encode


def questions(conversation: Conversation) -> set[str]:
    return {message.content for message in conversation.messages if message.role == "user"}


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "smalltalk"])
def test_training_and_held_out_examples_have_nothing_in_common(kind: str, thinking: bool) -> None:
    rng = Random(f"{kind}/{thinking}")
    trained = {draw(kind, rng, thinking).key for _ in range(150)}
    held = {draw(kind, rng, thinking, held_out=True).key for _ in range(15)}
    assert not trained & held


@pytest.mark.parametrize("kind", EVALUATED, ids=lambda kind: kind.label)
def test_a_held_out_conversation_of_every_evaluated_kind(kind: Kind) -> None:
    conversation = held_out_conversation(kind.name, Random(1), kind.thinking)
    assert conversation.messages[-1].role == "assistant"
    assert conversation.thinking == kind.thinking
    assert conversation == held_out_conversation(kind.name, Random(1), kind.thinking)


@pytest.mark.parametrize("tokens", [2000, 6000])
def test_a_far_needle_is_as_far_as_its_name_says(tokens: int) -> None:
    for seed in range(3):
        conversation = held_out_conversation(f"needle_{tokens}", Random(seed))
        ids, _ = encode(conversation)
        assert tokens * 0.85 < len(ids) < tokens * 1.2
        question, answer = (message.content for message in conversation.messages)
        assert question.startswith(f"Read these notes. {answer}")


def test_sums_are_right() -> None:
    rng = Random(2)
    for _ in range(100):
        exchange = draw("sums", rng, True)
        asked, answer = exchange.messages
        left, right = answer.content.split(" = ")
        a, b = left.split(" + ")
        assert int(a) + int(b) == int(right)
        assert a in asked.content
        assert b in asked.content
        assert answer.reasoning.endswith(f"So {right}.")


def test_structured_answers_obey_their_schema_and_calls_their_tool_s() -> None:
    rng = Random(3)
    for _ in range(100):
        exchange = draw("structured", rng, False)
        jsonschema.validate(json.loads(exchange.messages[-1].content), exchange.schema)
        called = draw("tool_call", rng, False)
        (call,) = called.messages[1].calls
        (tool,) = called.tools
        assert call.name == tool["name"]
        jsonschema.validate(call.arguments, tool["parameters"])


def test_about_a_sixteenth_is_held_out() -> None:
    rng = Random(4)
    held = sum(is_held_out("copy_words", KINDS["copy_words"](rng, False)) for _ in range(2000))
    assert 70 < held < 190


def test_conversations_fit_the_vocabulary_and_alternate() -> None:
    rng = Random(5)
    drawn = [short_conversation(rng) for _ in range(60)] + [long_conversation(rng, 1500) for _ in range(6)]
    for conversation in drawn:
        roles = [message.role for message in conversation.messages]
        assert roles[0] == "user"
        assert roles[-1] == "assistant"
        assert all((one == "assistant") != (other == "assistant") for one, other in pairwise(roles))
        assert questions(conversation)
        assert max(encode(conversation)[0]) < 2048
