"""`transformers`' DeepSeek-V4 as the oracle: its configuration and weights from ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4ForCausalLM

from worker.model.config import ModelConfig

_LAYER_KINDS = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}

_GLOBAL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output.weight": "lm_head.weight",
    "output_norm.weight": "model.norm.weight",
    "output_hc_fn.weight": "model.hc_head.hc_fn",
    "output_hc_base.weight": "model.hc_head.hc_base",
    "output_hc_scale.weight": "model.hc_head.hc_scale",
}
_LAYER = {
    "hc_attn_fn.weight": "attn_hc.fn",
    "hc_attn_base.weight": "attn_hc.base",
    "hc_attn_scale.weight": "attn_hc.scale",
    "hc_ffn_fn.weight": "ffn_hc.fn",
    "hc_ffn_base.weight": "ffn_hc.base",
    "hc_ffn_scale.weight": "ffn_hc.scale",
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn_q_a.weight": "self_attn.q_a_proj.weight",
    "attn_q_a_norm.weight": "self_attn.q_a_norm.weight",
    "attn_q_b.weight": "self_attn.q_b_proj.weight",
    "attn_kv.weight": "self_attn.kv_proj.weight",
    "attn_kv_a_norm.weight": "self_attn.kv_norm.weight",
    "attn_sinks.weight": "self_attn.sinks",
    "attn_output_a.weight": "self_attn.o_a_proj.weight",
    "attn_output_b.weight": "self_attn.o_b_proj.weight",
    "ffn_gate_inp.weight": "mlp.gate.weight",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
    "ffn_gate_shexp.weight": "mlp.shared_experts.gate_proj.weight",
    "ffn_up_shexp.weight": "mlp.shared_experts.up_proj.weight",
    "ffn_down_shexp.weight": "mlp.shared_experts.down_proj.weight",
}
_COMPRESSOR = {
    "kv": "kv_proj.weight",
    "gate": "gate_proj.weight",
    "ape": "position_bias",
    "norm": "kv_norm.weight",
}


def oracle_config(config: ModelConfig) -> DeepseekV4Config:
    """The same model in transformers' words; layers in between are shared experts of width
    ``expert_width``.
    """
    assert config.yarn is not None
    return DeepseekV4Config(
        vocab_size=config.vocab,
        hidden_size=config.hidden,
        moe_intermediate_size=config.expert_width,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        head_dim=config.head_dim,
        q_lora_rank=config.q_rank,
        o_lora_rank=config.o_rank,
        o_groups=config.o_groups,
        num_experts_per_tok=config.experts_used,
        n_routed_experts=config.experts,
        routed_scaling_factor=config.expert_scale,
        norm_topk_prob=config.expert_norm,
        max_position_embeddings=config.context,
        rope_theta=config.rope_base,
        compress_rope_theta=config.compress_rope_base,
        compress_ratios=list(config.compress_ratios),
        num_hash_layers=config.hash_layers,
        qk_rope_head_dim=config.rope_dim,
        swiglu_limit=config.swiglu_clamp[0],
        hc_mult=config.streams,
        hc_sinkhorn_iters=config.sinkhorn_iterations,
        hc_eps=config.hc_eps,
        sliding_window=config.window,
        index_n_heads=config.index_heads,
        index_head_dim=config.index_dim,
        index_topk=config.index_top_k,
        rms_norm_eps=config.rms_eps,
        rope_parameters={
            "rope_type": "yarn",
            "factor": config.yarn.factor,
            "original_max_position_embeddings": config.yarn.original_context,
            "beta_fast": config.yarn.beta_fast,
            "beta_slow": config.yarn.beta_slow,
        },
        attn_implementation="eager",
    )


def oracle_from(config: ModelConfig, get: Callable[[str], Tensor]) -> DeepseekV4ForCausalLM:
    """transformers' model holding the tensors that ``get`` returns by GGUF name; every parameter is set."""
    model = DeepseekV4ForCausalLM(oracle_config(config)).to(torch.float32).eval()
    kinds = [_LAYER_KINDS[ratio] for ratio in config.compress_ratios]
    assert list(model.config.layer_types) == kinds
    state = model.state_dict()
    unset = set(state)
    with torch.no_grad():
        for name, key, part in _names(config):
            target = state[key] if part is None else state[key][:, part]
            source = get(name)
            assert source.shape == target.shape, (name, source.shape, target.shape)
            target.copy_(source)
            unset.discard(key)
    assert not {key for key in unset if "inv_freq" not in key}, unset
    return model


def _names(config: ModelConfig) -> Iterator[tuple[str, str, slice | None]]:
    """GGUF name, key in the state dict, and the rows of it (dimension 1) where two tensors share one."""
    for name, key in _GLOBAL.items():
        yield name, key, None
    for layer, ratio in enumerate(config.compress_ratios):
        prefix, target = f"blk.{layer}.", f"model.layers.{layer}."
        for name, key in _LAYER.items():
            yield prefix + name, target + key, None
        width = config.expert_width
        yield prefix + "ffn_gate_exps.weight", target + "mlp.experts.gate_up_proj", slice(0, width)
        yield prefix + "ffn_up_exps.weight", target + "mlp.experts.gate_up_proj", slice(width, 2 * width)
        if layer < config.hash_layers:
            yield prefix + "ffn_gate_tid2eid.weight", target + "mlp.gate.tid2eid", None
        else:
            yield prefix + "exp_probs_b.bias", target + "mlp.gate.e_score_correction_bias", None
        compressor = target + "self_attn.compressor."
        if ratio:
            for part, key in _COMPRESSOR.items():
                yield f"{prefix}attn_compressor_{part}.weight", compressor + key, None
        if ratio == 4:
            yield prefix + "indexer.attn_q_b.weight", compressor + "indexer.q_b_proj.weight", None
            yield prefix + "indexer.proj.weight", compressor + "indexer.scorer.weights_proj.weight", None
            for part, key in _COMPRESSOR.items():
                yield f"{prefix}indexer_compressor_{part}.weight", f"{compressor}indexer.{key}", None
