"""Conversations as the text the model reads, by the rules of the official encoding."""

from __future__ import annotations

import json

from demo.dialogues.message import Call, Conversation, Json, Message

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
THINK, THOUGHT = "<think>", "</think>"
DSML = "｜DSML｜"

_TOOLS = """## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a "<｜DSML｜tool_calls>" block like the following:

<｜DSML｜tool_calls>
<｜DSML｜invoke name="$TOOL_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$TOOL_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜tool_calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside <think>...</think> BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

{schemas}

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""  # noqa: E501
RESPONSE_FORMAT = (
    "\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n{schema}"
)


def render(conversation: Conversation) -> str:
    """The whole conversation, closed by EOS where the assistant spoke last, open for it otherwise."""
    messages = conversation.messages
    parts = [BOS, conversation.system]
    if conversation.tools:
        parts.append("\n\n" + tools_text(conversation.tools))
    if conversation.schema is not None:
        parts.append(RESPONSE_FORMAT.format(schema=json.dumps(conversation.schema, ensure_ascii=False)))
    last_user = max(index for index, message in enumerate(messages) if message.role != "assistant")
    keeps = conversation.thinking and bool(conversation.tools)
    for index, message in enumerate(messages):
        if message.role == "assistant":
            thinks = conversation.thinking and (keeps or index > last_user)
            parts += [ASSISTANT, THINK + message.reasoning + THOUGHT if thinks else THOUGHT]
            parts += [message.content, calls_text(message.calls), EOS]
        else:
            joined = index > 0 and messages[index - 1].role != "assistant"
            parts += ["\n\n" if joined else USER, _said(message)]
    if messages[-1].role != "assistant":
        parts += [ASSISTANT, THINK if conversation.thinking else THOUGHT]
    return "".join(parts)


def tools_text(tools: tuple[Json, ...]) -> str:
    """The explanation of tools and their schemas, one a line."""
    return _TOOLS.replace("{schemas}", "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))


def calls_text(calls: tuple[Call, ...]) -> str:
    """The block of tool calls that ends an assistant's turn; nothing without calls."""
    if not calls:
        return ""
    return f"\n\n<{DSML}tool_calls>\n" + "\n".join(map(_call, calls)) + f"\n</{DSML}tool_calls>"


def _call(call: Call) -> str:
    parameters = "\n".join(
        f'<{DSML}parameter name="{name}" string="{"true" if isinstance(value, str) else "false"}">'
        f"{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}</{DSML}parameter>"
        for name, value in call.arguments.items()
    )
    return f'<{DSML}invoke name="{call.name}">\n{parameters}\n</{DSML}invoke>'


def _said(message: Message) -> str:
    return f"<tool_result>{message.content}</tool_result>" if message.role == "tool" else message.content
