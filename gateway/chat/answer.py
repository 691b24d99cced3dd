"""From an engine's tokens to the parts of an answer: thinking, content cut at stop strings, tool calls."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.chat.conversation import ToolCall
from gateway.chat.detokenize import Detokenizer
from gateway.chat.dsml import MARK, CallDelta, DsmlParser
from gateway.chat.segments import DSML
from gateway.chat.stops import StopMatcher
from gateway.chat.tokens import ChatTokenizer

__all__ = ["AnswerParser", "CallDelta", "Delta"]


@dataclass(frozen=True)
class Delta:
    """What one step adds. ``content_tokens`` are the tokens known since to belong to the content, in order.

    Content never follows calls.
    """

    reasoning: str = ""
    content: str = ""
    content_tokens: tuple[int, ...] = ()
    calls: tuple[CallDelta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)


class AnswerParser:
    """Splits one answer.

    Thinking ends at the first ``</think>`` token; an answer that ends before it is all thinking. Stop strings
    count in the content alone: neither in the thinking nor in calls, whose arguments they would break.

    Args:
        tokenizer: of the model.
        thinking: whether the answer begins inside the thinking.
        stops: stop strings.
        tools: whether tools were offered; without, nothing is a call.
        single_call: whether the first call ends the answer.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        *,
        thinking: bool,
        stops: Sequence[str],
        tools: bool = False,
        single_call: bool = False,
    ) -> None:
        self._end_think = tokenizer.end_think
        self.thinking = thinking and self._end_think is not None
        marks = {tokenizer.dsml: MARK} if tools and tokenizer.dsml is not None else {}
        self._calls = DsmlParser(single=single_call) if marks else None
        self._reasoning_text = Detokenizer(tokenizer)
        self._content_text = Detokenizer(tokenizer, marks)
        self._stops = StopMatcher(stops)
        self._seen = 0
        self._released = 0
        self._undecided: deque[tuple[int, int]] = deque()
        self.thought: list[int] = []
        self.said: list[int] = []
        self.reasoning_tokens = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the answer."""
        return self._stops.matched is not None

    @property
    def stop_string(self) -> str:
        """The stop string that has ended the answer; empty if none has."""
        return self._stops.matched or ""

    @property
    def complete(self) -> bool:
        """Whether the calls, and with them the answer, are complete; :attr:`said` goes up to there."""
        return self._calls is not None and self._calls.complete

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The calls so far."""
        return self._calls.calls if self._calls and not self.stopped else ()

    @property
    def flaws(self) -> Sequence[str]:
        """What was wrong with the calls' markup."""
        return self._calls.flaws if self._calls else ()

    def push(self, tokens: Sequence[int]) -> Delta:
        """The parts that are certain after these tokens."""
        reasoning = ""
        rest = tuple(tokens)
        if self.thinking:
            ends = next((at for at, token in enumerate(rest) if token == self._end_think), None)
            inside, rest = (rest, ()) if ends is None else (rest[:ends], rest[ends + 1 :])
            self.thought += inside
            self.reasoning_tokens += len(inside) + (ends is not None)
            reasoning = self._reasoning_text.push(inside)
            if ends is not None:
                self.thinking = False
                reasoning += self._reasoning_text.flush()
        if self._calls is None:
            return Delta(reasoning, self._stops.push(self._content_text.push(rest)), rest)
        return self._with_calls(self._calls, reasoning, rest)

    def finish(self, *, cut: bool = False) -> Delta:
        """What was held back, once the answer is over.

        Args:
            cut: whether the model would have gone on.
        """
        if self.thinking:
            return Delta(reasoning=self._reasoning_text.flush())
        text = self._content_text.flush()
        calls: tuple[CallDelta, ...] = ()
        if self._calls is not None and not self.complete:
            pushed, last = self._calls.push(text), self._calls.finish(cut=cut)
            text, calls = pushed.content + last.content, pushed.calls + last.calls
        content = self._stops.push(text)
        if self.stopped:
            return Delta(content=content)
        left = () if self.calls else tuple(token for _, token in self._undecided)
        return Delta(content=content + self._stops.flush(), content_tokens=left, calls=calls)

    def _with_calls(self, parser: DsmlParser, reasoning: str, tokens: Sequence[int]) -> Delta:
        """Token by token, so that it is known which of them belong to what."""
        content, decided = "", []
        calls: tuple[CallDelta, ...] = ()
        for token in tokens:
            if not parser.complete:
                self.said.append(token)
            text = self._content_text.push((token,))
            self._undecided.append((self._seen, token))
            self._seen += len(text.replace(MARK, DSML))
            parsed = parser.push(text)
            self._released += len(parsed.content)
            content += self._stops.push(parsed.content)
            if self.stopped:
                break
            if parsed.calls:
                content += self._stops.flush()
                calls += parsed.calls
            while self._undecided and self._undecided[0][0] < self._released:
                decided.append(self._undecided.popleft()[1])
        return Delta(reasoning, content, tuple(decided), calls)
