"""Calls that the client demands: their beginning is written for the model, which goes on from there."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

from gateway.chat.conversation import ChatRequest
from gateway.chat.segments import DSML, Segment, template
from gateway.chat.tools import CALLS_OPEN, call_head

NAME_TOKENS = 64
"""More than any tool's name has."""


def demanded(request: ChatRequest) -> tuple[str, ...]:
    """Names of the tools of which one must be called; none when the model is free."""
    if request.tool_choice.mode == "named":
        return (request.tool_choice.name,)
    if request.tool_choice.mode == "required":
        return tuple(tool.name for tool in request.tools)
    return ()


def up_to_name() -> list[Segment]:
    """The block's beginning, where the name of a tool comes next."""
    return [template(f'{CALLS_OPEN}<{DSML}invoke name="')]


def up_to_arguments(name: str) -> list[Segment]:
    """The block's beginning, where the arguments for this tool come next."""
    return [template(CALLS_OPEN), *call_head(name)]


def meant(written: str, names: Sequence[str]) -> str:
    """The tool whose name the model has written, or the one most like it."""
    name = written.partition('"')[0]
    if name in names:
        return name
    by_letters = {known.lower(): known for known in names}
    return by_letters[get_close_matches(name.lower(), by_letters, n=1, cutoff=0.0)[0]]
