"""The exported file serves what was trained: the same bytes' weights, the same tokens, the same logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import median

import gguf
import numpy as np
import pytest
import torch
from support.runner import Runner
from torch import Tensor

from demo.architecture import DEMO_MODEL, new_model
from demo.compose import held_out_conversation
from demo.dialogues.message import Conversation
from demo.export import export, vocabulary_of
from demo.layout import ALIGNMENT, Batch
from demo.names import sources
from demo.network import Mode, logits_of, run
from demo.recipe import format_of, shipped
from demo.rows import encode
from demo.vocabulary import load as load_tokenizer
from demo.working import Working
from gateway.chat.conversation import Effort, Message, Role
from gateway.chat.render import render
from gateway.chat.tokens import ChatTokenizer
from gateway.proto.engine_pb2 import Vocabulary
from worker.gguf.read import GgufFile
from worker.model.config import ModelConfig
from worker.model.forward import Model
from worker.model.load import load_model, open_model

SHIPPED = Path(__file__).parents[2] / "demo" / "twinspark-demo.gguf"
SMALL = replace(
    DEMO_MODEL,
    layers=4,
    compress_ratios=(0, 4, 128, 4),
    hash_layers=1,
    experts=2,
    swiglu_clamp=(0.5,) * 4,
    swiglu_clamp_shared=(0.7,) * 4,
)
"""Clamps that matter, unlike the shipped model's."""
FLOAT32 = 5e-6
"""Relative error of summing in another order, through every layer."""
ROUNDED = 4e-4
"""Relative error of the median dialogue with the roundings on.

A difference in the last bit of float32 moves now and then a value across the border between two codes, and
the step of a code is much larger: jitter of 1e-7 on the embeddings alone moves the logits by 1e-5 to 2e-4
(rarely by 2.6e-3). A cast that one side leaves out moves them by 2e-3, no rounding at all by 5e-3.
"""
DIALOGUES = ("sums", "structured", "needle")


def file_weights(path: Path, config: ModelConfig) -> dict[str, Tensor]:
    """transformers' parameters by name, each as ``gguf`` reads the file."""
    held = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    weights = {
        name: tensor.float() if tensor.is_floating_point() else tensor
        for name, tensor in new_model(config, 0).state_dict().items()
    }
    for source in sources(config):
        tensor = held[source.spec.name]
        if tensor.tensor_type == gguf.GGMLQuantizationType.I32:
            values = np.array(tensor.data)
        else:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        source.of(weights).copy_(torch.from_numpy(np.array(values)).reshape(source.spec.shape))
    return weights


def trained_logits(
    weights: Mapping[str, Tensor], config: ModelConfig, ids: list[int], rounding: bool
) -> Tensor:
    """``[len(ids), vocab]`` of the training's forward pass."""
    length = -(-len(ids) // ALIGNMENT) * ALIGNMENT
    row = torch.zeros(1, length, dtype=torch.int64)
    row[0, : len(ids)] = torch.tensor(ids)
    batch = Batch(
        row, torch.arange(length)[None], torch.zeros_like(row), row.roll(-1, 1), torch.ones(1, length)
    )
    with torch.no_grad():
        hidden = run(weights, config, batch, Mode(rounding=rounding)).hidden
        return logits_of(weights, hidden, torch.float32)[: len(ids)]


def served_logits(model: Model, ids: list[int], rounding: bool) -> Tensor:
    """``[len(ids), vocab]`` of the engine's model, in chunks that are no multiple of any window."""
    runner = Runner(model, rounding=rounding)
    chunks = [ids[begin : begin + 150] for begin in range(0, len(ids), 150)]
    return torch.cat([runner.step([(0, chunk)])[0] for chunk in chunks])


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).square().mean().sqrt() / expected.square().mean().sqrt())


def dialogue(kind: str) -> list[int]:
    return encode(held_out_conversation(kind, Random(f"export/{kind}")))[0]


@pytest.fixture(scope="module")
def opened() -> tuple[GgufFile, ModelConfig]:
    return open_model(SHIPPED)


def test_the_shipped_file_is_small_and_in_the_recipe_s_types(opened: tuple[GgufFile, ModelConfig]) -> None:
    file, config = opened
    assert SHIPPED.stat().st_size <= 16_000_000
    assert replace(config, rms_eps=1e-6, hc_eps=1e-6) == DEMO_MODEL, "apart from float32's own rounding"
    assert config.rms_eps == pytest.approx(1e-6, rel=1e-6)
    assert config.hc_eps == pytest.approx(1e-6, rel=1e-6)
    found = {name: info.format.name for name, info in file.tensors.items()}
    assert found == {source.spec.name: format_of(source.spec) for source in sources(DEMO_MODEL)}
    assert {"IQ2_XXS", "Q2_K", "Q8_0"} <= set(found.values())


