"""The model's forward pass for training, on transformers' parameters by their names.

It computes what ``transformers.models.deepseek_v4`` computes (a test holds both together), but in whole
batches of packed documents, with attention in blocks, every expert in one product, and the parts that
transformers leaves out: the served model's roundings, and a loss for the indexer, whose selection has no
gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from demo.attend import attend, entry_weights
from demo.fuse import fused
from demo.layout import Batch, Visibility, visibility
from demo.rotary import Angles, Rotary, rotate
from demo.rounding import round_keys, round_rows
from demo.sinkhorn import balance
from worker.model.config import ModelConfig


@dataclass(frozen=True)
class Mode:
    """How the forward pass is done; see the phases of :mod:`demo.schedule`."""

    dtype: torch.dtype = torch.float32
    """Of the large products; streams, mixing, routing and softmax are float32 always."""
    select: bool = True
    """False attends to all entries instead of the indexer's best."""
    rounding: bool = False
    """Rounds key/value rows to FP8 and the indexer's to FP4."""


@dataclass
class Result:
    """What a pass yields beside the hidden states."""

    hidden: Tensor
    """float32 ``[N, D]``, N = B·T, after the output norm."""
    index_losses: list[Tensor] = field(default_factory=list)
    """One scalar a ratio-4 layer."""
    index_recall: list[Tensor] = field(default_factory=list)
    """One scalar a ratio-4 layer: which part of the attention on entries falls on the selected ones."""
    loads: dict[int, Tensor] = field(default_factory=dict)
    """By layer with a routing bias: float32 ``[E]``, each expert's share of the assignments."""
    taps: list[Tensor] = field(default_factory=list)
    """float32 ``[N, D]`` a tapped layer: the mean of the streams it leaves."""


def run(
    weights: Mapping[str, Tensor],
    config: ModelConfig,
    batch: Batch,
    mode: Mode,
    tapped: tuple[int, ...] = (),
) -> Result:
    """The network up to the output norm.

    Args:
        weights: transformers' parameters and buffers by name; large matrices in ``mode.dtype``.
        config: the model's sizes and constants.
        batch: its rows are multiples of 128.
        mode: precision, selection and roundings.
        tapped: layers whose streams a drafter reads.
    """
    visible = visibility(batch, config.window, set(config.compress_ratios))
    rotary = Rotary.of(config, batch.positions.flatten())
    streams = F.embedding(batch.ids.flatten(), weights["model.embed_tokens.weight"]).float()
    streams = streams.unsqueeze(1).expand(-1, config.streams, -1).contiguous()
    result = Result(streams)
    for layer in range(config.layers):
        run_layer = Layer(weights, config, layer, mode)
        streams = run_layer.attention(streams, batch, visible, rotary, result)
        streams = run_layer.experts(streams, batch.ids.flatten(), result.loads)
        if layer in tapped:
            result.taps.append(streams.mean(1))
    result.hidden = norm(head_streams(weights, config, streams), weights["model.norm.weight"], config.rms_eps)
    return result


@dataclass
class Losses:
    """What a batch's predictions cost; every tensor a scalar."""

    total: Tensor
    """Mean over the weighted positions."""
    answers: Tensor
    """Mean over the assistant's tokens alone."""
    right: Tensor
    """Part of the assistant's tokens that are the most likely ones."""


def losses_of(weights: Mapping[str, Tensor], hidden: Tensor, batch: Batch, dtype: torch.dtype) -> Losses:
    """Cross entropy of a batch."""
    logits = logits_of(weights, hidden, dtype)
    targets, weight = batch.targets.flatten(), batch.weights.flatten()
    each = _cross_entropy(logits, targets)
    answer = (weight == 1).float()
    count = answer.sum().clamp(min=1)
    right = (logits.detach().argmax(-1) == targets).float()
    return Losses(
        (each * weight).sum() / weight.sum().clamp(min=1),
        (each.detach() * answer).sum() / count,
        (right * answer).sum() / count,
    )


