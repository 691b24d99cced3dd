"""The configuration read from metadata, against the published table of values and against itself damaged."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from worker.errors import ModelFileError
from worker.gguf.presets import FLASH
from worker.model.config import ModelConfig, Yarn

SOURCE = "flash.gguf"


def flash_metadata() -> dict[str, object]:
    """What the published files of DeepSeek-V4-Flash say."""
    own: dict[str, object] = {
        "block_count": 43,
        "context_length": 1048576,
        "embedding_length": 4096,
        "vocab_size": 129280,
        "attention.head_count": 64,
        "attention.head_count_kv": 1,
        "attention.key_length": 512,
        "attention.value_length": 512,
        "attention.q_lora_rank": 1024,
        "attention.output_lora_rank": 1024,
        "attention.output_group_count": 8,
        "attention.sliding_window": 128,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.compress_ratios": (0, 0) + (4, 128) * 20 + (4, 0),
        "attention.compress_rope_freq_base": 160000.0,
        "attention.indexer.head_count": 64,
        "attention.indexer.key_length": 128,
        "attention.indexer.top_k": 512,
        "rope.dimension_count": 64,
        "rope.freq_base": 10000.0,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 16.0,
        "rope.scaling.original_context_length": 65536,
        "rope.scaling.yarn_beta_fast": 32.0,
        "rope.scaling.yarn_beta_slow": 1.0,
        "expert_count": 256,
        "expert_used_count": 6,
        "expert_shared_count": 1,
        "expert_feed_forward_length": 2048,
        "expert_gating_func": 4,
        "expert_weights_norm": True,
        "expert_weights_scale": 1.5,
        "hash_layer_count": 3,
        "swiglu_clamp_exp": (10.0,) * 43,
        "hyper_connection.count": 4,
        "hyper_connection.sinkhorn_iterations": 20,
        "hyper_connection.epsilon": 1e-6,
        "nextn_predict_layers": 1,
    }
    return {
        "general.architecture": "deepseek4",
        "general.name": "DeepSeek V4 Flash",
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        **{f"deepseek4.{key}": value for key, value in own.items()},
    }


def read(**changes: Any) -> ModelConfig:
    """Flash's metadata with some keys (``__`` for a dot) changed, or taken out by None."""
    metadata = flash_metadata()
    for key, value in changes.items():
        name = key.replace("__", ".")
        name = name if name.startswith(("general.", "tokenizer.")) else f"deepseek4.{name}"
        metadata[name] = value
        if value is None:
            del metadata[name]
    return ModelConfig.from_metadata(metadata, SOURCE)


def test_published_values_give_the_flash_preset() -> None:
    assert read() == FLASH


def test_one_ratio_a_layer_and_the_prediction_layer_s_dropped() -> None:
    config = read()
    assert len(config.compress_ratios) == config.layers == 43
    assert [config.compress_ratios.count(ratio) for ratio in (0, 4, 128)] == [2, 21, 20]
    assert read(attention__compress_ratios=(0, 0) + (4, 128) * 20 + (4,)) == config


def test_numbers_of_other_types_mean_the_same() -> None:
    assert read(rope__freq_base=10000, rope__scaling__factor=16, expert_weights_scale=1.5) == FLASH
    assert read(swiglu_clamp_exp=10) == FLASH
    assert read(swiglu_clamp_exp=(10,) * 44) == FLASH


def test_the_shared_expert_s_clamp_is_the_routed_one_unless_stated() -> None:
    assert read(swiglu_clamp_exp=(7.0,) * 43).swiglu_clamp_shared == (7.0,) * 43
    own = read(swiglu_clamp_shexp=(3.0,) * 43)
    assert (own.swiglu_clamp[0], own.swiglu_clamp_shared[0]) == (10.0, 3.0)


def test_yarn_may_be_absent() -> None:
    assert read(rope__scaling__type=None).yarn is None
    assert read(rope__scaling__type="none").yarn is None
    assert read().yarn == Yarn(16.0, 65536, 32.0, 1.0)