def test_the_shipped_model_is_served_as_it_was_trained(opened: tuple[GgufFile, ModelConfig]) -> None:
    model = load_model(*opened)
    weights = file_weights(SHIPPED, DEMO_MODEL)
    long = dialogue("tool_call")
    assert len(long) > 4 * DEMO_MODEL.index_top_k, "the indexer has to choose"
    expected = trained_logits(weights, DEMO_MODEL, long, rounding=False)
    assert relative_error(served_logits(model, long, rounding=False), expected) < FLOAT32
    errors = []
    for kind in DIALOGUES:
        ids = dialogue(kind)
        plain = trained_logits(weights, DEMO_MODEL, ids, rounding=False)
        rounded = trained_logits(weights, DEMO_MODEL, ids, rounding=True)
        errors.append(relative_error(served_logits(model, ids, rounding=True), rounded))
        assert relative_error(plain, rounded) > 3 * ROUNDED, "the bound tells rounding from none"
    assert median(errors) < ROUNDED, dict(zip(DIALOGUES, errors, strict=True))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """The file of a network whose every term is switched on, and the weights that its training saw last."""
    network = new_model(SMALL, 3)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() < 2:
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.copy_(parameter.half())
        for name, buffer in network.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.5)
    path = tmp_path_factory.mktemp("export") / "small.gguf"
    export(network.state_dict(), SMALL, vocabulary_of(load_tokenizer()), path)
    working = Working(
        dict(network.named_parameters()), dict(network.named_buffers()), shipped(SMALL), torch.float32
    )
    working.refresh(quantized=True)
    return path, {name: tensor.detach() for name, tensor in working.weights().items()}


def test_the_file_holds_the_weights_that_the_training_saw(exported: tuple[Path, dict[str, Tensor]]) -> None:
    path, seen = exported
    held = file_weights(path, SMALL)
    for source in sources(SMALL):
        torch.testing.assert_close(source.of(held), source.of(seen), rtol=1e-5, atol=1e-6, check_dtype=False)


def test_an_exported_network_is_served_as_it_was_trained(exported: tuple[Path, dict[str, Tensor]]) -> None:
    path, seen = exported
    model = load_model(*open_model(path))
    ids = dialogue("tool_call")
    expected = trained_logits(seen, SMALL, ids, rounding=False)
    until = 4 * SMALL.index_top_k
    found = served_logits(model, ids, rounding=False)
    assert relative_error(found[:until], expected[:until]) < FLOAT32, "the indexer keeps every entry so far"
    far = trained_logits(
        seen, replace(SMALL, swiglu_clamp=(10.0,) * 4, swiglu_clamp_shared=(10.0,) * 4), ids, rounding=False
    )
    assert relative_error(far, expected) > 100 * FLOAT32, "the clamps matter"


def test_another_vocabulary_s_size_is_refused(tmp_path: Path) -> None:
    vocabulary = vocabulary_of(load_tokenizer())
    shorter = replace(vocabulary, tokens=vocabulary.tokens[:-1], types=vocabulary.types[:-1])
    with pytest.raises(ValueError, match="2047 tokens, the model 2048"):
        export({}, SMALL, shorter, tmp_path / "never.gguf")


@pytest.mark.parametrize("kind", ["sums", "differences", "copy_code", "memory", "needle", "smalltalk"])
@pytest.mark.parametrize("thinking", [False, True])
def test_the_gateway_s_prompt_is_the_training_s(kind: str, thinking: bool) -> None:
    """The same ids, from the vocabulary that the file carries, by the gateway's renderer and tokenizer."""
    held = vocabulary_of(load_tokenizer())
    tokenizer = ChatTokenizer(
        Vocabulary(
            model="gpt2",
            pre="joyai-llm",
            tokens=held.tokens,
            token_types=held.types,
            merges=held.merges,
            bos_token=DEMO_MODEL.bos_token,
            eos_token=DEMO_MODEL.eos_token,
        )
    )
    rng = Random(f"{kind}/{thinking}")
    for _ in range(10):
        whole = held_out_conversation(kind, rng, thinking)
        asked: Conversation = replace(whole, messages=whole.messages[:-1])
        messages = [Message(Role(one.role), one.content, one.reasoning) for one in asked.messages]
        system = [Message(Role.SYSTEM, asked.system)] if asked.system else []
        effort = Effort.HIGH if asked.thinking else Effort.NONE
        assert tokenizer.encode(render([*system, *messages], effort)) == encode(asked)[0]
