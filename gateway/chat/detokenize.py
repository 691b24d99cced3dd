"""Token ids to text as they arrive: only whole characters come out."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from gateway.chat.tokens import ChatTokenizer


class Detokenizer:
    """Text of one stream of tokens. What has come out never changes; half a character waits for its rest.

    Args:
        tokenizer: of the model.
        marks: text for some tokens in place of their own.
    """

    def __init__(self, tokenizer: ChatTokenizer, marks: Mapping[int, str] = MappingProxyType({})) -> None:
        self._tokenizer = tokenizer
        self._marks = marks
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, tokens: Sequence[int]) -> str:
        """The text that is certain after these tokens."""
        if not self._marks:
            return self._decoder.decode(b"".join(map(self._tokenizer.token_bytes, tokens)))
        return "".join(
            self.flush() + self._marks[token]
            if token in self._marks
            else self._decoder.decode(self._tokenizer.token_bytes(token))
            for token in tokens
        )

    def flush(self) -> str:
        """What is left at the end: U+FFFD where a character was never completed."""
        return self._decoder.decode(b"", final=True)
