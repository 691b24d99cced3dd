"""Rules about tools and their calls that every API has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.chat.conversation import Message, Role, Tool, ToolChoice
from gateway.errors import Fault, GatewayError


@dataclass(frozen=True)
class Words:
    """How an API calls a call, and what answers it."""

    call: str
    result: str


def check_names(tools: Sequence[Tool], paths: Sequence[str]) -> None:
    """No two tools have one name.

    Raises:
        GatewayError: naming the second one's path.
    """
    names = [tool.name for tool in tools]
    for at, (name, path) in enumerate(zip(names, paths, strict=True)):
        if name in names[:at]:
            raise GatewayError(Fault.INVALID, f"{path}: {name!r} is offered twice", param=path)


def must_call(tools: Sequence[Tool]) -> ToolChoice:
    """A choice that demands a call of any tool.

    Raises:
        GatewayError: there is none.
    """
    if not tools:
        raise GatewayError(Fault.INVALID, "tool_choice: needs tools to choose from", param="tool_choice")
    return ToolChoice("required")


def must_call_named(name: str, tools: Sequence[Tool], path: str) -> ToolChoice:
    """A choice that demands a call of one tool.

    Raises:
        GatewayError: it is not offered.
    """
    if all(tool.name != name for tool in tools):
        raise GatewayError(Fault.INVALID, f"{path}: {name!r} is none of the tools", param=path)
    return ToolChoice("named", name)


def check_calls(messages: Sequence[Message], paths: Sequence[str], words: Words) -> None:
    """Every result belongs to a call before it, and a last message's calls have results.

    Args:
        paths: for each message that of its calls, or of the id of the call it answers.

    Raises:
        GatewayError: naming the field.
    """
    known: set[str] = set()
    for message, path in zip(messages, paths, strict=True):
        known |= {call.id for call in message.tool_calls}
        if message.role is Role.TOOL and message.tool_call_id not in known:
            raise GatewayError(
                Fault.INVALID,
                f"{path}: nothing before it has a call {message.tool_call_id!r}; "
                f"send the assistant's {words.call} too",
                param=path,
            )
    if messages[-1].tool_calls:
        raise GatewayError(
            Fault.INVALID, f"{paths[-1]}: the calls need results, {words.result}, after them", param=paths[-1]
        )
