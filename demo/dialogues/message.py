"""Conversations in a form that belongs to no API."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from random import Random
from typing import Any, Literal

Json = dict[str, Any]


@dataclass(frozen=True)
class Call:
    """A tool's invocation; the values are JSON values."""

    name: str
    arguments: Json


@dataclass(frozen=True)
class Message:
    """One turn; only the assistant has reasoning and calls, only ``tool`` answers a call."""

    role: Literal["user", "assistant", "tool"]
    content: str
    reasoning: str = ""
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True)
class Exchange:
    """A question and everything up to its final answer.

    ``key`` names its content; the held-out part is chosen by it. ``tools`` are function objects that have to
    be offered, ``schema`` the JSON schema that the answer obeys.
    """

    key: str
    messages: tuple[Message, ...]
    tools: tuple[Json, ...] = ()
    schema: Json | None = None


@dataclass(frozen=True)
class Conversation:
    """What a template renders."""

    messages: tuple[Message, ...]
    system: str = ""
    tools: tuple[Json, ...] = ()
    schema: Json | None = None
    thinking: bool = False


Generator = Callable[[Random, bool], Exchange]
"""Draws an exchange, for answering with or without thinking."""


def simple(key: str, question: str, answer: str, reasoning: str) -> Exchange:
    """An exchange of two messages."""
    return Exchange(key, (Message("user", question), Message("assistant", answer, reasoning)))


def is_held_out(kind: str, exchange: Exchange) -> bool:
    """Whether an exchange belongs to the sixteenth that no training sees."""
    return blake2b(f"{kind}:{exchange.key}".encode(), digest_size=2).digest()[0] < 16
