"""A model's configuration and tokenizer as GGUF metadata, in the keys and types of the published files."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gguf import GGUFValueType, GGUFWriter, LlamaFileType, size_label

from worker.gguf.schema import Role, expected_tensors
from worker.gguf.vocabulary import Vocabulary
from worker.model.config import ARCHITECTURE, ModelConfig

_SQRT_SOFTPLUS = 4
_QUANTIZATION_VERSION = 2
_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<｜Assistant｜></think>{{ message['content'] }}{{ eos_token }}"
    "{% elif message['role'] == 'user' %}<｜User｜>{{ message['content'] }}"
    "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜></think>{% endif %}"
)


def add_metadata(
    writer: GGUFWriter, config: ModelConfig, file_type: LlamaFileType, vocabulary: Vocabulary
) -> None:
    """Adds what the configuration and the tokenizer are read back from, and what files carry besides."""
    _add_general(writer, config, file_type)
    _add_architecture(writer, config)
    _add_tokenizer(writer, vocabulary)


def _add_general(writer: GGUFWriter, config: ModelConfig, file_type: LlamaFileType) -> None:
    writer.add_string("general.name", config.name)
    writer.add_string("general.size_label", _size_label(config))
    writer.add_string("general.license", "mit")
    writer.add_uint32("general.file_type", int(file_type))
    writer.add_uint32("general.quantization_version", _QUANTIZATION_VERSION)


def _add_architecture(writer: GGUFWriter, c: ModelConfig) -> None:
    integers = {
        "block_count": c.layers,
        "context_length": c.context,
        "embedding_length": c.hidden,
        "vocab_size": c.vocab,
        "attention.head_count": c.heads,
        "attention.head_count_kv": 1,
        "attention.key_length": c.head_dim,
        "attention.value_length": c.head_dim,
        "attention.q_lora_rank": c.q_rank,
        "attention.output_lora_rank": c.o_rank,
        "attention.output_group_count": c.o_groups,
        "attention.sliding_window": c.window,
        "attention.indexer.head_count": c.index_heads,
        "attention.indexer.key_length": c.index_dim,
        "attention.indexer.top_k": c.index_top_k,
        "rope.dimension_count": c.rope_dim,
        "expert_count": c.experts,
        "expert_used_count": c.experts_used,
        "expert_shared_count": c.shared_experts,
        "expert_feed_forward_length": c.expert_width,
        "expert_gating_func": _SQRT_SOFTPLUS,
        "hash_layer_count": c.hash_layers,
        "hyper_connection.count": c.streams,
        "hyper_connection.sinkhorn_iterations": c.sinkhorn_iterations,
        "nextn_predict_layers": 1,
    }
    floats = {
        "attention.layer_norm_rms_epsilon": c.rms_eps,
        "attention.compress_rope_freq_base": c.compress_rope_base,
        "rope.freq_base": c.rope_base,
        "expert_weights_scale": c.expert_scale,
        "hyper_connection.epsilon": c.hc_eps,
    }
    if c.yarn is not None:
        integers["rope.scaling.original_context_length"] = c.yarn.original_context
        floats["rope.scaling.factor"] = c.yarn.factor
        floats["rope.scaling.yarn_beta_fast"] = c.yarn.beta_fast
        floats["rope.scaling.yarn_beta_slow"] = c.yarn.beta_slow
    for key, number in integers.items():
        writer.add_uint32(f"{ARCHITECTURE}.{key}", number)
    for key, value in floats.items():
        writer.add_float32(f"{ARCHITECTURE}.{key}", value)
    writer.add_string(f"{ARCHITECTURE}.rope.scaling.type", "none" if c.yarn is None else "yarn")
    writer.add_bool(f"{ARCHITECTURE}.expert_weights_norm", c.expert_norm)
    # One entry more than layers: the multi-token-prediction block's.
    ratios = [*c.compress_ratios, 0]
    _add_array(writer, f"{ARCHITECTURE}.attention.compress_ratios", ratios, GGUFValueType.INT32)
    _add_array(writer, f"{ARCHITECTURE}.swiglu_clamp_exp", c.swiglu_clamp, GGUFValueType.FLOAT32)
    if c.swiglu_clamp_shared != c.swiglu_clamp:
        key = f"{ARCHITECTURE}.swiglu_clamp_shexp"
        _add_array(writer, key, c.swiglu_clamp_shared, GGUFValueType.FLOAT32)


def _add_tokenizer(writer: GGUFWriter, vocabulary: Vocabulary) -> None:
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_string("tokenizer.ggml.pre", "joyai-llm")
    _add_array(writer, "tokenizer.ggml.tokens", vocabulary.tokens, GGUFValueType.STRING)
    _add_array(writer, "tokenizer.ggml.token_type", vocabulary.types, GGUFValueType.INT32)
    _add_array(writer, "tokenizer.ggml.merges", vocabulary.merges, GGUFValueType.STRING)
    writer.add_uint32("tokenizer.ggml.bos_token_id", vocabulary.bos)
    writer.add_uint32("tokenizer.ggml.eos_token_id", vocabulary.eos)
    writer.add_uint32("tokenizer.ggml.padding_token_id", vocabulary.pad)
    writer.add_bool("tokenizer.ggml.add_bos_token", False)
    writer.add_bool("tokenizer.ggml.add_eos_token", False)
    writer.add_string("tokenizer.chat_template", _CHAT_TEMPLATE)


def _add_array(writer: GGUFWriter, key: str, values: Sequence[object], kind: GGUFValueType) -> None:
    writer.add_key_value(key, list(values), GGUFValueType.ARRAY, sub_type=kind)


def _size_label(config: ModelConfig) -> str:
    """Number of experts times the parameters outside of them plus one expert's, as in "256x8.4B"."""
    outside = one_expert = 0
    for spec in expected_tensors(config):
        if spec.role in (Role.EXPERT_IN, Role.EXPERT_OUT):
            one_expert += math.prod(spec.shape[1:])
        else:
            outside += math.prod(spec.shape)
    return size_label(outside + config.experts * one_expert, outside, one_expert, config.experts)
