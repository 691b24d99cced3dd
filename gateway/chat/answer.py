"""From an engine's tokens to the parts of an answer: thinking, then content, cut at stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.chat.detokenize import Detokenizer
from gateway.chat.stops import StopMatcher
from gateway.chat.tokens import ChatTokenizer


@dataclass(frozen=True)
class CallDelta:
    """A piece of the tool call number ``index``: its first has ``id`` and ``name``, ``arguments`` is a
    fragment of JSON text.
    """

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True)
class Delta:
    """What one step adds. ``content_tokens`` are those of the tokens given that belong to the content."""

    reasoning: str = ""
    content: str = ""
    content_tokens: tuple[int, ...] = ()
    calls: tuple[CallDelta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)


class AnswerParser:
    """Splits one answer.

    Thinking ends at the first ``</think>`` token; an answer that ends before it is all thinking. Stop strings
    count in the content alone.

    Args:
        tokenizer: of the model.
        thinking: whether the answer begins inside the thinking.
        stops: stop strings.
    """

    def __init__(self, tokenizer: ChatTokenizer, *, thinking: bool, stops: Sequence[str]) -> None:
        self._end_think = tokenizer.end_think
        self._thinking = thinking and self._end_think is not None
        self._reasoning_text = Detokenizer(tokenizer)
        self._content_text = Detokenizer(tokenizer)
        self._stops = StopMatcher(stops)
        self.reasoning_tokens = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the answer."""
        return self._stops.matched is not None

    def push(self, tokens: Sequence[int]) -> Delta:
        """The parts that are certain after these tokens."""
        reasoning = ""
        rest = tuple(tokens)
        if self._thinking:
            ends = next((at for at, token in enumerate(rest) if token == self._end_think), None)
            inside, rest = (rest, ()) if ends is None else (rest[:ends], rest[ends + 1 :])
            self.reasoning_tokens += len(inside) + (ends is not None)
            reasoning = self._reasoning_text.push(inside)
            if ends is not None:
                self._thinking = False
                reasoning += self._reasoning_text.flush()
        return Delta(reasoning, self._stops.push(self._content_text.push(rest)), rest)

    def finish(self) -> Delta:
        """What was held back, once the answer is over."""
        if self._thinking:
            return Delta(reasoning=self._reasoning_text.flush())
        content = self._stops.push(self._content_text.flush())
        return Delta(content=content + ("" if self.stopped else self._stops.flush()))
