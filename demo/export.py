"""Writes a trained checkpoint as a GGUF file: ``python -m demo.export FOLDER FILE``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from demo import checkpoint
from demo.architecture import DEMO_MODEL, new_model
from demo.names import Source
from demo.quantize.formats import QUANTIZERS
from demo.recipe import shipped
from demo.vocabulary import FIRST, LAST
from demo.vocabulary import load as load_tokenizer
from worker.gguf.metadata import add_metadata
from worker.gguf.vocabulary import CONTROL, NORMAL, USER_DEFINED, Vocabulary
from worker.model.config import ARCHITECTURE, ModelConfig

_TEXT_LIKE = {"<think>", "</think>", "｜DSML｜"}
"""Special tokens that belong to what a model says."""


def export(weights: dict[str, Tensor], config: ModelConfig, vocabulary: Vocabulary, path: Path) -> None:
    """Writes the whole file.

    Args:
        weights: transformers' parameters and buffers by name, on the CPU.
        config: their sizes.
        vocabulary: as many tokens as the configuration says.
        path: where to; an existing file is replaced.

    Raises:
        ValueError: the vocabulary has another size than the model.
    """
    if len(vocabulary.tokens) != config.vocab:
        raise ValueError(f"the vocabulary has {len(vocabulary.tokens)} tokens, the model {config.vocab}")
    writer = GGUFWriter(path, ARCHITECTURE)
    add_metadata(writer, config, LlamaFileType.MOSTLY_IQ2_XXS, vocabulary)
    write(writer, weights, shipped(config))


def write(writer: GGUFWriter, weights: Mapping[str, Tensor], formats: list[tuple[Source, str]]) -> None:
    """Packs the tensors and writes the file, whose metadata the writer has."""
    for source, name in formats:
        data = _data(source.of(weights), name)
        writer.add_tensor(source.spec.name, data, raw_dtype=GGMLQuantizationType[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    """A trained tokenizer as GGUF stores it."""
    model = json.loads(tokenizer.to_str())["model"]
    size = tokenizer.get_vocab_size()
    tokens = [str(tokenizer.id_to_token(token)) for token in range(size)]
    special = set(FIRST) | set(LAST)
    types = [
        NORMAL if token not in special else USER_DEFINED if token in _TEXT_LIKE else CONTROL
        for token in tokens
    ]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return Vocabulary(tuple(tokens), tuple(types), tuple(merges))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="of a checkpoint")
    parser.add_argument("file", type=Path)
    arguments = parser.parse_args()
    network = new_model(DEMO_MODEL, 0)
    checkpoint.load(arguments.folder, network)
    export(network.state_dict(), DEMO_MODEL, vocabulary_of(load_tokenizer()), arguments.file)
    print(f"{arguments.file}: {arguments.file.stat().st_size / 1e6:.2f} MB")


def _data(tensor: Tensor, name: str) -> NDArray[np.generic]:
    tensor = tensor.detach().contiguous()
    if name in QUANTIZERS:
        return QUANTIZERS[name].pack(tensor.float())
    kinds = {"F32": np.float32, "F16": np.float16, "I32": np.int32}
    return tensor.numpy().astype(kinds[name])


if __name__ == "__main__":
    main()
