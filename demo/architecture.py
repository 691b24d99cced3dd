"""The demonstration model's sizes: every mechanism of DeepSeek-V4-Flash, small enough to ship.

Widths are multiples of 256 so that the 2-bit formats' rows are whole blocks, 64 of a head's 128 dimensions
are not rotated (one FP8 block), and an indexer key has Flash's 128 dimensions.
"""

from __future__ import annotations

import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from worker.model.config import ModelConfig, Yarn

VOCAB = 2048
LAYERS = 9

DEMO_MODEL = ModelConfig(
    name="Twinspark Demo",
    layers=LAYERS,
    hidden=256,
    vocab=VOCAB,
    context=8192,
    heads=8,
    head_dim=128,
    q_rank=128,
    o_rank=64,
    o_groups=4,
    window=128,
    rms_eps=1e-6,
    compress_ratios=(0, 0, 4, 128, 4, 128, 4, 128, 4),
    rope_dim=64,
    rope_base=10000.0,
    compress_rope_base=160000.0,
    yarn=Yarn(factor=16.0, original_context=65536, beta_fast=32.0, beta_slow=1.0),
    index_heads=8,
    index_dim=128,
    index_top_k=64,
    experts=8,
    experts_used=2,
    expert_width=256,
    shared_experts=1,
    expert_scale=1.5,
    expert_norm=True,
    hash_layers=3,
    swiglu_clamp=(10.0,) * LAYERS,
    swiglu_clamp_shared=(10.0,) * LAYERS,
    streams=4,
    sinkhorn_iterations=20,
    hc_eps=1e-6,
    bos_token=0,
    eos_token=1,
)
"""At 6,000 tokens a query sees 1,500 ratio-4 entries and keeps 64."""


def hf_config(model: ModelConfig) -> DeepseekV4Config:
    """The same architecture as transformers states it."""
    yarn = model.yarn
    scaling: dict[str, object] = {"rope_type": "default"}
    if yarn is not None:
        scaling = {
            "rope_type": "yarn",
            "factor": yarn.factor,
            "original_max_position_embeddings": yarn.original_context,
            "beta_fast": yarn.beta_fast,
            "beta_slow": yarn.beta_slow,
        }
    return DeepseekV4Config(  # type: ignore[call-arg]  # older names, which it folds into its own
        vocab_size=model.vocab,
        hidden_size=model.hidden,
        moe_intermediate_size=model.expert_width,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=1,
        head_dim=model.head_dim,
        q_lora_rank=model.q_rank,
        num_experts_per_tok=model.experts_used,
        n_routed_experts=model.experts,
        n_shared_experts=model.shared_experts,
        routed_scaling_factor=model.expert_scale,
        max_position_embeddings=model.context,
        rope_theta=model.rope_base,
        compress_rope_theta=model.compress_rope_base,
        compress_ratios=list(model.compress_ratios),
        num_hash_layers=model.hash_layers,
        qk_rope_head_dim=model.rope_dim,
        rope_parameters=scaling,
        hc_mult=model.streams,
        hc_sinkhorn_iters=model.sinkhorn_iterations,
        hc_eps=model.hc_eps,
        rms_norm_eps=model.rms_eps,
        swiglu_limit=model.swiglu_clamp[0],
        sliding_window=model.window,
        o_groups=model.o_groups,
        o_lora_rank=model.o_rank,
        index_n_heads=model.index_heads,
        index_head_dim=model.index_dim,
        index_topk=model.index_top_k,
        pad_token_id=None,
        bos_token_id=model.bos_token,
        eos_token_id=model.eos_token,
        tie_word_embeddings=False,
        attn_implementation="eager",
    )


def new_model(model: ModelConfig, seed: int) -> DeepseekV4ForCausalLM:
    """A freshly initialised float32 network on the CPU; the same seed gives the same weights.

    Matrices start at ``columns ** -0.5`` with the writing projections smaller by the depth, hash layers draw
    distinct experts a token, hyper-connections start near a plain residual: each sub-layer reads the mean of
    the streams and every stream keeps itself.
    """
    torch.manual_seed(seed)
    network = DeepseekV4ForCausalLM(hf_config(model))
    depth = (2 * model.layers) ** -0.5
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if "_hc." in name or "hc_head" in name:
                _start_mix(name, parameter, model.streams)
            elif name.endswith("embed_tokens.weight"):
                parameter.normal_(0, 0.5)
            elif parameter.dim() >= 2 and not name.endswith("position_bias"):
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
                if name.endswith(("o_b_proj.weight", "down_proj", "down_proj.weight")):
                    parameter.mul_(depth)
                if name.endswith("lm_head.weight"):
                    parameter.mul_(0.5)
        for layer in network.model.layers:
            if layer.mlp.is_hash:
                order = torch.rand(model.vocab, model.experts).argsort(-1)
                layer.mlp.gate.tid2eid.copy_(order[:, : model.experts_used])
    return network


def _start_mix(name: str, parameter: torch.Tensor, streams: int) -> None:
    if name.endswith(("_hc.fn", ".hc_fn")):
        parameter.normal_(0, 0.1 * parameter.shape[-1] ** -0.5)
    elif name.endswith("scale"):
        parameter.fill_(1.0)
    elif name.endswith("hc_base"):
        parameter.fill_(-1.1)
    else:
        parameter.zero_()
        parameter[:streams] = torch.tensor([1.0, 0.0, -1.0, -2.0])[:streams]
        parameter[2 * streams :].view(streams, streams).fill_diagonal_(4.0)
