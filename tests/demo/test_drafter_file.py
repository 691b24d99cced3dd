"""The drafter's file: what was trained comes back, in the published layout, and nothing else is accepted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from support.drafting import DRAFTER, MODEL, random_drafter, small_base, text
from torch import Tensor

from demo.architecture import DEMO_MODEL
from demo.drafter.base import SHIPPED, Base, load_base, read_tensor
from demo.drafter.blocks import blocks_at
from demo.drafter.design import demo_drafter, drafter_formats, new_drafter
from demo.drafter.export import export
from demo.drafter.infer import Drafter
from demo.drafter.network import draft
from demo.drafter.outputs import own_outputs
from demo.names import sources
from demo.network import Mode
from demo.vocabulary import load as load_tokenizer
from worker.errors import ModelFileError
from worker.gguf.drafter import ARCHITECTURE, DrafterConfig, drafter_tensors, open_drafter
from worker.gguf.presets import FLASH
from worker.model.config import ModelConfig

STAGE = {
    "Q8_0": "attn_q_a attn_q_b attn_kv attn_output_a attn_output_b ffn_gate_shexp ffn_up_shexp "
    "ffn_down_shexp",
    "F32": "attn_q_a_norm attn_kv_a_norm attn_sinks attn_norm ffn_norm hc_attn_fn hc_attn_base hc_attn_scale "
    "hc_ffn_fn hc_ffn_base hc_ffn_scale ffn_gate_inp",
}
HEADS = {
    "Q8_0": "main_proj markov_w2",
    "F16": "markov_w1",
    "F32": "main_norm conf_proj hc_head_fn hc_head_base hc_head_scale norm",
}
"""By the published layout, apart from the routed experts, whose type is the converter's choice."""


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    return random_drafter(1)


