"""Tools and calls as OpenAI's chat completions have them, in requests and in answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictStr

from gateway.api.fields import Body, FunctionName, Text
from gateway.api.tool_rules import Words, check_calls, check_names, must_call, must_call_named
from gateway.chat.answer import CallDelta
from gateway.chat.conversation import Message, Role, Tool, ToolCall, ToolChoice


class FunctionDefinition(Body):
    """A function that is offered."""

    name: FunctionName
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None


class ToolDefinition(Body):
    """One of ``tools``."""

    type: Literal["function"]
    function: FunctionDefinition

    def tool(self) -> Tool:
        """The tool as the conversation has it."""
        given = self.function
        return Tool(given.name, given.description or "", given.parameters or {}, bool(given.strict))


class NamedFunction(Body):
    """The function of a named choice."""

    name: StrictStr


class NamedToolChoice(Body):
    """``tool_choice`` for one tool."""

    type: Literal["function"]
    function: NamedFunction


class CalledFunction(Body):
    """What a call calls; ``arguments`` should be a JSON object, but a model may have written anything."""

    name: FunctionName
    arguments: Text = ""


class MessageToolCall(Body):
    """A call in an assistant's message."""

    id: Annotated[StrictStr, Field(min_length=1)]
    type: Literal["function"] = "function"
    function: CalledFunction


def offered_tools(definitions: Sequence[ToolDefinition]) -> tuple[Tool, ...]:
    """The tools of a request.

    Raises:
        GatewayError: two of one name.
    """
    tools = tuple(one.tool() for one in definitions)
    check_names(tools, [f"tools[{at}].function.name" for at in range(len(tools))])
    return tools


def tool_choice(choice: str | NamedToolChoice | None, tools: Sequence[Tool]) -> ToolChoice:
    """What a request's ``tool_choice`` means for its tools.

    Raises:
        GatewayError: it demands a tool that is not offered.
    """
    if isinstance(choice, NamedToolChoice):
        return must_call_named(choice.function.name, tools, "tool_choice.function.name")
    if choice == "required":
        return must_call(tools)
    return ToolChoice("none" if choice == "none" else "auto")


def check_messages(messages: Sequence[Message]) -> None:
    """Calls and results belong together.

    Raises:
        GatewayError: naming the field.
    """
    paths = [
        f"messages[{at}].{'tool_call_id' if one.role is Role.TOOL else 'tool_calls'}"
        for at, one in enumerate(messages)
    ]
    check_calls(messages, paths, Words("message with its tool_calls", "messages of role tool"))


def call_piece(piece: CallDelta) -> dict[str, Any]:
    """A piece of a call in a stream's chunk."""
    if not piece.id:
        return {"index": piece.index, "function": {"arguments": piece.arguments}}
    function = {"name": piece.name, "arguments": piece.arguments}
    return {"index": piece.index, "id": piece.id, "type": "function", "function": function}


def whole_call(call: ToolCall) -> dict[str, Any]:
    """A call in a response that does not stream."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}
