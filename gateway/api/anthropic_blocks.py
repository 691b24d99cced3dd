"""Content blocks of Anthropic's messages, and messages of such blocks as the conversation has them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, StrictBool, StrictStr, Tag, model_validator

from gateway.api.fields import Body, FunctionName, Text
from gateway.chat.conversation import Message, Role, ToolCall
from gateway.errors import Fault, GatewayError

Placed = tuple[Message, str]
"""A message with the path of what it was made from."""

_OPERATORS_ONLY = "x-anthropic-"
"""Begins system blocks that are meant for Anthropic's servers and change from request to request."""


class TextBlock(Body):
    """Text."""

    type: Literal["text"]
    text: Text


class ThinkingBlock(Body):
    """An assistant's thinking; its signature is not looked at."""

    type: Literal["thinking"]
    thinking: Text


class RedactedThinkingBlock(Body):
    """Thinking that nobody here can read."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(Body):
    """A call."""

    type: Literal["tool_use"]
    id: Annotated[StrictStr, Field(min_length=1)]
    name: FunctionName
    input: dict[str, Any]


class UnservedBlock(Body):
    """Any other block."""

    type: StrictStr

    @model_validator(mode="after")
    def _refuse(self) -> UnservedBlock:
        raise ValueError(f"blocks of type {self.type!r} are not served: this model reads text only")


def _tag(block: Any) -> str:
    """Names the class that reads a block; the marks keep the name out of errors' paths."""
    kind = block.get("type") if isinstance(block, dict) else None
    known = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")
    return f"<{kind}>" if kind in known else "<unserved>"


ResultBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")] | Annotated[UnservedBlock, Tag("<unserved>")],
    Discriminator(lambda block: "<text>" if _tag(block) == "<text>" else "<unserved>"),
]


class ToolResultBlock(Body):
    """What a call gave."""

    type: Literal["tool_result"]
    tool_use_id: StrictStr
    content: Text | list[ResultBlock] | None = None
    is_error: StrictBool | None = None

    def text(self) -> str:
        """The result as the model reads it; the format has no other place to say that it is an error."""
        content = self.content or ""
        if not isinstance(content, str):
            content = "\n\n".join(block.text for block in content if isinstance(block, TextBlock))
        tells = content.lstrip(" <[").lower().startswith(("error", "tool_use_error"))
        return f"Error: {content}" if self.is_error and not tells else content


Block = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")]
    | Annotated[UnservedBlock, Tag("<unserved>")],
    Discriminator(_tag),
]


class InputMessage(Body):
    """One message of the request."""

    role: Literal["user", "assistant", "system"]
    content: Text | list[Block]

    def placed(self, path: str) -> Iterator[Placed]:
        """The messages it stands for: each result of a call is one of its own.

        Raises:
            GatewayError: a block that this role cannot have.
        """
        if isinstance(self.content, str):
            yield Message(_ROLES[self.role], self.content), f"{path}.content"
            return
        allowed = _ALLOWED[self.role]
        for at, block in enumerate(self.content):
            if not isinstance(block, allowed):
                where = f"{path}.content[{at}]"
                raise GatewayError(
                    Fault.INVALID, f"{where}: {self.role} messages have no {block.type} blocks", param=where
                )
        if self.role == "assistant":
            yield self._assistant(self.content), f"{path}.content"
        else:
            yield from self._others(self.content, path)

    def _assistant(self, blocks: Sequence[Block]) -> Message:
        return Message(
            Role.ASSISTANT,
            "".join(block.text for block in blocks if isinstance(block, TextBlock)),
            "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock)),
            tuple(
                ToolCall(block.id, block.name, json.dumps(block.input, ensure_ascii=False))
                for block in blocks
                if isinstance(block, ToolUseBlock)
            ),
        )

    def _others(self, blocks: Sequence[Block], path: str) -> Iterator[Placed]:
        texts: list[str] = []
        for at, block in enumerate(blocks):
            if isinstance(block, TextBlock):
                texts.append(block.text)
            elif isinstance(block, ToolResultBlock):
                if texts:
                    yield Message(_ROLES[self.role], "\n\n".join(texts)), f"{path}.content"
                    texts = []
                result = Message(Role.TOOL, block.text(), tool_call_id=block.tool_use_id)
                yield result, f"{path}.content[{at}].tool_use_id"
        if texts or not blocks:
            yield Message(_ROLES[self.role], "\n\n".join(texts)), f"{path}.content"


_ROLES = {"user": Role.USER, "assistant": Role.ASSISTANT, "system": Role.SYSTEM}
_ALLOWED: dict[str, tuple[type[Body], ...]] = {
    "user": (TextBlock, ToolResultBlock),
    "assistant": (TextBlock, ThinkingBlock, RedactedThinkingBlock, ToolUseBlock),
    "system": (TextBlock,),
}


def system_text(system: str | Sequence[TextBlock] | None) -> str:
    """The system prompt; blocks are lines."""
    if system is None or isinstance(system, str):
        return system or ""
    return "\n".join(block.text for block in system if not block.text.startswith(_OPERATORS_ONLY))
