"""The tokens the model sampled for its tool calls, so that a call sent back is read as it was written.

A call rendered again from its JSON need not give the same tokens; with the sampled ones the next turn's
prompt begins with what the engine holds already. Clients often leave out the reasoning before a call; it
comes back as well.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.chat.conversation import Message, ToolCall


@dataclass(frozen=True)
class Sampled:
    """One assistant's message with calls, and the tokens it was: before and after the end of its thinking."""

    reasoning: str
    content: str
    calls: tuple[ToolCall, ...]
    thought: tuple[int, ...]
    said: tuple[int, ...]


class CallMemory:
    """What was sampled, by the calls' ids; the longest unused is forgotten.

    Args:
        limit_tokens: all that is remembered together.
    """

    def __init__(self, limit_tokens: int = 1_000_000) -> None:
        self._limit_tokens = limit_tokens
        self._tokens = 0
        self._turns: OrderedDict[tuple[str, ...], Sampled] = OrderedDict()

    def remember(self, turn: Sampled) -> None:
        """Keeps a turn with calls."""
        key = _key(turn.calls)
        self._forget(key)
        self._turns[key] = turn
        self._tokens += _size(turn)
        while self._tokens > self._limit_tokens:
            self._forget(next(iter(self._turns)))

    def recall(self, message: Message) -> Sampled | None:
        """The turn as it was sampled, if the client sends it back as it got it."""
        key = _key(message.tool_calls)
        turn = self._turns.get(key) if key else None
        if turn is None or not _same(turn, message):
            return None
        self._turns.move_to_end(key)
        return turn

    def _forget(self, key: tuple[str, ...]) -> None:
        turn = self._turns.pop(key, None)
        if turn is not None:
            self._tokens -= _size(turn)


def _size(turn: Sampled) -> int:
    """Tokens, and some for the turn itself."""
    return len(turn.thought) + len(turn.said) + 64


def _key(calls: Sequence[ToolCall]) -> tuple[str, ...]:
    """The ids without what stands before their last underscore: each API has its own prefix."""
    return tuple(call.id.rpartition("_")[2] for call in calls)


def _same(turn: Sampled, message: Message) -> bool:
    """Whether a message says what was sampled; reasoning may be left out, JSON be written differently."""
    return (
        message.content.strip() == turn.content.strip()
        and message.reasoning in ("", turn.reasoning)
        and all(
            one.name == other.name and _value(one.arguments) == _value(other.arguments)
            for one, other in zip(message.tool_calls, turn.calls, strict=True)
        )
    )


def _value(arguments: str) -> str:
    """Arguments for comparison: neither spaces, order nor 1.0 for 1 matter."""
    try:
        return json.dumps(json.loads(arguments, parse_float=_number), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments


def _number(text: str) -> float:
    value = float(text)
    return int(value) if value.is_integer() else value
