"""The drafter's forward pass: what each row sees, where it stands, and what its losses are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from support.drafting import DRAFTER, MODEL, random_drafter, small_base, text
from torch import Tensor

from demo.drafter.base import Base
from demo.drafter.blocks import Blocks, blocks_at
from demo.drafter.design import drafter_formats
from demo.drafter.losses import distances, losses_of
from demo.drafter.network import Drafts, attend_block, draft
from demo.drafter.outputs import Outputs, own_outputs
from demo.network import Mode
from demo.working import Working

ANCHORS = torch.tensor([70, 127, 200, 350])


@pytest.fixture(scope="module")
def base() -> Base:
    return small_base(1)


@pytest.fixture(scope="module")
def outputs(base: Base) -> Outputs:
    return own_outputs(base, text([128, 256], 2), DRAFTER.target_layers, 0.0, 1, 0)


def drafted(
    base: Base, outputs: Outputs, weights: dict[str, Tensor], anchors: Tensor = ANCHORS
) -> tuple[Drafts, Blocks]:
    blocks = blocks_at(outputs, anchors, DRAFTER.block, MODEL.window)
    return draft(weights, DRAFTER, base, outputs, blocks, Mode()), blocks


def test_attention_agrees_with_torch_s_own() -> None:
    """A sink is a key of logit ``sink`` whose value is zero."""
    torch.manual_seed(0)
    blocks, block, window, heads, dim = 3, 5, 7, 4, 16
    q, own = torch.randn(blocks * block, heads, dim), torch.randn(blocks * block, dim)
    context, sinks = torch.randn(40, dim), torch.randn(heads)
    index, visible = torch.randint(0, 40, (blocks, window)), torch.rand(blocks, window) < 0.6
    found = attend_block(q, context, own, index, visible, sinks)
    for number in range(blocks):
        rows = slice(number * block, (number + 1) * block)
        keys = torch.cat((context[index[number][visible[number]]], own[rows], torch.zeros(1, dim)))
        bias = torch.zeros(heads, block, len(keys))
        bias[:, :, -1] = sinks[:, None]
        shared = keys.expand(heads, -1, -1)
        expected = F.scaled_dot_product_attention(q[rows].transpose(0, 1), shared, shared, attn_mask=bias)
        torch.testing.assert_close(found[rows], expected.transpose(0, 1), rtol=1e-5, atol=1e-5)


def test_a_block_reads_the_taps_of_its_window_and_no_others(base: Base, outputs: Outputs) -> None:
    weights = random_drafter(3)
    for number, anchor in enumerate(ANCHORS.tolist()):
        begin = 0 if anchor < 128 else 128
        for row in (0, DRAFTER.block - 1):
            taps = outputs.taps.clone().requires_grad_()
            drafts, _ = drafted(base, replace(outputs, taps=taps), weights)
            (gradient,) = torch.autograd.grad(drafts.logits[number, row].square().sum(), taps)
            read = gradient.abs().sum(-1).nonzero().squeeze(-1).tolist()
            assert read == list(range(max(begin, anchor - MODEL.window), anchor))


def test_every_row_depends_on_the_anchor_and_only_through_the_markov_head_on_the_tokens_before(
    base: Base, outputs: Outputs
) -> None:
    weights = random_drafter(4)
    blocks = blocks_at(outputs, ANCHORS, DRAFTER.block, MODEL.window)
    plain = draft(weights, DRAFTER, base, outputs, blocks, Mode()).logits
    before = blocks.before.clone()
    before[:, 2] = (before[:, 2] + 5) % MODEL.vocab
    changed = draft(weights, DRAFTER, base, outputs, replace(blocks, before=before), Mode()).logits
    assert [bool((changed[:, row] != plain[:, row]).any()) for row in range(5)] == [
        row == 2 for row in range(5)
    ]
    bias = weights["markov_w1"] @ weights["markov_w2"].T
    torch.testing.assert_close(
        changed[:, 2] - plain[:, 2], bias[before[:, 2]] - bias[blocks.before[:, 2]], rtol=1e-3, atol=1e-4
    )
    before = blocks.before.clone()
    before[:, 0] = (before[:, 0] + 5) % MODEL.vocab
    changed = draft(weights, DRAFTER, base, outputs, replace(blocks, before=before), Mode()).logits
    assert ((changed - plain).abs().amax((0, 2)) > 1e-3).all()


def test_blocks_do_not_depend_on_each_other(base: Base, outputs: Outputs) -> None:
    weights = random_drafter(5)
    together, _ = drafted(base, outputs, weights)
    for number in range(len(ANCHORS)):
        alone, _ = drafted(base, outputs, weights, ANCHORS[number : number + 1])
        torch.testing.assert_close(alone.logits[0], together.logits[number], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(alone.confidence[0], together.confidence[number], rtol=1e-4, atol=1e-4)


def test_only_distances_matter_and_they_do(base: Base, outputs: Outputs) -> None:
    """The same text 64 positions on drafts the same; a block one position off does not."""
    weights = random_drafter(6)
    anchors = torch.tensor([300])
    found, blocks = drafted(base, outputs, weights, anchors)
    later = replace(outputs.batch, positions=outputs.batch.positions + 64)
    moved = draft(weights, DRAFTER, base, replace(outputs, batch=later), blocks, Mode())
    torch.testing.assert_close(moved.logits, found.logits, rtol=1e-3, atol=1e-3)
    nearer = outputs.batch.positions.clone()
    nearer[0, 300] += 1
    shifted = draft(
        weights,
        DRAFTER,
        base,
        replace(outputs, batch=replace(outputs.batch, positions=nearer)),
        blocks,
        Mode(),
    )
    assert (shifted.logits - found.logits).abs().max() > 1e-2


def test_distances_are_torch_s() -> None:
    torch.manual_seed(1)
    logits, goal = torch.randn(6, 50), torch.randn(6, 50).softmax(-1)
    wanted = torch.randint(0, 50, (6,))
    token, distance = distances(logits, goal, wanted)
    torch.testing.assert_close(token, F.cross_entropy(logits, wanted, reduction="none"))
    p = torch.distributions.Categorical(logits=logits).probs
    torch.testing.assert_close(distance, torch.cdist(p[:, None], goal[:, None], p=1).flatten())


def test_rows_that_do_not_count_have_no_part_in_the_loss(base: Base, outputs: Outputs) -> None:
    drafts, blocks = drafted(base, outputs, random_drafter(7))
    weights = torch.zeros_like(blocks.weights)
    weights[0, :2] = torch.tensor([1.0, 0.5])
    blocks = replace(blocks, weights=weights)
    logits = drafts.logits.detach().clone().requires_grad_()
    confidence = drafts.confidence.detach().clone().requires_grad_()
    losses = losses_of(replace(drafts, logits=logits, confidence=confidence), outputs, blocks, base)
    losses.total.backward()
    assert logits.grad is not None
    assert confidence.grad is not None
    assert torch.equal(logits.grad.abs().sum(-1) > 0, weights > 0)
    assert torch.equal(confidence.grad != 0, weights > 0)


def test_narrow_products_give_nearly_the_same_and_gradients_everywhere(base: Base, outputs: Outputs) -> None:
    """The GPU's working type, on the CPU."""
    wide = random_drafter(8)
    expected, _ = drafted(base, outputs, wide)
    masters = {name: each for name, each in wide.items() if each.requires_grad}
    biases = {name: each for name, each in wide.items() if not each.requires_grad}
    working = Working(masters, biases, drafter_formats(DRAFTER, MODEL), torch.bfloat16)
    working.refresh(quantized=True)
    narrow = small_base(1, torch.bfloat16)
    said = own_outputs(narrow, outputs.batch, DRAFTER.target_layers, 1.0, 2, 5)
    assert said.taps.dtype == torch.float32
    blocks = blocks_at(outputs, ANCHORS, DRAFTER.block, MODEL.window)
    found = draft(working.weights(), DRAFTER, narrow, outputs, blocks, Mode(torch.bfloat16, rounding=True))
    error = (found.logits - expected.logits).square().mean() / expected.logits.square().mean()
    assert error.sqrt() < 0.1
    losses_of(found, outputs, blocks, narrow).total.backward()
    working.collect_gradients()
    without = [name for name, master in working.masters.items() if master.grad is None]
    assert not without
