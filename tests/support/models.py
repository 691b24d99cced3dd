"""Small models with every parameter random, so that no part of the architecture can be left out unnoticed."""

from __future__ import annotations

import torch
from torch import Tensor

from worker.model.config import ModelConfig, Yarn


def small_config(**changes: object) -> ModelConfig:
    """All layer kinds, hash and top-k routing, an indexer that selects 20 of many, short YaRN original
    context.
    """
    values: dict[str, object] = {
        "name": "small",
        "layers": 6,
        "hidden": 48,
        "vocab": 96,
        "context": 4096,
        "heads": 4,
        "head_dim": 24,
        "q_rank": 20,
        "o_rank": 12,
        "o_groups": 2,
        "window": 128,
        "rms_eps": 1e-6,
        "compress_ratios": (0, 4, 128, 4, 128, 4),
        "rope_dim": 8,
        "rope_base": 10000.0,
        "compress_rope_base": 160000.0,
        "yarn": Yarn(factor=16.0, original_context=256, beta_fast=32.0, beta_slow=1.0),
        "index_heads": 32,
        "index_dim": 32,
        "index_top_k": 20,
        "experts": 8,
        "experts_used": 3,
        "expert_width": 24,
        "shared_experts": 1,
        "expert_scale": 1.5,
        "expert_norm": True,
        "hash_layers": 2,
        "swiglu_clamp": (1.0,) * 6,
        "swiglu_clamp_shared": (1.0,) * 6,
        "streams": 4,
        "sinkhorn_iterations": 20,
        "hc_eps": 1e-6,
        "bos_token": 0,
        "eos_token": 1,
    }
    return ModelConfig(**{**values, **changes})  # type: ignore[arg-type]


def random_tensors(config: ModelConfig, seed: int) -> dict[str, Tensor]:
    """Every tensor the architecture has, by GGUF name: float32, and int32 for hash tables."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float | None = None) -> Tensor:
        scale = shape[-1] ** -0.5 if std is None else std
        return torch.randn(*shape, generator=generator) * scale

    def near_one(*shape: int) -> Tensor:
        return 1 + 0.2 * torch.randn(*shape, generator=generator)

    c = config
    flat = c.streams * c.hidden
    tensors = {
        "token_embd.weight": normal(c.vocab, c.hidden, std=1.0),
        "output.weight": normal(c.vocab, c.hidden),
        "output_norm.weight": near_one(c.hidden),
        "output_hc_fn.weight": normal(c.streams, flat),
        "output_hc_base.weight": normal(c.streams, std=0.5),
        "output_hc_scale.weight": near_one(1),
    }

    def compressor(prefix: str, ratio: int, dim: int) -> None:
        width = (2 if ratio == 4 else 1) * dim
        tensors[f"{prefix}_kv.weight"] = normal(width, c.hidden)
        tensors[f"{prefix}_gate.weight"] = normal(width, c.hidden)
        tensors[f"{prefix}_ape.weight"] = normal(ratio, width, std=0.5)
        tensors[f"{prefix}_norm.weight"] = near_one(dim)

    mixes = (2 + c.streams) * c.streams
    for layer, ratio in enumerate(c.compress_ratios):
        p = f"blk.{layer}."
        for site in ("attn", "ffn"):
            tensors[f"{p}hc_{site}_fn.weight"] = normal(mixes, flat)
            tensors[f"{p}hc_{site}_base.weight"] = normal(mixes, std=0.5)
            tensors[f"{p}hc_{site}_scale.weight"] = near_one(3)
        tensors[p + "attn_norm.weight"] = near_one(c.hidden)
        tensors[p + "ffn_norm.weight"] = near_one(c.hidden)
        tensors[p + "attn_q_a.weight"] = normal(c.q_rank, c.hidden)
        tensors[p + "attn_q_a_norm.weight"] = near_one(c.q_rank)
        tensors[p + "attn_q_b.weight"] = normal(c.heads * c.head_dim, c.q_rank)
        tensors[p + "attn_kv.weight"] = normal(c.head_dim, c.hidden)
        tensors[p + "attn_kv_a_norm.weight"] = near_one(c.head_dim)
        tensors[p + "attn_sinks.weight"] = normal(c.heads, std=1.0)
        tensors[p + "attn_output_a.weight"] = normal(
            c.o_groups * c.o_rank, c.heads * c.head_dim // c.o_groups
        )
        tensors[p + "attn_output_b.weight"] = normal(c.hidden, c.o_groups * c.o_rank)
        if ratio:
            compressor(p + "attn_compressor", ratio, c.head_dim)
        if ratio == 4:
            tensors[p + "indexer.attn_q_b.weight"] = normal(c.index_heads * c.index_dim, c.q_rank)
            tensors[p + "indexer.proj.weight"] = normal(c.index_heads, c.hidden)
            compressor(p + "indexer_compressor", ratio, c.index_dim)
        tensors[p + "ffn_gate_inp.weight"] = normal(c.experts, c.hidden)
        if layer < c.hash_layers:
            order = torch.rand(c.vocab, c.experts, generator=generator).argsort(1)
            tensors[p + "ffn_gate_tid2eid.weight"] = order[:, : c.experts_used].to(torch.int32)
        else:
            tensors[p + "exp_probs_b.bias"] = normal(c.experts, std=0.3)
        for kind, shape in (("exps", (c.experts,)), ("shexp", ())):
            tensors[f"{p}ffn_gate_{kind}.weight"] = normal(*shape, c.expert_width, c.hidden)
            tensors[f"{p}ffn_up_{kind}.weight"] = normal(*shape, c.expert_width, c.hidden)
            tensors[f"{p}ffn_down_{kind}.weight"] = normal(*shape, c.hidden, c.expert_width)
    return tensors
