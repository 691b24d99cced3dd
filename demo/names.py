"""GGUF's tensors from transformers' parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from worker.gguf.schema import TensorSpec, expected_tensors
from worker.model.config import ModelConfig

_GLOBAL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output.weight": "lm_head.weight",
    "output_norm.weight": "model.norm.weight",
    "output_hc_fn.weight": "model.hc_head.hc_fn",
    "output_hc_base.weight": "model.hc_head.hc_base",
    "output_hc_scale.weight": "model.hc_head.hc_scale",
}
_COMPRESSOR = {
    "kv": "kv_proj.weight",
    "gate": "gate_proj.weight",
    "ape": "position_bias",
    "norm": "kv_norm.weight",
}
_LAYER = {
    **{
        f"hc_{gguf}_{part}.weight": f"{hf}_hc.{part}"
        for gguf, hf in (("attn", "attn"), ("ffn", "ffn"))
        for part in ("fn", "base", "scale")
    },
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
    **{
        f"attn_compressor_{part}.weight": f"self_attn.compressor.{name}" for part, name in _COMPRESSOR.items()
    },
    **{
        f"indexer_compressor_{part}.weight": f"self_attn.compressor.indexer.{name}"
        for part, name in _COMPRESSOR.items()
    },
    "indexer.attn_q_b.weight": "self_attn.compressor.indexer.q_b_proj.weight",
    "indexer.proj.weight": "self_attn.compressor.indexer.scorer.weights_proj.weight",
    "ffn_gate_inp.weight": "mlp.gate.weight",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_gate_tid2eid.weight": "mlp.gate.tid2eid",
    "ffn_gate_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_up_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
    "ffn_gate_shexp.weight": "mlp.shared_experts.gate_proj.weight",
    "ffn_up_shexp.weight": "mlp.shared_experts.up_proj.weight",
    "ffn_down_shexp.weight": "mlp.shared_experts.down_proj.weight",
}


@dataclass(frozen=True)
class Source:
    """A GGUF tensor and the parameter that holds it, whole or one half of its rows."""

    spec: TensorSpec
    parameter: str
    half: int | None = None

    def of(self, weights: Mapping[str, Tensor]) -> Tensor:
        """The tensor, a view of the parameter."""
        whole = weights[self.parameter]
        if self.half is None:
            return whole
        half: Tensor = whole.unflatten(1, (2, -1))[:, self.half]
        return half


def sources(config: ModelConfig) -> list[Source]:
    """Every tensor of the file, in its order."""
    return [
        Source(spec, _GLOBAL[spec.name]) if spec.name in _GLOBAL else layer_source(spec)
        for spec in expected_tensors(config)
    ]


def layer_source(spec: TensorSpec) -> Source:
    """Of a layer's tensor, named ``<kind>.<layer>.<what>``."""
    _, layer, suffix = spec.name.split(".", 2)
    half = {"ffn_gate_exps.weight": 0, "ffn_up_exps.weight": 1}.get(suffix)
    return Source(spec, f"model.layers.{layer}.{_LAYER[suffix]}", half)
