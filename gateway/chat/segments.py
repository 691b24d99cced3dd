"""Pieces of a prompt: template text, what somebody wrote, and tokens the model sampled itself."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

BEGIN = "<｜begin▁of▁sentence｜>"
END = "<｜end▁of▁sentence｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
THINK = "<think>"
END_THINK = "</think>"
DSML = "｜DSML｜"


@dataclass(frozen=True)
class Segment:
    """A piece of the prompt; ``template`` says whether special tokens in it are special. Where ``tokens`` are
    given they are the piece, and the text is left out.
    """

    text: str
    template: bool
    tokens: tuple[int, ...] = ()


def template(text: str) -> Segment:
    """Text of the prompt's format."""
    return Segment(text, template=True)


def content(text: str) -> Segment:
    """Text that somebody wrote."""
    return Segment(text, template=False)


def sampled(tokens: tuple[int, ...]) -> Segment:
    """What the model wrote, token by token."""
    return Segment("", template=False, tokens=tokens)


def text_of(segments: Iterable[Segment]) -> str:
    """The prompt as one string."""
    return "".join(segment.text for segment in segments)
