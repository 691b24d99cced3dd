"""Which tensors a file must hold, and what is said about one that does not."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from support.models import random_tensors, small_config

from kernels.quant.formats import FORMATS, BlockFormat
from worker.errors import ModelFileError
from worker.gguf.presets import TINY
from worker.gguf.read import GgufFile, TensorInfo, open_gguf
from worker.gguf.schema import Role, check_tensors, expected_tensors
from worker.gguf.synthetic import write_synthetic


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> GgufFile:
    path = tmp_path_factory.mktemp("schema") / "tiny.gguf"
    write_synthetic(path, TINY, "f32", seed=0)
    return open_gguf(path)


def with_tensors(file: GgufFile, tensors: Mapping[str, TensorInfo]) -> GgufFile:
    return dataclasses.replace(file, tensors=tensors)


def changed(file: GgufFile, name: str, **changes: object) -> GgufFile:
    info = dataclasses.replace(file.tensors[name], **changes)  # type: ignore[arg-type]
    return with_tensors(file, {**file.tensors, name: info})


def added(file: GgufFile, name: str) -> GgufFile:
    any_info = next(iter(file.tensors.values()))
    return with_tensors(file, {**file.tensors, name: dataclasses.replace(any_info, name=name)})


def refused(file: GgufFile) -> str:
    with pytest.raises(ModelFileError) as caught:
        check_tensors(file, TINY)
    assert str(file.path) in caught.value.message
    assert caught.value.hint
    return caught.value.message


def test_a_model_that_runs_has_these_tensors() -> None:
    config = small_config()
    specs = {spec.name: spec for spec in expected_tensors(config)}
    tensors = random_tensors(config, seed=0)
    assert {name: spec.shape for name, spec in specs.items()} == {
        name: tuple(value.shape) for name, value in tensors.items()
    }
    tables = {name for name, spec in specs.items() if spec.role is Role.TOKEN_TABLE}
    assert tables == {name for name, value in tensors.items() if value.dtype == torch.int32}


def test_a_written_file_fits(tiny: GgufFile) -> None:
    check_tensors(tiny, TINY)


@pytest.mark.parametrize("name", [spec.name for spec in expected_tensors(TINY)])
def test_a_missing_tensor_is_named(tiny: GgufFile, name: str) -> None:
    message = refused(with_tensors(tiny, {key: info for key, info in tiny.tensors.items() if key != name}))
    assert f"{name}: missing" in message
    assert str(list(tiny.tensors[name].shape)) in message


def test_a_wrong_shape_is_told_both_ways(tiny: GgufFile) -> None:
    message = refused(changed(tiny, "blk.1.attn_kv.weight", shape=(64, 32)))
    assert "blk.1.attn_kv.weight" in message
    assert "[32, 64]" in message
    assert "[64, 32]" in message
    assert tiny.path.name in message


@pytest.mark.parametrize(
    ("name", "fmt"),
    [
        ("blk.0.ffn_gate_tid2eid.weight", FORMATS["F32"]),
        ("blk.3.attn_q_a.weight", FORMATS["I32"]),
    ],
)
def test_integers_and_weights_do_not_stand_for_each_other(
    tiny: GgufFile, name: str, fmt: BlockFormat
) -> None:
    message = refused(changed(tiny, name, format=fmt))
    assert name in message
    assert fmt.name in message


@pytest.mark.parametrize("fmt", ["BF16", "F16", "Q8_0", "Q6_K", "MXFP4"])
def test_any_type_of_weights_will_do(tiny: GgufFile, fmt: str) -> None:
    check_tensors(changed(tiny, "blk.3.attn_q_a.weight", format=FORMATS[fmt]), TINY)


@pytest.mark.parametrize(
    "name", ["mtp.0.e_proj.weight", "blk.4.attn_q_a.weight", "blk.4.nextn.eh_proj.weight", "blk.17.x"]
)
def test_the_prediction_block_is_passed_over(tiny: GgufFile, name: str) -> None:
    check_tensors(added(tiny, name), TINY)


@pytest.mark.parametrize(
    "name",
    ["blk.3.attn_k.weight", "blk.0.attn_compressor_kv.weight", "rope_freqs.weight", "blk.x.y", "blk.03x"],
)
def test_a_surplus_tensor_is_named(tiny: GgufFile, name: str) -> None:
    assert name in refused(added(tiny, name))


def test_one_error_tells_of_several(tiny: GgufFile, tmp_path: Path) -> None:
    message = refused(with_tensors(tiny, {}))
    assert message.count("missing") == 5
    assert f"and {len(expected_tensors(TINY)) - 5} more" in message