@pytest.fixture(scope="module")
def path(weights: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("drafter") / "drafter.gguf"
    export(weights, DRAFTER, MODEL, file)
    return file


def as_read(path: Path, config: DrafterConfig, model: ModelConfig) -> dict[str, Tensor]:
    """Parameters and biases as ``gguf`` reads them."""
    held = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    found = dict(zip(("weights", "biases"), new_drafter(config, model, 0), strict=True))
    weights = {name: each.detach() for part in found.values() for name, each in part.items()}
    for source, _ in drafter_formats(config, model):
        tensor = held[source.spec.name]
        values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        source.of(weights).copy_(values.reshape(source.spec.shape))
    return weights


def test_the_gguf_package_reads_what_was_trained(path: Path, weights: dict[str, Tensor]) -> None:
    found = as_read(path, DRAFTER, MODEL)
    assert found.keys() == weights.keys()
    for name, tensor in weights.items():
        tolerance = 0.01 * float(tensor.detach().abs().max())
        torch.testing.assert_close(found[name], tensor.detach(), rtol=0, atol=tolerance)
    for name in (
        "model.layers.1.attn_hc.fn",
        "model.layers.0.mlp.gate.weight",
        "confidence",
        "main_norm.weight",
    ):
        assert torch.equal(found[name], weights[name]), name
    assert torch.equal(found["markov_w1"], weights["markov_w1"].half().float())


def test_our_reader_and_the_gguf_package_agree(path: Path) -> None:
    file, config = open_drafter(path, MODEL)
    assert config == DRAFTER
    for tensor in GGUFReader(path).tensors:
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        found = read_tensor(file, tensor.name)
        assert torch.equal(found.flatten(), torch.from_numpy(expected.copy()).flatten()), tensor.name


def test_names_types_and_metadata_are_the_published_layout_s(path: Path) -> None:
    reader = GGUFReader(path)
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    expected = {
        f"dspark.{stage}.{name}.weight": kind
        for stage in range(DRAFTER.stages)
        for kind, names in STAGE.items()
        for name in names.split()
    }
    expected |= {f"dspark.{stage}.exp_probs_b.bias": "F32" for stage in range(DRAFTER.stages)}
    expected |= {f"dspark.{name}.weight": kind for kind, names in HEADS.items() for name in names.split()}
    experts = {name: kind for name, kind in types.items() if "_exps." in name}
    assert {name: kind for name, kind in types.items() if name not in experts} == expected
    assert len(experts) == 3 * DRAFTER.stages
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.architecture"] == "deepseek4-dspark"
    assert fields["deepseek4.dspark.layer_count"] == DRAFTER.stages
    assert fields["deepseek4.dspark.block_size"] == DRAFTER.block
    assert fields["deepseek4.dspark.markov_rank"] == DRAFTER.markov_rank
    assert fields["deepseek4.dspark.noise_token_id"] == DRAFTER.noise_token
    assert fields["deepseek4.dspark.expert_count"] == DRAFTER.experts
    assert fields["deepseek4.dspark.target_layers"] == list(DRAFTER.target_layers)


def test_flash_s_drafter_would_have_the_published_shapes() -> None:
    config = DrafterConfig(3, 5, 256, 128799, (40, 41, 42), 256)
    shapes = {spec.name: spec.shape for spec in drafter_tensors(config, FLASH)}
    assert shapes["dspark.main_proj.weight"] == (4096, 12288)
    assert shapes["dspark.conf_proj.weight"] == (1, 4352)
    assert shapes["dspark.markov_w1.weight"] == (129280, 256)
    assert shapes["dspark.2.attn_q_b.weight"] == (32768, 1024)
    assert shapes["dspark.0.attn_output_a.weight"] == (8192, 4096)
    assert shapes["dspark.1.hc_ffn_fn.weight"] == (24, 16384)
    assert shapes["dspark.0.ffn_down_exps.weight"] == (256, 4096, 2048)
    assert len(shapes) == 3 * 24 + 9


def test_the_demo_s_drafter_is_small_and_its_noise_a_token_nobody_says(tmp_path: Path) -> None:
    config = demo_drafter()
    assert load_tokenizer().id_to_token(config.noise_token) == "<｜place▁holder▁for▁copy｜>"
    weights, biases = new_drafter(config, DEMO_MODEL, 1)
    export(weights | biases, config, DEMO_MODEL, tmp_path / "demo.gguf")
    assert (tmp_path / "demo.gguf").stat().st_size < 5_500_000
    assert open_drafter(tmp_path / "demo.gguf", DEMO_MODEL)[1] == config


def test_the_file_drafts_what_its_network_drafts(path: Path) -> None:
    """Two implementations that share no code: the training's, and the plain one that reads the file."""
    base = small_base(2)
    outputs = own_outputs(base, text([128, 256], 3), DRAFTER.target_layers, 0.0, 1, 0)
    anchors = torch.tensor([0, 1, 70, 127, 128, 200, 300, 350])
    blocks = blocks_at(outputs, anchors, DRAFTER.block, MODEL.window)
    ids, positions = outputs.batch.ids.flatten(), outputs.batch.positions.flatten()
    drafter = Drafter.load(path, base)
    context = drafter.context(outputs.taps, positions)
    block = drafter.draft(ids[anchors], positions[anchors], context, blocks.context, blocks.visible)
    assert len(block.tokens.unique()) > 10
    before = torch.cat((ids[anchors][:, None], block.tokens[:, :-1]), 1)
    read = as_read(path, DRAFTER, MODEL)
    with torch.no_grad():
        found = draft(read, DRAFTER, base, outputs, replace(blocks, before=before), Mode(rounding=True))
    torch.testing.assert_close(found.confidence.sigmoid(), block.confidence, rtol=0, atol=2e-3)
    best = found.logits.max(-1).values
    taken = found.logits.gather(-1, block.tokens.unsqueeze(-1)).squeeze(-1)
    assert (best - taken).max() < 0.02 * found.logits.std()


def test_the_shipped_model_is_read_as_the_gguf_package_reads_it() -> None:
    base: Base = load_base(SHIPPED, torch.float32, torch.device("cpu"))
    held = {tensor.name: tensor for tensor in GGUFReader(SHIPPED).tensors}
    for source in sources(base.config):
        tensor = held[source.spec.name]
        if tensor.tensor_type == GGMLQuantizationType.I32:
            expected = torch.from_numpy(tensor.data.copy())
        else:
            expected = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        found = source.of(base.weights)
        assert torch.equal(found.flatten(), expected.to(found.dtype).flatten()), source.spec.name


def rewritten(
    path: Path, to: Path, *, architecture: str = ARCHITECTURE, skip: str = "", extra: str = ""
) -> Path:
    """The file with something else about it."""
    reader, writer = GGUFReader(path), GGUFWriter(to, architecture)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", skip):
            kind, *inner = field.types
            writer.add_key_value(name, field.contents(), kind, sub_type=inner[-1] if inner else None)
    for tensor in reader.tensors:
        if tensor.name != skip:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    if extra:
        writer.add_tensor(extra, torch.zeros(4).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return to


def refused(path: Path, model: ModelConfig = MODEL) -> str:
    with pytest.raises(ModelFileError) as caught:
        open_drafter(path, model)
    assert str(path) in caught.value.message
    assert caught.value.hint
    return caught.value.message


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"architecture": "deepseek4"}, "'deepseek4', expected 'deepseek4-dspark'"),
        ({"skip": "dspark.markov_w2.weight"}, "dspark.markov_w2.weight: missing"),
        ({"skip": "dspark.1.exp_probs_b.bias"}, "dspark.1.exp_probs_b.bias: missing"),
        ({"extra": "dspark.2.attn_norm.weight"}, "dspark.2.attn_norm.weight"),
        ({"extra": "mtp.0.norm.weight"}, "mtp.0.norm.weight"),
        ({"skip": "deepseek4.dspark.block_size"}, "deepseek4.dspark.block_size is missing"),
        ({"skip": "deepseek4.dspark.target_layers"}, "deepseek4.dspark.target_layers is missing"),
    ],
)
def test_a_file_with_something_wrong_is_refused(
    path: Path, tmp_path: Path, changes: dict[str, str], complaint: str
) -> None:
    assert complaint in refused(rewritten(path, tmp_path / "other.gguf", **changes))


def test_a_copy_without_changes_is_accepted(path: Path, tmp_path: Path) -> None:
    assert open_drafter(rewritten(path, tmp_path / "same.gguf"), MODEL)[1] == DRAFTER


@pytest.mark.parametrize(
    ("model", "complaint"),
    [
        (replace(MODEL, layers=2), "target_layers"),
        (replace(MODEL, hidden=512), "expected shape"),
        (replace(MODEL, vocab=2000), "noise_token_id"),
        (replace(MODEL, experts_used=4), "expert_count"),
    ],
)
def test_another_model_s_drafter_is_refused(path: Path, model: ModelConfig, complaint: str) -> None:
    assert complaint in refused(path, model)


@pytest.mark.parametrize("layers", [(2, 1), (1, 1)])
def test_tapped_layers_ascend(tmp_path: Path, layers: tuple[int, ...]) -> None:
    file = tmp_path / "order.gguf"
    export(random_drafter(1), replace(DRAFTER, target_layers=layers), MODEL, file)
    assert "expected ascending" in refused(file)
