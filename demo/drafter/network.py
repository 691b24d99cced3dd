"""The drafter's forward pass for training: all blocks of a batch at once, given the model's own tokens.

A stage's context keys come from the taps of processed tokens, its block's keys from the block itself; every
row of a block sees the whole window before the anchor and the whole block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from demo.drafter.base import Base
from demo.drafter.blocks import Blocks
from demo.drafter.outputs import Outputs
from demo.network import Layer, Mode, head_streams, leave, norm
from demo.rotary import Angles, Rotary
from worker.gguf.drafter import DrafterConfig


@dataclass(frozen=True)
class Drafts:
    """What A blocks of K rows say.

    Attributes:
        logits: float32 ``[A, K, V]``, each given the token before it.
        confidence: float32 ``[A, K]``, logits.
        loads: by stage float32 ``[E]``, each expert's share of the assignments.
    """

    logits: Tensor
    confidence: Tensor
    loads: dict[int, Tensor]


def draft(
    weights: Mapping[str, Tensor],
    config: DrafterConfig,
    base: Base,
    outputs: Outputs,
    blocks: Blocks,
    mode: Mode,
) -> Drafts:
    """Runs the blocks.

    Args:
        weights: the drafter's; large matrices in ``mode.dtype``.
        config: its sizes.
        base: the model, whose embedding and head it shares.
        outputs: the text and its taps.
        blocks: of that text.
        mode: precision and roundings.
    """
    model = config.stages_of(base.config)
    positions = outputs.batch.positions.flatten()
    steps = torch.arange(config.block, device=positions.device)
    block_angles = Rotary.of(model, (positions[blocks.anchors][:, None] + steps).flatten()).main
    context_angles = Rotary.of(model, positions).main
    taps = F.linear(outputs.taps.to(mode.dtype), weights["main_proj.weight"])
    context = norm(taps, weights["main_norm.weight"], model.rms_eps)
    ids = torch.full_like(blocks.before, config.noise_token)
    ids[:, 0] = blocks.before[:, 0]
    streams = F.embedding(ids.flatten(), base.embedding).float()
    streams = streams.unsqueeze(1).expand(-1, model.streams, -1).contiguous()
    loads: dict[int, Tensor] = {}
    for stage in range(config.stages):
        layer = Layer(weights, model, stage, mode)
        keys = layer.keys(context, context_angles)
        streams = _attention(layer, streams, keys, blocks, block_angles)
        streams = layer.experts(streams, ids.flatten(), loads)
    hidden = head_streams(weights, model, streams).view(*ids.shape, -1)
    before = F.embedding(blocks.before, weights["markov_w1"])
    plain = norm(hidden, weights["model.norm.weight"], model.rms_eps).to(mode.dtype)
    bias = F.linear(before.to(mode.dtype), weights["markov_w2"].to(mode.dtype))
    logits = F.linear(plain, base.head.to(mode.dtype)).float() + bias.float()
    confidence = F.linear(torch.cat((hidden, before), -1), weights["confidence"]).squeeze(-1)
    return Drafts(logits, confidence, loads)


def _attention(layer: Layer, streams: Tensor, context: Tensor, blocks: Blocks, angles: Angles) -> Tensor:
    """The streams after a stage's attention; ``context`` is ``[N, D]``, the batch's keys."""
    h, post, comb = layer.enter(streams, "attn_hc", "input_layernorm.weight")
    q, own = layer.queries(h, angles), layer.keys(h, angles)
    out = attend_block(q, context, own, blocks.context, blocks.visible, layer.w("self_attn.sinks"))
    return leave(streams, layer.project(out, angles), post, comb)


def attend_block(
    q: Tensor, context: Tensor, own: Tensor, index: Tensor, visible: Tensor, sinks: Tensor
) -> Tensor:
    """Attention of all rows of each block to its window and to the whole block.

    Args:
        q: ``[A·K, H, D]``.
        context: ``[N, D]``, keys and values at once.
        own: ``[A·K, D]``, the blocks' own.
        index: int64 ``[A, W]`` into ``context``.
        visible: bool ``[A, W]``.
        sinks: float32 ``[H]``.

    Returns:
        ``[A·K, H, D]``, before the inverse rotation.
    """
    count, window = index.shape
    rows, heads, dim = q.shape
    block = rows // count
    # The gradients of a key, which many windows hold, are summed in float32.
    near = context.float().index_select(0, index.flatten()).view(count, window, dim).to(q.dtype)
    keys = torch.cat((near, own.view(count, block, dim)), 1)
    logits = (q.view(count, block * heads, dim) * dim**-0.5) @ keys.transpose(1, 2)
    hidden = F.pad(~visible, (0, block))
    masked = logits.float().masked_fill(hidden[:, None, :], float("-inf"))
    sink = sinks.float().repeat(block).view(1, -1, 1).expand(count, -1, -1)
    p = torch.softmax(torch.cat((masked, sink), -1), -1)[..., :-1]
    return (p.to(keys.dtype) @ keys).view(rows, heads, dim)
