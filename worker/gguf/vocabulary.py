"""Tokenizer arrays for synthetic files: byte-level BPE with this model family's special tokens.

A vocabulary as large as the real one has the special tokens that matter at their real ids; a smaller one
has the essential ones at its end. The merges are learned from a short list of words, then filled up with
pairs in order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
"""Token types as GGUF numbers them."""

REAL_SIZE = 129280
_REAL_PLAIN = 128000
_FIRST = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>")
_ESSENTIAL = (
    "<｜User｜>",
    "<｜Assistant｜>",
    "<|EOT|>",
    "<think>",
    "</think>",
    "｜DSML｜",
    "<｜latest_reminder｜>",
)
_USER_DEFINED = {"<think>", "</think>", "｜DSML｜"}
_AT_REAL_ID = {
    128800: "<｜fim▁hole｜>",
    128801: "<｜fim▁begin｜>",
    128802: "<｜fim▁end｜>",
    128803: "<｜User｜>",
    128804: "<｜Assistant｜>",
    128805: "<|EOT|>",
    128821: "<think>",
    128822: "</think>",
    128823: "<｜place▁holder▁for▁copy｜>",
    128825: "｜DSML｜",
    128826: "<｜begin▁sys｜>",
    128827: "<｜end▁sys｜>",
    128828: "<｜latest_reminder｜>",
    128829: "<｜action｜>",
    128830: "<｜query｜>",
    128831: "<｜authority｜>",
    128832: "<｜domain｜>",
    128836: "<｜title｜>",
    128840: "<dsml:",
    128841: "</dsml:",
    128845: "<｜read_url｜>",
}
_WORDS = """
the of and to in is that it was for on are with as be at this have from or one had by word but not what all
were we when your can said there use an each which she do how their if will up other about out many then
them these so some her would make like him into time has look two more write go see number no way could
people my than first water been call who its now find long down day did get come made may part over new
sound take only little work know place year live me back give most very after thing our just name good
sentence man think say great where help through much before line right too mean old any same tell boy follow
came want show also around form three small set put end does another well large must big even such because
turn here why ask went men read need land different home us move try kind hand picture again change off play
spell air away animal house point page letter mother answer found study still learn def return self class
import from None True False print else elif while for try except raise with yield async await int str list
dict set tuple len range function const let var public private static void string number boolean error
"""


@dataclass(frozen=True)
class Vocabulary:
    """A GGUF file's tokenizer: one text and one type an id, and merges by rank ("left right")."""

    tokens: tuple[str, ...]
    types: tuple[int, ...]
    merges: tuple[str, ...]
    bos: int = 0
    eos: int = 1
    pad: int = 1


def synthetic_vocabulary(size: int) -> Vocabulary:
    """A vocabulary of exactly ``size`` ids, always the same one.

    Raises:
        ValueError: the size has no room for 256 bytes and the essential special tokens.
    """
    special = _special_tokens(size)
    plain_end = size - len(special)
    alphabet = list(byte_characters().values())
    merge_count = plain_end - len(_FIRST) - len(alphabet)
    if merge_count < 0:
        raise ValueError(f"a vocabulary needs {size - merge_count} ids at least, not {size}")
    merges = _merges(alphabet, merge_count)
    plain = [*alphabet, *(left + right for left, right in merges)]
    types = [CONTROL] * len(_FIRST) + [NORMAL] * len(plain)
    types += [USER_DEFINED if token in _USER_DEFINED else CONTROL for token in special]
    return Vocabulary(
        tokens=(*_FIRST, *plain, *special),
        types=tuple(types),
        merges=tuple(f"{left} {right}" for left, right in merges),
    )


def byte_characters() -> Mapping[int, str]:
    """The character that stands for each byte: itself where printable in Latin-1, else from U+0100 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in sorted(printable)} | {
        byte: chr(256 + number) for number, byte in enumerate(others)
    }


def _special_tokens(size: int) -> list[str]:
    """The added tokens at the end of the vocabulary."""
    if size < REAL_SIZE:
        return list(_ESSENTIAL)
    return [
        _AT_REAL_ID.get(token, f"<｜place▁holder▁no▁{token - _REAL_PLAIN}｜>")
        for token in range(_REAL_PLAIN, size)
    ]


def _merges(alphabet: list[str], count: int) -> list[tuple[str, str]]:
    """``count`` merges whose results are all different, each from tokens that exist before it."""
    merges: list[tuple[str, str]] = []
    known = set(alphabet)
    order = list(alphabet)
    for source in (_learned(), _in_order(order)):
        for left, right in source:
            if len(merges) == count:
                return merges
            if left + right not in known:
                known.add(left + right)
                order.append(left + right)
                merges.append((left, right))
    return merges


def _learned() -> Iterator[tuple[str, str]]:
    """Merges of the most frequent neighbours in the words, until every word is one token."""
    space = byte_characters()[ord(" ")]
    words = [list(space + word) for word in dict.fromkeys(_WORDS.split())]
    while pairs := Counter(pair for word in words for pair in pairwise(word)):
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        yield best
        words = [_merged(word, best) for word in words]


def _merged(word: list[str], pair: tuple[str, str]) -> list[str]:
    out: list[str] = []
    for symbol in word:
        if out and (out[-1], symbol) == pair:
            out[-1] += symbol
        else:
            out.append(symbol)
    return out


def _in_order(tokens: list[str]) -> Iterator[tuple[str, str]]:
    """All pairs of a list of tokens that grows meanwhile, the ones with early tokens first."""
    end = 0
    while True:
        for other in range(end + 1):
            yield tokens[end], tokens[other]
            if other != end:
                yield tokens[other], tokens[end]
        end += 1
