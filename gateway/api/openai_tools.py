"""Tools and calls as OpenAI's chat completions have them, in requests and in answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictStr

from gateway.api.fields import Body, FunctionName, Text
from gateway.chat.answer import CallDelta
from gateway.chat.conversation import Message, Role, Tool, ToolCall, ToolChoice
from gateway.errors import Fault, GatewayError


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
    names = [tool.name for tool in tools]
    for at, name in enumerate(names):
        if name in names[:at]:
            param = f"tools[{at}].function.name"
            raise GatewayError(Fault.INVALID, f"{param}: {name!r} is offered twice", param=param)
    return tools


def tool_choice(choice: str | NamedToolChoice | None, tools: Sequence[Tool]) -> ToolChoice:
    """What a request's ``tool_choice`` means for its tools.

    Raises:
        GatewayError: it demands a tool that is not offered.
    """
    if isinstance(choice, NamedToolChoice):
        name = choice.function.name
        if all(tool.name != name for tool in tools):
            param = "tool_choice.function.name"
            raise GatewayError(Fault.INVALID, f"{param}: {name!r} is none of the tools", param=param)
        return ToolChoice("named", name)
    if choice == "required":
        if not tools:
            raise GatewayError(Fault.INVALID, "tool_choice: needs tools to choose from", param="tool_choice")
        return ToolChoice("required")
    return ToolChoice("none" if choice == "none" else "auto")


def check_calls(messages: Sequence[Message]) -> None:
    """Every result belongs to a call before it, and a last message's calls have results.

    Raises:
        GatewayError: naming the field.
    """
    known: set[str] = set()
    for at, message in enumerate(messages):
        known |= {call.id for call in message.tool_calls}
        if message.role is Role.TOOL and message.tool_call_id not in known:
            param = f"messages[{at}].tool_call_id"
            raise GatewayError(
                Fault.INVALID,
                f"{param}: no message before it has a call {message.tool_call_id!r}; "
                "send the assistant's message with its tool_calls too",
                param=param,
            )
    if messages[-1].tool_calls:
        param = f"messages[{len(messages) - 1}].tool_calls"
        raise GatewayError(
            Fault.INVALID, f"{param}: the calls need results, messages of role tool, after them", param=param
        )


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