def test_the_vocabulary_may_be_counted() -> None:
    tokens = tuple(str(number) for number in range(300))
    assert read(vocab_size=None, tokenizer__ggml__tokens=tokens).vocab == 300


def test_other_sizes_are_as_good() -> None:
    config = read(
        embedding_length=48, expert_count=8, attention__head_count=4, attention__output_group_count=2
    )
    assert config == dataclasses.replace(FLASH, hidden=48, experts=8, heads=4, o_groups=2)


REQUIRED = sorted(
    key
    for key in flash_metadata()
    if key
    not in {
        "general.name",
        "deepseek4.attention.head_count_kv",
        "deepseek4.attention.value_length",
        "deepseek4.rope.freq_base",
        "deepseek4.rope.scaling.type",
        "deepseek4.rope.scaling.yarn_beta_fast",
        "deepseek4.rope.scaling.yarn_beta_slow",
        "deepseek4.expert_gating_func",
        "deepseek4.expert_weights_scale",
        "deepseek4.nextn_predict_layers",
    }
)


@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_key_is_named_with_its_file(key: str) -> None:
    metadata = flash_metadata()
    del metadata[key]
    with pytest.raises(ModelFileError) as caught:
        ModelConfig.from_metadata(metadata, SOURCE)
    assert SOURCE in caught.value.message
    assert key in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize("value", ["text", (1, 2), -1, 1 << 60, float("nan"), float("inf"), {}, None])
@pytest.mark.parametrize("key", REQUIRED)
def test_a_value_of_no_sense_is_refused_by_key(key: str, value: object) -> None:
    metadata = {**flash_metadata(), key: value}
    with pytest.raises(ModelFileError, match=key.replace(".", r"\.")):
        ModelConfig.from_metadata(metadata, SOURCE)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"general__architecture": "llama"}, "general.architecture"),
        ({"attention__head_count_kv": 8}, "attention.head_count_kv"),
        ({"attention__value_length": 128}, "attention.value_length"),
        ({"attention__output_group_count": 7}, "attention.output_group_count"),
        ({"attention__compress_ratios": (0, 4)}, "attention.compress_ratios"),
        ({"attention__compress_ratios": (1,) * 43}, "attention.compress_ratios"),
        ({"attention__compress_ratios": (4.0,) * 43}, "attention.compress_ratios"),
        ({"attention__compress_ratios": ("4",) * 43}, "attention.compress_ratios"),
        ({"rope__dimension_count": 63}, "rope.dimension_count"),
        ({"rope__dimension_count": 514}, "rope.dimension_count"),
        ({"attention__indexer__key_length": 32}, "attention.indexer.key_length"),
        ({"rope__scaling__type": "linear"}, "rope.scaling.type"),
        ({"rope__scaling__yarn_beta_slow": 33.0}, "rope.scaling.yarn_beta_slow"),
        ({"expert_gating_func": 2}, "expert_gating_func"),
        ({"expert_group_count": 8}, "expert_group_count"),
        ({"expert_used_count": 257}, "expert_used_count"),
        ({"hash_layer_count": 44}, "hash_layer_count"),
        ({"swiglu_clamp_exp": (10.0,) * 42}, "swiglu_clamp_exp"),
        ({"swiglu_clamp_exp": (0.0,) * 43}, "swiglu_clamp_exp"),
        ({"swiglu_clamp_shexp": (10.0,)}, "swiglu_clamp_shexp"),
        ({"tokenizer__ggml__tokens": ("a", "b")}, "vocab_size"),
        ({"tokenizer__ggml__eos_token_id": 129280}, "tokenizer.ggml.eos_token_id"),
        ({"tokenizer__ggml__eos_token_id": 0}, "tokenizer.ggml.eos_token_id"),
    ],
)
def test_contradictions_are_refused_by_key(changes: dict[str, object], key: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        read(**changes)
    assert key in caught.value.message
    assert SOURCE in caught.value.message


def test_messages_stay_short_whatever_the_value() -> None:
    with pytest.raises(ModelFileError) as caught:
        read(embedding_length="x" * 100_000)
    assert len(str(caught.value)) < 500