def logits_of(weights: Mapping[str, Tensor], hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """``[..., V]`` from a result's hidden states."""
    return F.linear(hidden.to(dtype), weights["lm_head.weight"])


class Layer:
    """One layer's two sub-layers."""

    def __init__(self, weights: Mapping[str, Tensor], config: ModelConfig, layer: int, mode: Mode) -> None:
        self.config, self.layer, self.mode = config, layer, mode
        self.weights, self.prefix = weights, f"model.layers.{layer}."
        self.ratio = config.compress_ratios[layer]

    def w(self, name: str) -> Tensor:
        return self.weights[self.prefix + name]

    def attention(
        self, streams: Tensor, batch: Batch, visible: Visibility, rotary: Rotary, result: Result
    ) -> Tensor:
        c = self.config
        h, post, comb = self.enter(streams, "attn_hc", "input_layernorm.weight")
        rows = len(batch.ids)
        angles = rotary.compress if self.ratio else rotary.main
        qr = self._low_query(h)
        q = self._queries(qr, angles)
        kv = self.keys(h, angles)
        entries = chosen = allowed = scores = None
        if self.ratio:
            entries = self._rounded(self._compressed("self_attn.compressor.", h, batch, angles))
            allowed = chosen = visible.windows[self.ratio]
        if self.ratio == 4 and allowed is not None:
            scores = self._index_scores(h.detach(), qr.detach(), batch, angles)
            best = _best(scores.detach(), allowed, c.index_top_k)
            chosen = best if self.mode.select else allowed
        out, logits, free = attend(rows, q, kv, entries, visible.raw, chosen, self.w("self_attn.sinks"))
        is_trained = torch.is_grad_enabled()
        if (
            is_trained
            and scores is not None
            and logits is not None
            and free is not None
            and allowed is not None
        ):
            target = entry_weights(free, logits, allowed)
            result.index_losses.append(_index_loss(scores, target, allowed, batch.weights.flatten()))
            result.index_recall.append((target * best).sum() / target.sum().clamp(min=1e-9))
        return leave(streams, self.project(out, angles), post, comb)

    def queries(self, h: Tensor, angles: Angles) -> Tensor:
        """``[N, H, D]``, normed and rotated, of the sub-layer's input ``[N, hidden]``."""
        return self._queries(self._low_query(h), angles)

    def keys(self, h: Tensor, angles: Angles) -> Tensor:
        """``[N, D]``: key/value rows as they are kept."""
        kv = F.linear(h, self.w("self_attn.kv_proj.weight"))
        return self._rounded(self._row(kv, "self_attn.kv_norm.weight", *angles.rows))

    def project(self, out: Tensor, angles: Angles) -> Tensor:
        """The sub-layer's output of what attention read, ``[N, H, D]``."""
        c = self.config
        out = rotate(out, angles.heads[0], -angles.heads[1])
        grouped = out.reshape(len(out), c.o_groups, -1)
        low = torch.einsum(
            "ngi,gri->ngr", grouped, self.w("self_attn.o_a_proj.weight").view(c.o_groups, c.o_rank, -1)
        )
        return F.linear(low.flatten(1), self.w("self_attn.o_b_proj.weight"))

    def experts(self, streams: Tensor, ids: Tensor, loads: dict[int, Tensor]) -> Tensor:
        """The streams after the second sub-layer.

        Args:
            streams: ``[N, S, hidden]``.
            ids: ``[N]``, which choose the experts of hash layers.
            loads: takes each expert's share where a bias could balance it.
        """
        c = self.config
        h, post, comb = self.enter(streams, "ffn_hc", "post_attention_layernorm.weight")
        scores = F.softplus(F.linear(h.float(), self.w("mlp.gate.weight").float())).sqrt()
        if self.layer < c.hash_layers:
            picked = self.w("mlp.gate.tid2eid")[ids]
        else:
            bias = self.w("mlp.gate.e_score_correction_bias")
            picked = (scores.detach() + bias).topk(c.experts_used, -1).indices
        mask = torch.zeros_like(scores).scatter_(-1, picked, 1.0)
        if self.layer >= c.hash_layers:
            loads[self.layer] = mask.mean(0) / c.experts_used
        share = scores * mask
        share = share / (share.sum(-1, keepdim=True) + 1e-20) * c.expert_scale
        gate_up = self.w("mlp.experts.gate_up_proj")
        wide = F.linear(h, gate_up.flatten(0, 1)).unflatten(-1, (c.experts, 2, c.expert_width))
        active = _gated(wide, share, c.swiglu_clamp[self.layer])
        down = self.w("mlp.experts.down_proj").transpose(0, 1).flatten(1)
        routed = F.linear(active.flatten(-2), down)
        gate = F.linear(h, self.w("mlp.shared_experts.gate_proj.weight"))
        up = F.linear(h, self.w("mlp.shared_experts.up_proj.weight"))
        shared = _swiglu(gate, up, c.swiglu_clamp_shared[self.layer])
        shared = F.linear(shared, self.w("mlp.shared_experts.down_proj.weight"))
        return leave(streams, routed + shared, post, comb)

    def enter(self, streams: Tensor, mix: str, norm: str) -> tuple[Tensor, Tensor, Tensor]:
        """A sub-layer's input ``[N, hidden]``, and the weights by which its output joins the streams."""
        c = self.config
        mixes = _mixes(streams, self.w(f"{mix}.fn"), c.rms_eps)
        pre, post, logits = _gates(mixes, self.w(f"{mix}.base"), self.w(f"{mix}.scale"), c.streams, c.hc_eps)
        comb = balance(logits, c.sinkhorn_iterations, c.hc_eps)
        return _collapse(streams, pre, self.w(norm), c.rms_eps, self.mode.dtype), post, comb

    def _low_query(self, h: Tensor) -> Tensor:
        low = F.linear(h, self.w("self_attn.q_a_proj.weight"))
        return norm(low, self.w("self_attn.q_a_norm.weight"), self.config.rms_eps)

    def _queries(self, low: Tensor, angles: Angles) -> Tensor:
        c = self.config
        q = F.linear(low, self.w("self_attn.q_b_proj.weight")).view(len(low), c.heads, c.head_dim)
        return _norm_rotate(q, None, *angles.heads, c.rms_eps, False)

    def _rounded(self, rows: Tensor) -> Tensor:
        return round_rows(rows, self.config.rope_dim) if self.mode.rounding else rows

    def _compressed(self, prefix: str, h: Tensor, batch: Batch, angles: Angles) -> Tensor:
        """Entries ``[N/ratio, D]``, normed and rotated."""
        kv = F.linear(h, self.w(prefix + "kv_proj.weight"))
        gate = F.linear(h, self.w(prefix + "gate_proj.weight"))
        bias = self.w(prefix + "position_bias")
        starts = batch.positions.flatten()[:: self.ratio] == 0
        pooled = _pool_overlapping(kv, gate, bias, starts) if self.ratio == 4 else _pool(kv, gate, bias)
        cos, sin = angles.rows
        cos, sin = cos[:: self.ratio], sin[:: self.ratio]
        return self._row(pooled.to(kv.dtype), prefix + "kv_norm.weight", cos, sin)

    def _row(self, x: Tensor, norm: str, cos: Tensor, sin: Tensor) -> Tensor:
        """Normed and rotated keys, with the served model's cast between the two where it rounds."""
        return _norm_rotate(x, self.w(norm), cos, sin, self.config.rms_eps, self.mode.rounding)

    def _index_scores(self, h: Tensor, qr: Tensor, batch: Batch, angles: Angles) -> Tensor:
        """float32 ``[N, W]``."""
        c, prefix = self.config, "self_attn.compressor.indexer."
        count, rows = len(h), len(batch.ids)
        keys = self._compressed(prefix, h, batch, angles)
        q = F.linear(qr, self.w(prefix + "q_b_proj.weight")).view(count, c.index_heads, c.index_dim)
        q = rotate(q, *angles.heads)
        if self.mode.rounding:
            keys, q = round_keys(keys), round_keys(q)
        by_head = q.reshape(rows, -1, c.index_dim) @ keys.view(rows, -1, c.index_dim).transpose(-1, -2)
        head_weight = F.linear(h, self.w(prefix + "scorer.weights_proj.weight"))
        scale = (c.index_dim * c.index_heads) ** -0.5
        return _index_sum(by_head.view(count, c.index_heads, -1), head_weight, scale)


def head_streams(weights: Mapping[str, Tensor], config: ModelConfig, streams: Tensor) -> Tensor:
    """The last layer's streams joined, float32 ``[N, hidden]``, before the output norm."""
    mixes = _mixes(streams, weights["model.hc_head.hc_fn"], config.rms_eps)
    pre = torch.sigmoid(mixes * weights["model.hc_head.hc_scale"] + weights["model.hc_head.hc_base"])
    return _weighted(streams, pre + config.hc_eps)


def _best(scores: Tensor, allowed: Tensor, top_k: int) -> Tensor:
    """The ``top_k`` highest of the allowed scores as a mask ``[N, W]``."""
    width = scores.shape[-1]
    if width <= top_k:
        return allowed
    masked = scores.masked_fill(~allowed, float("-inf"))
    least = masked.topk(top_k, -1).values[..., -1:]
    return (masked >= least) & allowed


def _index_loss(scores: Tensor, target: Tensor, allowed: Tensor, weights: Tensor) -> Tensor:
    """Divergence of the scores' softmax from the attention's distribution over entries.

    A query counts by how much of its attention goes to entries, and more where its prediction counts.
    """
    mass = target.sum(-1)
    importance = mass * (0.1 + weights)
    divergence = _divergence(scores, target, allowed)
    return (divergence * importance).sum() / importance.sum().clamp(min=1e-6)


@fused
def _index_sum(by_head: Tensor, head_weight: Tensor, scale: float) -> Tensor:
    return (F.relu(by_head.float()) * (head_weight.float() * scale).unsqueeze(-1)).sum(1)


@fused
def _divergence(scores: Tensor, target: Tensor, allowed: Tensor) -> Tensor:
    goal = target / target.sum(-1, keepdim=True).clamp(min=1e-20)
    guess = torch.log_softmax(scores.masked_fill(~allowed, -1e30), -1)
    return (goal * (goal.clamp(min=1e-20).log() - guess)).sum(-1)


@fused
def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), targets, reduction="none")


