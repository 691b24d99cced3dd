"""A model's weights on the device: one copy, in the kernels' layout.

Matrices that share an input are joined along their rows, so that one launch multiplies them all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.gpu.matrix import PACKINGS, Matrix, empty_planes, fill_planes
from worker.bank.store import KvGeometry
from worker.errors import ModelFileError
from worker.gpu.source import Source
from worker.model.config import ModelConfig

_EXPERT_IN = ("IQ2_XXS", "Q4_K")
_EXPERT_OUT = ("Q2_K", "Q4_K")


@dataclass(frozen=True)
class MixWeights:
    """``fn [R, S · D]`` F16 or F32; ``base`` and ``scale`` float32."""

    fn: Tensor
    base: Tensor
    scale: Tensor


@dataclass(frozen=True)
class CompressorParts:
    """A compressor without its projections: ``ape [ratio, W]`` F16 or F32, ``norm [D]`` float32."""

    ape: Tensor
    norm: Tensor


@dataclass(frozen=True)
class LayerOnGpu:
    """One layer.

    Attributes:
        inputs: q_a and kv, one matrix.
        compress: the compressor's kv and gate, then the indexer's kv, gate and proj, one matrix; None in a
            layer without entries.
        output_a: ``[o_groups · o_rank, H · D / o_groups]``.
    """

    attention_mix: MixWeights
    attention_norm: Tensor
    inputs: Matrix
    q_a_norm: Tensor
    kv_norm: Tensor
    q_b: Matrix
    sinks: Tensor
    output_a: Matrix
    output_b: Matrix
    compress: Matrix | None
    compressor: CompressorParts | None
    index_q_b: Matrix | None
    indexer: CompressorParts | None
    moe_mix: MixWeights
    moe_norm: Tensor
    router: Matrix
    bias: Tensor | None
    table: Tensor | None
    gate: Matrix
    up: Matrix
    down: Matrix
    shared_gate: Matrix
    shared_up: Matrix
    shared_down: Matrix


@dataclass(frozen=True)
class WeightsOnGpu:
    """The whole model."""

    embedding: Tensor
    layers: tuple[LayerOnGpu, ...]
    head_mix: MixWeights
    norm: Tensor
    output: Matrix


def load_weights(source: Source, config: ModelConfig, device: torch.device) -> WeightsOnGpu:
    """Reads every tensor once.

    Raises:
        ModelFileError: a tensor's type has no kernel, or its sizes do not fit the kernels' tiles.
    """
    loader = _Loader(source, device)
    return WeightsOnGpu(
        embedding=loader.plain("token_embd.weight"),
        layers=tuple(_layer(loader, config, index) for index in range(config.layers)),
        head_mix=loader.mix("output_hc"),
        norm=loader.vector("output_norm.weight"),
        output=loader.matrix(["output.weight"], ("Q8_0",)),
    )


def _layer(loader: _Loader, config: ModelConfig, index: int) -> LayerOnGpu:
    p = f"blk.{index}."
    ratio = config.compress_ratios[index]
    hashed = index < config.hash_layers
    indexed = KvGeometry.indexed(ratio)
    compress = [f"{p}attn_compressor_{part}.weight" for part in ("kv", "gate")]
    if indexed:
        compress += [f"{p}indexer_compressor_{part}.weight" for part in ("kv", "gate")]
        compress.append(f"{p}indexer.proj.weight")

    def q8(*names: str) -> Matrix:
        return loader.matrix([f"{p}{name}.weight" for name in names], ("Q8_0",))

    def experts(name: str, allowed: Sequence[str]) -> Matrix:
        return loader.matrix([f"{p}ffn_{name}_exps.weight"], allowed)

    return LayerOnGpu(
        attention_mix=loader.mix(p + "hc_attn"),
        attention_norm=loader.vector(p + "attn_norm.weight"),
        inputs=q8("attn_q_a", "attn_kv"),
        q_a_norm=loader.vector(p + "attn_q_a_norm.weight"),
        kv_norm=loader.vector(p + "attn_kv_a_norm.weight"),
        q_b=q8("attn_q_b"),
        sinks=loader.vector(p + "attn_sinks.weight"),
        output_a=q8("attn_output_a"),
        output_b=q8("attn_output_b"),
        compress=loader.matrix(compress, ("F16", "F32")) if ratio else None,
        compressor=loader.compressor(p + "attn_compressor") if ratio else None,
        index_q_b=loader.matrix([p + "indexer.attn_q_b.weight"], ("F16", "F32")) if indexed else None,
        indexer=loader.compressor(p + "indexer_compressor") if indexed else None,
        moe_mix=loader.mix(p + "hc_ffn"),
        moe_norm=loader.vector(p + "ffn_norm.weight"),
        router=loader.matrix([p + "ffn_gate_inp.weight"], ("F16", "F32")),
        bias=None if hashed else loader.vector(p + "exp_probs_b.bias"),
        table=loader.table(p + "ffn_gate_tid2eid.weight") if hashed else None,
        gate=experts("gate", _EXPERT_IN),
        up=experts("up", _EXPERT_IN),
        down=experts("down", _EXPERT_OUT),
        shared_gate=q8("ffn_gate_shexp"),
        shared_up=q8("ffn_up_shexp"),
        shared_down=q8("ffn_down_shexp"),
    )


class _Loader:
    def __init__(self, source: Source, device: torch.device) -> None:
        self._source = source
        self._device = device

    def matrix(self, names: Sequence[str], allowed: Sequence[str]) -> Matrix:
        """The tensors' rows one after another."""
        formats = {self._source.format(name).name for name in names}
        if len(formats) > 1 or not formats <= set(allowed):
            raise ModelFileError(
                f"{', '.join(names)}: of type {', '.join(sorted(formats))}, and the GPU's kernels read "
                f"{' or '.join(allowed)}, one type for all of them",
                "use a file in the published type mix, or serve it on the CPU",
            )
        (fmt,) = formats
        shapes = [self._source.shape(name) for name in names]
        columns = shapes[0][-1]
        rows = sum(math.prod(shape[:-1]) for shape in shapes)
        planes = empty_planes(fmt, rows, columns, self._device)
        first = 0
        for name in names:
            for raw in self._source.rows(name):
                fill_planes(planes, fmt, first, raw)
                first += raw.shape[0]
        shape = shapes[0] if len(names) == 1 else (rows, columns)
        return Matrix(fmt, shape, planes)

    def plain(self, name: str) -> Tensor:
        """An F16 or F32 tensor as it is."""
        return self.matrix([name], ("F16", "F32")).planes[0]

    def vector(self, name: str) -> Tensor:
        """float32, one-dimensional."""
        fmt = self._source.format(name)
        assert fmt.dequantize is not None
        (raw,) = self._source.rows(name)
        return fmt.dequantize(raw.view(-1, fmt.block_bytes)).flatten().clone()

    def table(self, name: str) -> Tensor:
        """int32 ``[vocab, used]``."""
        rows = [raw.view(torch.int32).clone() for raw in self._source.rows(name)]
        return torch.cat(rows)

    def mix(self, prefix: str) -> MixWeights:
        return MixWeights(
            self.plain(f"{prefix}_fn.weight"),
            self.vector(f"{prefix}_base.weight"),
            self.vector(f"{prefix}_scale.weight"),
        )

    def compressor(self, prefix: str) -> CompressorParts:
        return CompressorParts(self.plain(f"{prefix}_ape.weight"), self.vector(f"{prefix}_norm.weight"))


assert set(_EXPERT_IN) | set(_EXPERT_OUT) <= set(PACKINGS)
