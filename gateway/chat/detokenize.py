"""Token ids to text as they arrive: only whole characters come out."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from gateway.chat.tokens import ChatTokenizer


class Detokenizer:
    """Text of one stream of tokens. What has come out never changes; half a character waits for its rest."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, tokens: Sequence[int]) -> str:
        """The text that is certain after these tokens."""
        return self._decoder.decode(b"".join(map(self._tokenizer.token_bytes, tokens)))

    def flush(self) -> str:
        """What is left at the end: U+FFFD where a character was never completed."""
        return self._decoder.decode(b"", final=True)
