"""A conversation as the text that DeepSeek-V4 was trained on.

Text is rendered as segments: template segments may hold the model's special tokens, content segments are
what somebody wrote, in which nothing is special. The rules are those of the official encoder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gateway.chat.conversation import Effort, Message, Role, Tool
from gateway.chat.replay import Sampled
from gateway.chat.segments import (
    ASSISTANT,
    BEGIN,
    END,
    END_THINK,
    THINK,
    USER,
    Segment,
    content,
    sampled,
    template,
)
from gateway.chat.tools import calls_block, instructions, result, results_in_order

MAX_EFFORT_PREFIX = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the "
    "root cause, rigorously stress-testing your logic against all potential paths, edge cases, and "
    "adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step, considered "
    "alternative, and rejected hypothesis to ensure absolutely no assumption is left unchecked.\n\n"
)

_USERS = (Role.USER, Role.TOOL)
"""Who speaks in a user's turn."""


def render(
    messages: Sequence[Message],
    effort: Effort,
    tools: Sequence[Tool] = (),
    recall: Callable[[Message], Sampled | None] = lambda _: None,
) -> list[Segment]:
    """The prompt, up to where the model goes on.

    Consecutive messages of the user and of tools are one turn. Thinking is kept in assistant messages after
    the last such turn, and everywhere once there are tools. A last message of the assistant is a beginning to
    be continued; otherwise its turn is opened.

    Args:
        tools: those the model may call; they follow the first system message.
        recall: knows the tokens of a message that the model wrote here itself.
    """
    thinks = effort is not Effort.NONE
    out = [template(BEGIN)]
    if effort is Effort.MAX:
        out.append(template(MAX_EFFORT_PREFIX))
    ordered = results_in_order(_system_before_its_turn(messages))
    if tools and ordered[0].role is not Role.SYSTEM:
        out += _introduced(tools)
    with_tools = bool(tools) or any(one.tool_calls or one.role is Role.TOOL for one in ordered)
    last_user = max((index for index, one in enumerate(ordered) if one.role in _USERS), default=-1)
    previous: Role | None = None
    for index, message in enumerate(ordered):
        if message.role is Role.SYSTEM:
            out.append(content(message.content))
            if tools and index == 0:
                out += _introduced(tools)
        elif message.role in _USERS:
            out.append(content("\n\n") if previous in _USERS else template(USER))
            out += result(message.content) if message.role is Role.TOOL else [content(message.content)]
        else:
            keep = thinks and (with_tools or index > last_user)
            out += _assistant(message, recall(message), opens=previous is not Role.ASSISTANT, keep=keep)
            if index < len(ordered) - 1:
                out.append(template(END))
        previous = message.role
    if previous is not Role.ASSISTANT:
        out.append(template(ASSISTANT + (THINK if thinks else END_THINK)))
    return out


def opens_thinking(messages: Sequence[Message], effort: Effort) -> bool:
    """Whether what the model writes next begins inside its thinking."""
    return effort is not Effort.NONE and messages[-1].role is not Role.ASSISTANT


def _introduced(tools: Sequence[Tool]) -> list[Segment]:
    return [template("\n\n"), *instructions(tools)]


def _assistant(message: Message, known: Sampled | None, *, opens: bool, keep: bool) -> list[Segment]:
    """An assistant's message without its end, with the tokens the model sampled where they are known."""
    out: list[Segment] = []
    if opens:
        out.append(template(ASSISTANT))
        if keep:
            out += [template(THINK), sampled(known.thought) if known else content(message.reasoning)]
        out.append(template(END_THINK))
    if known:
        return [*out, sampled(known.said)]
    out.append(content(message.content))
    return out + calls_block(message.tool_calls) if message.tool_calls else out


def _system_before_its_turn(messages: Sequence[Message]) -> list[Message]:
    """Moves a system message that stands between a user's turn and its answer to before that turn.

    The official encoder opens the assistant's turn only right after a user message, so such a message would
    leave the answer without its tag.
    """
    ordered: list[Message] = []
    for message in messages:
        place = len(ordered)
        if message.role is Role.SYSTEM:
            while place and ordered[place - 1].role in _USERS:
                place -= 1
        ordered.insert(place, message)
    return ordered
