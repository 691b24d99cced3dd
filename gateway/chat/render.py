"""A conversation as the text that DeepSeek-V4 was trained on.

Text is rendered as segments: template segments may hold the model's special tokens, content segments are
what somebody wrote, in which nothing is special. The rules are those of the official encoder for
conversations without tools.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gateway.chat.conversation import Effort, Message, Role

BEGIN = "<｜begin▁of▁sentence｜>"
END = "<｜end▁of▁sentence｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
THINK = "<think>"
END_THINK = "</think>"

MAX_EFFORT_PREFIX = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the "
    "root cause, rigorously stress-testing your logic against all potential paths, edge cases, and "
    "adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step, considered "
    "alternative, and rejected hypothesis to ensure absolutely no assumption is left unchecked.\n\n"
)


@dataclass(frozen=True)
class Segment:
    """A piece of the prompt; ``template`` says whether special tokens in it are special."""

    text: str
    template: bool


def render(messages: Sequence[Message], effort: Effort) -> list[Segment]:
    """The prompt, up to where the model goes on.

    Consecutive user messages are one turn. Thinking is kept only in assistant messages after the last user
    message. A last message of the assistant is a beginning to be continued; otherwise its turn is opened.
    """
    thinks = effort is not Effort.NONE
    out = [_template(BEGIN)]
    if effort is Effort.MAX:
        out.append(_template(MAX_EFFORT_PREFIX))
    ordered = _system_before_its_turn(messages)
    last_user = max((index for index, one in enumerate(ordered) if one.role is Role.USER), default=-1)
    previous: Role | None = None
    for index, message in enumerate(ordered):
        if message.role is Role.SYSTEM:
            out.append(_content(message.content))
        elif message.role is Role.USER:
            out.append(_content("\n\n") if previous is Role.USER else _template(USER))
            out.append(_content(message.content))
        else:
            if previous is not Role.ASSISTANT:
                out.append(_template(ASSISTANT))
                out += _thinking(message, keep=thinks and index > last_user)
            out.append(_content(message.content))
            if index < len(ordered) - 1:
                out.append(_template(END))
        previous = message.role
    if previous is not Role.ASSISTANT:
        out.append(_template(ASSISTANT + (THINK if thinks else END_THINK)))
    return out


def opens_thinking(messages: Sequence[Message], effort: Effort) -> bool:
    """Whether what the model writes next begins inside its thinking."""
    return effort is not Effort.NONE and messages[-1].role is not Role.ASSISTANT


def text_of(segments: Iterable[Segment]) -> str:
    """The prompt as one string."""
    return "".join(segment.text for segment in segments)


def _thinking(message: Message, *, keep: bool) -> list[Segment]:
    if not keep:
        return [_template(END_THINK)]
    return [_template(THINK), _content(message.reasoning), _template(END_THINK)]


def _system_before_its_turn(messages: Sequence[Message]) -> list[Message]:
    """Moves a system message that stands between a user's turn and its answer to before that turn.

    The official encoder opens the assistant's turn only right after a user message, so such a message would
    leave the answer without its tag.
    """
    ordered: list[Message] = []
    for message in messages:
        place = len(ordered)
        if message.role is Role.SYSTEM:
            while place and ordered[place - 1].role is Role.USER:
                place -= 1
        ordered.insert(place, message)
    return ordered


def _template(text: str) -> Segment:
    return Segment(text, template=True)


def _content(text: str) -> Segment:
    return Segment(text, template=False)
