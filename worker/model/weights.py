"""The model's weights by role, assembled from tensors under their GGUF names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from kernels.hyper import HyperWeights
from kernels.moe import ExpertWeights
from worker.bank.store import KvGeometry
from worker.model.config import ModelConfig

GetTensor = Callable[[str], Tensor]
"""Returns the tensor of a GGUF name: float32 in torch's dimension order, int32 for the hash table."""


@dataclass(frozen=True)
class AttentionWeights:
    """Projections of one layer: ``attn_*``. ``output_a`` is ``[G, o_rank, H·D / G]``."""

    q_a: Tensor
    q_a_norm: Tensor
    q_b: Tensor
    kv: Tensor
    kv_norm: Tensor
    sinks: Tensor
    output_a: Tensor
    output_b: Tensor


@dataclass(frozen=True)
class CompressorWeights:
    """``kv`` and ``gate [overlap · D, hidden]``, ``ape [ratio, overlap · D]``, ``norm [D]``."""

    kv: Tensor
    gate: Tensor
    ape: Tensor
    norm: Tensor


@dataclass(frozen=True)
class IndexerWeights:
    """``q_b [index_heads · index_dim, q_rank]``, ``proj [index_heads, hidden]`` and the index rows'
    compressor.
    """

    q_b: Tensor
    proj: Tensor
    compressor: CompressorWeights


@dataclass(frozen=True)
class MoeWeights:
    """Exactly one of ``bias [E]`` (top-k layers) and ``token_experts [vocab, K]`` (hash layers) is there."""

    router: Tensor
    bias: Tensor | None
    token_experts: Tensor | None
    routed: ExpertWeights
    shared: ExpertWeights


@dataclass(frozen=True)
class LayerWeights:
    """One layer."""

    attention_mix: HyperWeights
    attention_norm: Tensor
    attention: AttentionWeights
    compressor: CompressorWeights | None
    indexer: IndexerWeights | None
    moe_mix: HyperWeights
    moe_norm: Tensor
    moe: MoeWeights


@dataclass(frozen=True)
class ModelWeights:
    """The whole model."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    head_mix: HyperWeights
    norm: Tensor
    output: Tensor


def assemble(config: ModelConfig, get: GetTensor) -> ModelWeights:
    """All weights, each tensor asked for once."""
    return ModelWeights(
        embedding=get("token_embd.weight"),
        layers=tuple(_layer(config, index, get) for index in range(config.layers)),
        head_mix=_hyper("output_hc", get),
        norm=get("output_norm.weight"),
        output=get("output.weight"),
    )


def _layer(config: ModelConfig, index: int, get: GetTensor) -> LayerWeights:
    def of(name: str) -> Tensor:
        return get(f"blk.{index}.{name}.weight")

    ratio = config.compress_ratios[index]
    hashed = index < config.hash_layers
    indexer = None
    if KvGeometry.indexed(ratio):
        indexer = IndexerWeights(
            of("indexer.attn_q_b"), of("indexer.proj"), _compressor("indexer_compressor", of)
        )
    return LayerWeights(
        attention_mix=_hyper(f"blk.{index}.hc_attn", get),
        attention_norm=of("attn_norm"),
        attention=AttentionWeights(
            q_a=of("attn_q_a"),
            q_a_norm=of("attn_q_a_norm"),
            q_b=of("attn_q_b"),
            kv=of("attn_kv"),
            kv_norm=of("attn_kv_a_norm"),
            sinks=of("attn_sinks"),
            output_a=of("attn_output_a").unflatten(0, (config.o_groups, config.o_rank)),
            output_b=of("attn_output_b"),
        ),
        compressor=_compressor("attn_compressor", of) if ratio else None,
        indexer=indexer,
        moe_mix=_hyper(f"blk.{index}.hc_ffn", get),
        moe_norm=of("ffn_norm"),
        moe=MoeWeights(
            router=of("ffn_gate_inp"),
            bias=None if hashed else get(f"blk.{index}.exp_probs_b.bias"),
            token_experts=of("ffn_gate_tid2eid") if hashed else None,
            routed=ExpertWeights(of("ffn_gate_exps"), of("ffn_up_exps"), of("ffn_down_exps")),
            shared=ExpertWeights(*(of(f"ffn_{part}_shexp").unsqueeze(0) for part in ("gate", "up", "down"))),
        ),
    )


def _compressor(prefix: str, of: GetTensor) -> CompressorWeights:
    return CompressorWeights(*(of(f"{prefix}_{part}") for part in ("kv", "gate", "ape", "norm")))


def _hyper(prefix: str, get: GetTensor) -> HyperWeights:
    return HyperWeights(*(get(f"{prefix}_{part}.weight") for part in ("fn", "base", "scale")))
