"""The table of block formats this project reads, and dequantization by it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch import Tensor

from kernels.quant import floats, iq2_xxs, mxfp4, q2_k, q3_k, q4_0, q4_k, q5_k, q6_k, q8_0


@dataclass(frozen=True)
class BlockFormat:
    """How a tensor's rows are stored: ``block_elements`` weights in every ``block_bytes`` bytes.

    ``dequantize`` takes blocks uint8 ``[B, block_bytes]``, contiguous, and gives float32 ``[B,
    block_elements]``; it is None for integers, which are no weights.
    """

    name: str
    ggml_id: int
    block_elements: int
    block_bytes: int
    dequantize: Callable[[Tensor], Tensor] | None

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of ``columns`` elements.

        Raises:
            ValueError: ``columns`` is not a whole number of blocks.
        """
        if columns % self.block_elements:
            raise ValueError(f"{columns} columns are not whole {self.name} blocks of {self.block_elements}")
        return columns // self.block_elements * self.block_bytes


_ALL = (
    BlockFormat("F32", 0, floats.BLOCK_ELEMENTS, floats.F32_BYTES, floats.dequantize_f32),
    BlockFormat("F16", 1, floats.BLOCK_ELEMENTS, floats.F16_BYTES, floats.dequantize_f16),
    BlockFormat("Q4_0", 2, q4_0.BLOCK_ELEMENTS, q4_0.BLOCK_BYTES, q4_0.dequantize),
    BlockFormat("Q8_0", 8, q8_0.BLOCK_ELEMENTS, q8_0.BLOCK_BYTES, q8_0.dequantize),
    BlockFormat("Q2_K", 10, q2_k.BLOCK_ELEMENTS, q2_k.BLOCK_BYTES, q2_k.dequantize),
    BlockFormat("Q3_K", 11, q3_k.BLOCK_ELEMENTS, q3_k.BLOCK_BYTES, q3_k.dequantize),
    BlockFormat("Q4_K", 12, q4_k.BLOCK_ELEMENTS, q4_k.BLOCK_BYTES, q4_k.dequantize),
    BlockFormat("Q5_K", 13, q5_k.BLOCK_ELEMENTS, q5_k.BLOCK_BYTES, q5_k.dequantize),
    BlockFormat("Q6_K", 14, q6_k.BLOCK_ELEMENTS, q6_k.BLOCK_BYTES, q6_k.dequantize),
    BlockFormat("IQ2_XXS", 16, iq2_xxs.BLOCK_ELEMENTS, iq2_xxs.BLOCK_BYTES, iq2_xxs.dequantize),
    BlockFormat("I32", 26, 1, 4, None),
    BlockFormat("BF16", 30, floats.BLOCK_ELEMENTS, floats.BF16_BYTES, floats.dequantize_bf16),
    BlockFormat("MXFP4", 39, mxfp4.BLOCK_ELEMENTS, mxfp4.BLOCK_BYTES, mxfp4.dequantize),
)

FORMATS: Mapping[str, BlockFormat] = MappingProxyType({fmt.name: fmt for fmt in _ALL})
"""By name, as GGML spells it."""

_BY_ID = {fmt.ggml_id: fmt for fmt in _ALL}


def by_ggml_id(ggml_id: int) -> BlockFormat | None:
    """The format of a GGUF file's type number, None where it is not one of ours."""
    return _BY_ID.get(ggml_id)


def dequantize(raw: Tensor, fmt: BlockFormat, columns: int) -> Tensor:
    """Weights of whole rows.

    Args:
        raw: uint8 ``[..., row_bytes]`` on any device.
        fmt: a format of weights.
        columns: elements of a row, a whole number of blocks.

    Returns:
        float32 ``[..., columns]``.

    Raises:
        ValueError: the format holds integers, or the sizes do not fit.
    """
    if fmt.dequantize is None:
        raise ValueError(f"{fmt.name} holds integers, not weights")
    row_bytes = fmt.row_bytes(columns)
    if raw.shape[-1] != row_bytes:
        raise ValueError(f"a row of {columns} {fmt.name} elements has {row_bytes} bytes, not {raw.shape[-1]}")
    raw = raw.contiguous()
    if raw.storage_offset() % 4:
        raw = raw.clone()  # formats view fields as wider types, which must be aligned
    blocks = raw.view(-1, fmt.block_bytes)
    return fmt.dequantize(blocks).view(*raw.shape[:-1], columns)
