"""Text to token ids and back, with the vocabulary of the model file.

Byte-level BPE behind three pre-tokenizer patterns, as ``tokenizer.ggml.pre`` = ``joyai-llm`` names them.
Special tokens are found by us and not by the tokenizer, so that only template text can hold them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from tokenizers import Regex, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.pre_tokenizers import Sequence as PreTokenizers

from gateway.chat.segments import ASSISTANT, DSML, END_THINK, THINK, USER, Segment
from gateway.proto.engine_pb2 import Vocabulary

_CONTROL, _USER_DEFINED = 3, 4
_LEADING_SPECIALS = 3
_FIRST_ADDED = 128000
"""In the published vocabulary every id from here on is an added token, whatever type a converter gave it."""

_SPLITS = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


class VocabularyError(ValueError):
    """The model's vocabulary is not one this tokenizer reads."""


class ChatTokenizer:
    """The tokenizer of one model.

    Args:
        vocabulary: as the engine describes it, from the GGUF keys ``tokenizer.ggml.*``.

    Raises:
        VocabularyError: another kind of tokenizer, or a vocabulary that contradicts itself.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        if vocabulary.model != "gpt2" or vocabulary.pre != "joyai-llm":
            raise VocabularyError(
                f"tokenizer {vocabulary.model!r} with pre-tokenizer {vocabulary.pre!r}; "
                "expected 'gpt2' with 'joyai-llm'"
            )
        tokens = list(vocabulary.tokens)
        self._specials = {
            token: index
            for index, token in enumerate(tokens)
            if _is_special(index, len(tokens), vocabulary.token_types)
        }
        self._special_ids = frozenset(self._specials.values())
        # Longer ones first, or a token that begins with another would never be found.
        longest_first = sorted(filter(None, self._specials), key=len, reverse=True)
        self._special_pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._tokenizer = _byte_level_bpe(tokens, list(vocabulary.merges), self._special_ids)
        self._bytes = [_token_bytes(index, token, self._special_ids) for index, token in enumerate(tokens)]
        self._hidden = frozenset((vocabulary.bos_token, vocabulary.eos_token))
        self.think = self._specials.get(THINK)
        self.end_think = self._specials.get(END_THINK)
        self.dsml = self._specials.get(DSML)
        self.turns = tuple(self._specials[tag] for tag in (USER, ASSISTANT) if tag in self._specials)

    def __len__(self) -> int:
        return len(self._bytes)

    def encode(self, segments: Iterable[Segment]) -> list[int]:
        """Token ids of a rendered prompt.

        Text is cut only at special tokens of template segments: between two of them it is encoded as one
        string, whoever wrote which part, as the model saw it in training.
        """
        ids: list[int] = []
        text: list[str] = []

        def flush() -> None:
            whole = whole_characters("".join(text))
            ids.extend(self._tokenizer.encode(whole, add_special_tokens=False).ids)
            text.clear()

        for segment in segments:
            if segment.tokens:
                flush()
                ids.extend(segment.tokens)
                continue
            if not segment.template:
                text.append(segment.text)
                continue
            begin = 0
            for match in self._special_pattern.finditer(segment.text):
                text.append(segment.text[begin : match.start()])
                flush()
                ids.append(self._specials[match[0]])
                begin = match.end()
            text.append(segment.text[begin:])
        flush()
        return ids

    def token_bytes(self, token: int) -> bytes:
        """The UTF-8 bytes a token stands for; a special token's are its name, begin and end of sequence have
        none.
        """
        return b"" if token in self._hidden else self._bytes[token]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of complete tokens; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, tokens)).decode("utf-8", errors="replace")


def whole_characters(text: str) -> str:
    """Clients that cut text by UTF-16 units send half a character; U+FFFD stands for it."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _is_special(index: int, size: int, types: Sequence[int]) -> bool:
    if index < _LEADING_SPECIALS or (size > _FIRST_ADDED and index >= _FIRST_ADDED):
        return True
    return index < len(types) and types[index] in (_CONTROL, _USER_DEFINED)


def _byte_level_bpe(tokens: Sequence[str], merges: Sequence[str], specials: frozenset[int]) -> Tokenizer:
    vocabulary = {token: index for index, token in enumerate(tokens) if index not in specials}
    pairs = [_pair(merge) for merge in merges]
    try:
        tokenizer = Tokenizer(BPE(vocabulary, pairs))
    except Exception as error:  # the library's errors have no type of their own
        raise VocabularyError(f"the vocabulary contradicts itself: {error}") from error
    splits = [Split(Regex(pattern), "isolated") for pattern in _SPLITS]
    tokenizer.pre_tokenizer = PreTokenizers([*splits, ByteLevel(add_prefix_space=False, use_regex=False)])
    return tokenizer


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if not left or not right or " " in right:
        raise VocabularyError(f"merge {merge!r} is no pair")
    return left, right


def _token_bytes(index: int, token: str, specials: frozenset[int]) -> bytes:
    if index in specials:
        return token.encode()
    try:
        return bytes(_BYTE_OF[character] for character in token)
    except KeyError as error:
        raise VocabularyError(f"token {index} has a character that stands for no byte: {token!r}") from error


def _byte_characters() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte: itself where it is printable Latin-1, else one from U+0100
    on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }


_BYTE_OF = _byte_characters()