@fused
def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of the last dimension, computed in float32."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


@fused
def _norm_rotate(
    x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float, narrow: bool
) -> Tensor:
    """RMS norm, cast to bfloat16 if ``narrow``, then the rotation of the last dimensions."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        wide = wide * weight
    if narrow:
        wide = wide.bfloat16().float()
    return rotate(wide, cos, sin).to(x.dtype)


def _mixes(streams: Tensor, fn: Tensor, eps: float) -> Tensor:
    flat = streams.flatten(1)
    return F.linear(flat, fn) * _inverse_rms(flat, eps)


@fused
def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


@fused
def _gates(
    mixes: Tensor, base: Tensor, scale: Tensor, streams: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    pre = torch.sigmoid(mixes[..., :streams] * scale[0] + base[:streams]) + eps
    post = 2 * torch.sigmoid(mixes[..., streams : 2 * streams] * scale[1] + base[streams : 2 * streams])
    comb = mixes[..., 2 * streams :] * scale[2] + base[2 * streams :]
    return pre, post, comb.unflatten(-1, (streams, streams))


@fused
def _weighted(streams: Tensor, pre: Tensor) -> Tensor:
    return (pre.unsqueeze(-1) * streams).sum(1)


@fused
def _collapse(streams: Tensor, pre: Tensor, norm: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """The sub-layer's input: the weighted streams, normed."""
    x = (pre.unsqueeze(-1) * streams).sum(1)
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * norm).to(dtype)


