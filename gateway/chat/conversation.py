"""A conversation and what is wanted of it, whatever API it came through."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class Role(Enum):
    """Who speaks. What APIs call developer is the system."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"


@dataclass(frozen=True)
class Message:
    """One message; ``reasoning`` is an assistant's thinking before ``content``."""

    role: Role
    content: str
    reasoning: str = ""


class Effort(Enum):
    """How much the model thinks before it answers."""

    NONE = "none"
    HIGH = "high"
    MAX = "max"


@dataclass(frozen=True)
class Sampling:
    """The client's sampling wishes; defaults are those for 2-bit weights, where the tail is best cut off."""

    max_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.05
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0


@dataclass(frozen=True)
class ChatRequest:
    """One request for a next assistant message."""

    messages: tuple[Message, ...]
    effort: Effort = Effort.HIGH
    sampling: Sampling = Sampling()
    stops: tuple[str, ...] = ()
