"""Where a model's raw rows come from: a file, or random blocks made on the device.

Rows arrive on the device in the file's format; nothing else of the file's size is ever in memory.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from kernels.quant import iq2_xxs
from kernels.quant.formats import BlockFormat
from worker.gguf.load import STAGING_BYTES, stream_raw
from worker.gguf.read import GgufFile
from worker.gguf.schema import Role
from worker.gguf.synthetic import plan_tensors
from worker.model.config import ModelConfig


class Source(Protocol):
    """A model's tensors by GGUF name."""

    def format(self, name: str) -> BlockFormat: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def rows(self, name: str) -> Iterator[Tensor]:
        """The tensor's raw rows in order, uint8 ``[n, row_bytes]`` on the device, some MB a time."""
        ...


class FileSource:
    """Rows of a GGUF file, through a pinned staging buffer.

    Args:
        file: opened and checked.
        device: where rows are wanted.
        on_bytes: told how much has been read since it was last told.
    """

    def __init__(
        self, file: GgufFile, device: torch.device, on_bytes: Callable[[int], None] | None = None
    ) -> None:
        self._file = file
        self._device = device
        self._on_bytes = on_bytes
        self._staging = torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")

    def format(self, name: str) -> BlockFormat:
        return self._file.tensors[name].format

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.tensors[name].shape

    def rows(self, name: str) -> Iterator[Tensor]:
        info = self._file.tensors[name]
        if info.row_bytes > len(self._staging):
            self._staging = torch.empty(
                info.row_bytes, dtype=torch.uint8, pin_memory=self._staging.is_pinned()
            )
        for raw in stream_raw(info, self._staging, self._on_bytes):
            yield raw.to(self._device)


class RandomSource:
    """Random rows in the formats of a published mix, made on the device; weights keep a row's magnitude.

    Args:
        config: sizes.
        mix: a key of :data:`worker.gguf.synthetic.MIXES`.
        seed: of the weights.
        device: where rows are made.
    """

    def __init__(self, config: ModelConfig, mix: str, seed: int, device: torch.device) -> None:
        self._config = config
        self._tensors = {tensor.spec.name: tensor for tensor in plan_tensors(config, mix)}
        self._seed = seed
        self._device = device

    def format(self, name: str) -> BlockFormat:
        return self._tensors[name].format

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].spec.shape

    def rows(self, name: str) -> Iterator[Tensor]:
        tensor = self._tensors[name]
        *leading, columns = tensor.spec.shape
        generator = torch.Generator(self._device).manual_seed(self._seed * 7919 + zlib.crc32(name.encode()))
        left = math.prod(leading)
        step = max(1, (4 * STAGING_BYTES) // tensor.format.row_bytes(columns))
        while left:
            count = min(step, left)
            yield self._make(tensor.format, tensor.spec.role, name, count, columns, generator)
            left -= count

    def _make(
        self, fmt: BlockFormat, role: Role, name: str, rows: int, columns: int, generator: torch.Generator
    ) -> Tensor:
        def normal(std: float, mean: float = 0.0) -> Tensor:
            return mean + std * torch.randn(rows, columns, generator=generator, device=self._device)

        if role is Role.TOKEN_TABLE:
            order = torch.rand(rows, self._config.experts, generator=generator, device=self._device).argsort(
                1
            )
            return order[:, :columns].to(torch.int32).contiguous().view(torch.uint8)
        if role is Role.VECTOR:
            scale_like = name.endswith(("norm.weight", "_scale.weight"))
            return normal(0.1, 1.0).view(torch.uint8) if scale_like else normal(0.3).view(torch.uint8)
        std = 1.0 if name == "token_embd.weight" else 0.3 if name.endswith("_ape.weight") else columns**-0.5
        if fmt.name == "F16":
            return normal(std).to(torch.float16).view(torch.uint8)
        if fmt.name == "F32":
            return normal(std).view(torch.uint8)
        return _blocks(fmt, rows, columns, std, generator).view(rows, -1)


def _blocks(fmt: BlockFormat, rows: int, columns: int, std: float, generator: torch.Generator) -> Tensor:
    """Uniform codes; scales that give the weights the deviation ``std``."""
    count = rows * columns // fmt.block_elements
    raw = torch.randint(
        0, 256, (count, fmt.block_bytes), dtype=torch.uint8, generator=generator, device=generator.device
    )

    def put(at: int, value: float) -> None:
        half = torch.tensor([value], dtype=torch.float16).view(torch.uint8).tolist()
        raw[:, at], raw[:, at + 1] = half[0], half[1]

    if fmt.name == "Q8_0":
        put(0, std / 73.9)
    elif fmt.name == "IQ2_XXS":
        grid_rms = float(iq2_xxs.grid().square().mean().sqrt())
        put(0, std / (grid_rms * 0.25 * 9.2))
    elif fmt.name == "Q2_K":
        raw[:, :16] = (raw[:, :16] & 7) * 17 + 0x88  # scale and minimum alike, 8 to 15
        put(80, std / 13.2)
        put(82, 1.5 * std / 13.2)
    elif fmt.name == "Q4_K":
        raw[:, 4:12] = 48  # scales and minima of the first four sub-blocks
        raw[:, 12:16] = 0
        raw[:, 4:12] |= 192  # ... and the upper bits of the others
        put(0, std / (48 * 4.6))
        put(2, 7.5 * std / (48 * 4.6))
    else:
        raise ValueError(f"no random weights for {fmt.name}")
    return raw
