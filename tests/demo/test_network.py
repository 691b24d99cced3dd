"""The training forward pass against transformers, which nobody here wrote."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import DeepseekV4ForCausalLM

from demo.architecture import hf_config
from demo.layout import Batch
from demo.network import Mode, logits_of, run
from worker.gguf.presets import TINY
from worker.model.config import ModelConfig

SMALL = replace(TINY, compress_ratios=(0, 4, 128, 4), index_heads=16, index_dim=16, index_top_k=20)


def random_network(config: ModelConfig, seed: int) -> DeepseekV4ForCausalLM:
    """Every parameter and buffer random, so that no term of the formulas is switched off."""
    torch.manual_seed(seed)
    network = DeepseekV4ForCausalLM(hf_config(config)).float().eval()
    with torch.no_grad():
        for name, tensor in network.state_dict().items():
            if name.endswith("tid2eid"):
                order = torch.rand(config.vocab, config.experts).argsort(-1)
                tensor.copy_(order[:, : config.experts_used])
            elif name.endswith(("norm.weight", "layernorm.weight", "scale")):
                tensor.uniform_(0.5, 1.5)
            elif tensor.dim() >= 2:
                tensor.normal_(0, tensor.shape[-1] ** -0.5 * 1.5)
            else:
                tensor.normal_(0, 0.5)
    return network


def packed(config: ModelConfig, lengths: list[int], seed: int) -> Batch:
    """One row of documents of these lengths (multiples of 128)."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    ids = torch.randint(0, config.vocab, (1, total), generator=generator)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    documents = torch.cat([torch.full((length,), number) for number, length in enumerate(lengths)])[None]
    return Batch(ids, positions, documents, ids.roll(-1, 1), torch.ones(1, total))


def stacked(one: Batch, other: Batch) -> Batch:
    """The rows of both."""
    return Batch(
        *(torch.cat((getattr(one, name), getattr(other, name))) for name in one.__dataclass_fields__)
    )


def test_agrees_with_transformers() -> None:
    network = random_network(SMALL, 1)
    batch = packed(SMALL, [640], 2)
    with torch.no_grad():
        expected = network(input_ids=batch.ids, use_cache=False).logits[0]
        weights = network.state_dict()
        found = logits_of(weights, run(weights, SMALL, batch, Mode()).hidden, torch.float32)
    torch.testing.assert_close(found, expected, rtol=0, atol=3e-5)


def test_documents_of_a_row_do_not_see_each_other() -> None:
    network = random_network(SMALL, 3)
    weights = network.state_dict()
    both = packed(SMALL, [256, 384], 4)
    with torch.no_grad():
        joint = run(weights, SMALL, both, Mode()).hidden
        for begin, end in ((0, 256), (256, 640)):
            alone = network.model(input_ids=both.ids[:, begin:end], use_cache=False).last_hidden_state[0]
            torch.testing.assert_close(joint[begin:end], alone, rtol=0, atol=3e-5)


def test_rows_of_a_batch_do_not_see_each_other() -> None:
    network = random_network(SMALL, 11)
    weights = network.state_dict()
    one, other = packed(SMALL, [384], 12), packed(SMALL, [128, 256], 13)
    with torch.no_grad():
        joint = run(weights, SMALL, stacked(one, other), Mode()).hidden
        alone = torch.cat([run(weights, SMALL, batch, Mode()).hidden for batch in (one, other)])
    torch.testing.assert_close(joint, alone, rtol=0, atol=2e-5)


def test_selection_matters() -> None:
    """640 tokens make 160 entries, of which 20 are kept: attending to all gives another result."""
    network = random_network(SMALL, 5)
    batch = packed(SMALL, [640], 6)
    with torch.no_grad():
        weights = network.state_dict()
        sparse = run(weights, SMALL, batch, Mode()).hidden
        dense = run(weights, SMALL, batch, Mode(select=False)).hidden
    assert (sparse[:80] - dense[:80]).abs().max() < 1e-5
    assert (sparse[320:] - dense[320:]).abs().max() > 1e-2


@pytest.mark.parametrize("select", [True, False])
def test_index_loss_reaches_the_indexer_alone(select: bool) -> None:
    network = random_network(SMALL, 7)
    weights = dict(network.state_dict()) | dict(network.named_parameters())
    result = run(weights, SMALL, packed(SMALL, [256], 8), Mode(select=select))
    torch.stack(result.index_losses).sum().backward()  # type: ignore[no-untyped-call]
    for name, parameter in network.named_parameters():
        touched = parameter.grad is not None and bool(parameter.grad.abs().max() > 0)
        assert touched == (".indexer." in name), name


def test_gradients_agree_with_transformers() -> None:
    network = random_network(SMALL, 9)
    batch = packed(SMALL, [256], 10)
    loss = network(input_ids=batch.ids, use_cache=False).logits.square().mean()
    names, parameters = zip(*network.named_parameters(), strict=True)
    expected = torch.autograd.grad(loss, parameters, allow_unused=True)
    weights = dict(network.state_dict()) | dict(network.named_parameters())
    found_loss = logits_of(weights, run(weights, SMALL, batch, Mode()).hidden, torch.float32).square().mean()
    found = torch.autograd.grad(found_loss, parameters, allow_unused=True)
    for name, one, other in zip(names, found, expected, strict=True):
        if other is None or not other.abs().max():
            assert one is None or not one.abs().max(), name
        else:
            assert one is not None, name
            scale = float(other.abs().max())
            assert float((one - other).abs().max()) < 2e-3 * scale, name
