"""Tools as the model reads them: their schemas, calls of them, and the calls' results.

The text is that of the official encoder, byte for byte.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from gateway.chat.conversation import Message, Role, Tool, ToolCall
from gateway.chat.segments import DSML, Segment, content, template

CALLS_OPEN = f"\n\n<{DSML}tool_calls>\n"
"""What stands between an answer's text and its first call."""

_INTRODUCTION = f"""## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a "<{DSML}tool_calls>" block like the following:

<{DSML}tool_calls>
<{DSML}invoke name="$TOOL_NAME">
<{DSML}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{DSML}parameter>
...
</{DSML}invoke>
<{DSML}invoke name="$TOOL_NAME2">
...
</{DSML}invoke>
</{DSML}tool_calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside <think>...</think> BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

"""  # noqa: E501
_CLOSING = (
    "\n\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.\n"
)


def instructions(tools: Sequence[Tool]) -> list[Segment]:
    """How to call, and one line of JSON a tool."""
    schemas = "\n".join(_json(_function(tool)) for tool in tools)
    return [template(_INTRODUCTION), content(schemas), template(_CLOSING)]


def call_head(name: str) -> list[Segment]:
    """The beginning of a call, up to where its parameters follow."""
    return [template(f'<{DSML}invoke name="'), content(name), template('">\n')]


def calls_block(calls: Sequence[ToolCall]) -> list[Segment]:
    """The block of calls that ends an assistant's turn."""
    out = [template(CALLS_OPEN)]
    for call in calls:
        out += call_head(call.name)
        for number, (name, value) in enumerate(_arguments(call).items()):
            separator, is_text = "\n" if number else "", isinstance(value, str)
            out += [
                template(f'{separator}<{DSML}parameter name="'),
                content(name),
                template(f'" string="{"true" if is_text else "false"}">'),
                content(value if is_text else _json(value)),
                template(f"</{DSML}parameter>"),
            ]
        out.append(template(f"\n</{DSML}invoke>\n"))
    out.append(template(f"</{DSML}tool_calls>"))
    return out


def result(text: str) -> list[Segment]:
    """One call's result, as part of a user's turn."""
    return [template("<tool_result>"), content(text), template("</tool_result>")]


def results_in_order(messages: Sequence[Message]) -> list[Message]:
    """The messages with the results of each turn in the order of the calls they answer."""
    ordered = list(messages)
    order: dict[str, int] = {}
    places: list[int] = []
    for place, message in enumerate([*messages, Message(Role.ASSISTANT, "")]):
        if message.role is Role.TOOL:
            places.append(place)
        elif message.role is not Role.USER:
            found = sorted((messages[at] for at in places), key=lambda one: order.get(one.tool_call_id, 0))
            for at, one in zip(places, found, strict=True):
                ordered[at] = one
            places = []
        if message.tool_calls:
            order = {call.id: number for number, call in enumerate(message.tool_calls)}
    return ordered


def _function(tool: Tool) -> dict[str, Any]:
    """The function object, without what the client left out."""
    given = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {key: value for key, value in given.items() if key == "name" or value}


def _arguments(call: ToolCall) -> dict[str, Any]:
    """The arguments by name; what is no JSON object becomes one argument of that name."""
    try:
        arguments = json.loads(call.arguments)
    except (ValueError, RecursionError):
        arguments = None
    return arguments if isinstance(arguments, dict) else {"arguments": call.arguments}


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
