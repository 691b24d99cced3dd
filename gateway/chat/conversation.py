"""A conversation and what is wanted of it, whatever API it came through."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal


class Role(Enum):
    """Who speaks. What APIs call developer is the system; a tool's message is one call's result."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


@dataclass(frozen=True)
class Tool:
    """A function the model may call; ``parameters`` is the JSON schema of its arguments."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    strict: bool = False


@dataclass(frozen=True)
class ToolCall:
    """A call the model made; ``arguments`` is JSON text as the client has it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ToolChoice:
    """Whether the model may, must or must not call; ``name`` is the tool it must call when ``named``."""

    mode: Literal["none", "auto", "required", "named"] = "auto"
    name: str = ""


@dataclass(frozen=True)
class Message:
    """One message; ``reasoning`` is an assistant's thinking before ``content``, ``tool_calls`` what it called
    after it, ``tool_call_id`` the call that a tool's message answers.
    """

    role: Role
    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""


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
    """One request for a next assistant message; its thinking may have at most ``thinking_tokens``, 0: any
    number.
    """

    messages: tuple[Message, ...]
    effort: Effort = Effort.HIGH
    sampling: Sampling = Sampling()
    stops: tuple[str, ...] = ()
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    thinking_tokens: int = 0
