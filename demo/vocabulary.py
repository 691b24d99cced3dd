"""The model's byte-level BPE vocabulary, learned from its own conversations.

Digits never merge, so that a number is one token a digit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from demo.compose import long_conversation, short_conversation
from demo.dialogues.message import Conversation
from demo.render import render

FILE = Path(__file__).with_name("tokenizer.json")

FIRST = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>")
LAST = (
    *(f"<｜fim▁{name}｜>" for name in ("hole", "begin", "end")),
    "<｜User｜>",
    "<｜Assistant｜>",
    "<|EOT|>",
    "<think>",
    "</think>",
    "<｜place▁holder▁for▁copy｜>",
    "｜DSML｜",
    "<｜begin▁sys｜>",
    "<｜end▁sys｜>",
    "<｜latest_reminder｜>",
    *(f"<｜{name}｜>" for name in ("action", "query", "authority", "domain", "task", "political", "entity")),
    *(f"<｜{name}｜>" for name in ("title", "safety", "answer", "search")),
    "<dsml:",
    "</dsml:",
    "<｜read_url｜>",
)
"""Special tokens after the learned ones, in the order of the real vocabulary."""

_SPLITS = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
)


def learn(size: int, seed: int, conversations: int = 12000) -> Tokenizer:
    """Trains a vocabulary of exactly ``size`` ids, special tokens included.

    Raises:
        RuntimeError: the text has too few different pairs to fill it.
    """
    learned = size - len(LAST)
    trainer = trainers.BpeTrainer(
        vocab_size=learned,
        special_tokens=list(FIRST),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer = _untrained()
    tokenizer.train_from_iterator(_texts(seed, conversations), trainer)
    if tokenizer.get_vocab_size() != learned:
        raise RuntimeError(f"only {tokenizer.get_vocab_size()} of {learned} tokens could be learned")
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in LAST])
    return tokenizer


@cache
def load(path: Path = FILE) -> Tokenizer:
    """The vocabulary that ships with the model."""
    return Tokenizer.from_file(str(path))


def _untrained() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _SPLITS]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _texts(seed: int, conversations: int) -> Iterator[str]:
    rng = Random(seed)
    for number in range(conversations):
        drawn: Conversation = long_conversation(rng, 800) if number % 8 == 0 else short_conversation(rng)
        text = render(drawn)
        for token in FIRST + LAST:
            text = text.replace(token, "\n\n")
        yield re.sub(r"\d", "", text)


if __name__ == "__main__":
    learn(2048, seed=1).save(str(FILE))
