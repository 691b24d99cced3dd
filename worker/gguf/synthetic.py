"""Writes complete model files of any size with random weights.

Names, order of dimensions, types and metadata are those of the published files, so that everything but the
quality of the answers can be tried without them.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType
from numpy.typing import NDArray

from kernels.quant.formats import FORMATS, BlockFormat
from worker.gguf.metadata import add_metadata
from worker.gguf.random_blocks import random_blocks
from worker.gguf.schema import Role, TensorSpec, expected_tensors
from worker.gguf.vocabulary import Vocabulary, synthetic_vocabulary
from worker.model.config import ARCHITECTURE, ModelConfig

ALIGNMENT = 32
_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True)
class Mix:
    """Which format each role is stored in, and the number GGUF gives such a file."""

    file_type: LlamaFileType
    formats: Mapping[Role, str]


def _mix(file_type: LlamaFileType, matrix: str, projection: str, expert_in: str, expert_out: str) -> Mix:
    formats = {
        Role.VECTOR: "F32",
        Role.MATRIX: matrix,
        Role.PROJECTION: projection,
        Role.EXPERT_IN: expert_in,
        Role.EXPERT_OUT: expert_out,
        Role.TOKEN_TABLE: "I32",
    }
    return Mix(file_type, MappingProxyType(formats))


MIXES: Mapping[str, Mix] = MappingProxyType(
    {
        "q2": _mix(LlamaFileType.MOSTLY_IQ2_XXS, "F16", "Q8_0", "IQ2_XXS", "Q2_K"),
        "q4": _mix(LlamaFileType.MOSTLY_Q4_K_M, "F16", "Q8_0", "Q4_K", "Q4_K"),
        "f32": _mix(LlamaFileType.ALL_F32, "F32", "F32", "F32", "F32"),
    }
)


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor of a file to be written."""

    spec: TensorSpec
    format: BlockFormat

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return math.prod(self.spec.shape[:-1]) * self.format.row_bytes(self.spec.shape[-1])

    @property
    def padded_bytes(self) -> int:
        """Bytes it takes in the file, up to where the next may begin."""
        return -(-self.nbytes // ALIGNMENT) * ALIGNMENT


def plan_tensors(config: ModelConfig, mix: str) -> list[PlannedTensor]:
    """All tensors of a file, in its order.

    Raises:
        ValueError: the mix is unknown, or a tensor's rows are no whole blocks of its format.
    """
    if mix not in MIXES:
        raise ValueError(f"unknown mix {mix!r}; there are {', '.join(MIXES)}")
    formats = MIXES[mix].formats
    planned = [PlannedTensor(spec, FORMATS[formats[spec.role]]) for spec in expected_tensors(config)]
    for tensor in planned:
        columns = tensor.spec.shape[-1]
        if columns % tensor.format.block_elements:
            raise ValueError(
                f"{tensor.spec.name}: {mix} needs whole {tensor.format.name} blocks, not rows of {columns}"
            )
    return planned


def write_synthetic(
    path: Path,
    config: ModelConfig,
    mix: str,
    seed: int,
    vocabulary: Vocabulary | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> None:
    """Writes a model file, a few MB in memory at a time; the same arguments give the same bytes.

    The file appears under its name once it is complete.

    Args:
        path: where to.
        config: the model's sizes and constants.
        mix: a key of :data:`MIXES`.
        seed: of the weights.
        vocabulary: tokens, one an id of the model; a synthetic one when None.
        on_bytes: told how many bytes of data have been written since it was last told.

    Raises:
        ValueError: the mix or the vocabulary does not fit the configuration.
        OSError: the disk is full or cannot be written.
    """
    planned = plan_tensors(config, mix)
    vocabulary = vocabulary or synthetic_vocabulary(config.vocab)
    if len(vocabulary.tokens) != config.vocab:
        raise ValueError(f"the vocabulary has {len(vocabulary.tokens)} tokens, the model {config.vocab}")
    partial = path.with_name(path.name + ".partial")
    try:
        _write_header(partial, config, mix, vocabulary, planned)
        with partial.open("ab") as file:
            file.write(bytes(-file.tell() % ALIGNMENT))
            for tensor in planned:
                _write_tensor(file, tensor, config, seed, on_bytes)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _write_header(
    path: Path, config: ModelConfig, mix: str, vocabulary: Vocabulary, planned: list[PlannedTensor]
) -> None:
    writer = GGUFWriter(path, ARCHITECTURE)
    add_metadata(writer, config, MIXES[mix].file_type, vocabulary)
    for tensor in planned:
        kind = GGMLQuantizationType(tensor.format.ggml_id)
        writer.add_tensor_info(tensor.spec.name, tensor.spec.shape, np.dtype(np.float32), tensor.nbytes, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()


def _write_tensor(
    file: BinaryIO,
    tensor: PlannedTensor,
    config: ModelConfig,
    seed: int,
    on_bytes: Callable[[int], None] | None,
) -> None:
    rng = np.random.Generator(np.random.SFC64([seed, zlib.crc32(tensor.spec.name.encode())]))
    for data in _chunks(tensor, config, rng):
        file.write(data.data)
        if on_bytes is not None:
            on_bytes(data.nbytes)
    file.write(bytes(tensor.padded_bytes - tensor.nbytes))


def _chunks(
    tensor: PlannedTensor, config: ModelConfig, rng: np.random.Generator
) -> Iterator[NDArray[np.generic]]:
    """The tensor's data, rows in order."""
    *leading, columns = tensor.spec.shape
    rows = math.prod(leading)
    per_chunk = max(1, _CHUNK_BYTES // tensor.format.row_bytes(columns))
    for begin in range(0, rows, per_chunk):
        count = min(per_chunk, rows - begin)
        if tensor.spec.role is Role.TOKEN_TABLE:
            yield _distinct_experts(count, columns, config.experts, rng)
        elif tensor.spec.role is Role.VECTOR:
            mean, std = _vector_distribution(tensor.spec.name)
            yield (mean + std * rng.standard_normal((count, columns))).astype(np.float32)
        else:
            blocks = count * columns // tensor.format.block_elements
            yield random_blocks(tensor.format, blocks, _matrix_std(tensor.spec), rng)


def _distinct_experts(rows: int, used: int, experts: int, rng: np.random.Generator) -> NDArray[np.int32]:
    """int32 ``[rows, used]``, no expert twice in a row."""
    parts = []
    for begin in range(0, rows, 4096):
        order = rng.random((min(4096, rows - begin), experts), dtype=np.float32).argsort(axis=1)
        parts.append(order[:, :used].astype(np.int32))
    return np.ascontiguousarray(np.concatenate(parts))


def _vector_distribution(name: str) -> tuple[float, float]:
    """Mean and standard deviation."""
    if name.endswith(("norm.weight", "_scale.weight")):
        return 1.0, 0.1
    return 0.0, 1.0 if name.endswith("attn_sinks.weight") else 0.3


def _matrix_std(spec: TensorSpec) -> float:
    """Outputs as large as inputs, but for the embedding and the positional biases, which are looked up."""
    if spec.name == "token_embd.weight":
        return 1.0
    if spec.name.endswith("_ape.weight"):
        return 0.3
    return float(spec.shape[-1] ** -0.5)