@fused
def leave(streams: Tensor, output: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """The streams after the sub-layer; ``comb`` is [source, destination]."""
    kept = (comb.unsqueeze(-1) * streams.unsqueeze(2)).sum(1)
    return post.unsqueeze(-1) * output.float().unsqueeze(1) + kept


@fused
def _gated(wide: Tensor, share: Tensor, limit: float) -> Tensor:
    """``[N, E, W]`` of every expert, scaled by its share, from ``[N, E, 2, W]``."""
    gate, up = wide.float().unbind(-2)
    active = F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
    return (active * share.unsqueeze(-1)).to(wide.dtype)


@fused
def _swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    return (F.silu(gate.float().clamp(max=limit)) * up.float().clamp(-limit, limit)).to(gate.dtype)


@fused
def _pool(kv: Tensor, gate: Tensor, bias: Tensor) -> Tensor:
    """Windows of plain layers: per dimension, the softmax of the gates weighs the window's tokens."""
    ratio = bias.shape[0]
    weight = torch.softmax(gate.float().unflatten(0, (-1, ratio)) + bias, 1)
    pooled: Tensor = (weight * kv.float().unflatten(0, (-1, ratio))).sum(1)
    return pooled


@fused
def _pool_overlapping(kv: Tensor, gate: Tensor, bias: Tensor, starts: Tensor) -> Tensor:
    """Windows of ratio-4 layers: the first half of the preceding window's, the second of its own.

    A window at the start of a document, and so of a row, has nothing before it.
    """
    ratio, dim = bias.shape[0], bias.shape[1] // 2
    value = kv.float().unflatten(0, (-1, ratio))
    score = gate.float().unflatten(0, (-1, ratio)) + bias
    value_before = F.pad(value[:-1, :, :dim], (0, 0, 0, 0, 1, 0))
    score_before = F.pad(score[:-1, :, :dim], (0, 0, 0, 0, 1, 0))
    score_before = score_before.masked_fill(starts[:, None, None], float("-inf"))
    weight = torch.softmax(torch.cat((score_before, score[..., dim:]), 1), 1)
    return (weight * torch.cat((value_before, value[..., dim:]), 1)).sum(1)
