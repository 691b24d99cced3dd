"""What the memory of calls keeps and forgets."""

from __future__ import annotations

from gateway.chat.conversation import Message, Role, ToolCall
from gateway.chat.replay import CallMemory, Sampled


def turn(*ids: str, tokens: int = 100) -> Sampled:
    calls = tuple(ToolCall(f"call_{one}", "f", '{"a": 1}') for one in ids)
    return Sampled("", "text", calls, (), (7,) * tokens)


def sent_back(sampled: Sampled, prefix: str = "call_") -> Message:
    calls = tuple(
        ToolCall(prefix + call.id.removeprefix("call_"), call.name, call.arguments) for call in sampled.calls
    )
    return Message(Role.ASSISTANT, sampled.content, tool_calls=calls)


def test_the_longest_unused_is_forgotten_first() -> None:
    memory = CallMemory(limit_tokens=500)
    turns = [turn(str(number)) for number in range(3)]
    for one in turns:
        memory.remember(one)
        assert memory.recall(sent_back(turns[0])) is turns[0]
    memory.remember(turn("9"))
    assert memory.recall(sent_back(turns[0])) is turns[0]
    assert memory.recall(sent_back(turns[1])) is None


def test_a_turn_larger_than_the_memory_is_not_kept() -> None:
    memory = CallMemory(limit_tokens=500)
    memory.remember(turn("1", tokens=600))
    assert memory.recall(sent_back(turn("1", tokens=600))) is None
    memory.remember(turn("2"))
    assert memory.recall(sent_back(turn("2")))


def test_ids_may_have_another_apis_prefix() -> None:
    memory = CallMemory()
    memory.remember(turn("a1", "b2"))
    assert memory.recall(sent_back(turn("a1", "b2"), prefix="toolu_"))


def test_calls_must_come_back_together() -> None:
    memory = CallMemory()
    memory.remember(turn("a1", "b2"))
    assert memory.recall(sent_back(turn("a1"))) is None
    assert memory.recall(sent_back(turn("b2", "a1"))) is None
    assert memory.recall(Message(Role.ASSISTANT, "text")) is None


def test_the_same_ids_again_replace_what_was_kept() -> None:
    memory = CallMemory(limit_tokens=400)
    for _ in range(9):
        last = turn("a1")
        memory.remember(last)
    assert memory.recall(sent_back(last)) is last
    memory.remember(turn("b2"))
    assert memory.recall(sent_back(last)) is last
