"""Drafting from an exported file alone: plain float32, one function a part, nothing of the training's code.

A block is ``[anchor, noise, …]`` at the anchor's position P and those after it. Every row of a stage attends
to the up to W keys before P, which come from the model's taps, and to the whole block. Row k gives the
distribution of the token at P+k+1 apart from a term for the token before it, the Markov head's, which is
added as the tokens are picked from left to right.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from demo.drafter.base import Base, read_tensor
from kernels.norm import rms_norm
from kernels.rounding import pack_fp8, to_bf16, unpack_fp8
from worker.gguf.drafter import DrafterConfig, open_drafter
from worker.model.config import ModelConfig


@dataclass(frozen=True)
class Block:
    """What one block drafts: int64 ``tokens [A, K]`` and ``confidence [A, K]``, probabilities."""

    tokens: Tensor
    confidence: Tensor


class Drafter:
    """A drafter's tensors by their names in the file, float32, and the model's embedding and head."""

    def __init__(
        self,
        config: DrafterConfig,
        model: ModelConfig,
        tensors: dict[str, Tensor],
        embedding: Tensor,
        head: Tensor,
    ) -> None:
        self.config, self.model, self.tensors = config, config.stages_of(model), tensors
        self.embedding, self.head = embedding, head

    @classmethod
    def load(cls, path: Path, base: Base) -> Drafter:
        """Reads a file made for ``base``, onto its device.

        Raises:
            ModelFileError: it is no drafter for that model.
        """
        device = base.embedding.device
        file, config = open_drafter(path, base.config)
        tensors = {name: read_tensor(file, name).to(device) for name in file.tensors}
        return cls(config, base.config, tensors, base.embedding.float(), base.head.float())

    @torch.no_grad()
    def context(self, taps: Tensor, positions: Tensor) -> list[Tensor]:
        """Each stage's keys ``[N, D]`` of processed tokens, from ``taps [N, taps · hidden]``."""
        x = rms_norm(taps @ self._head("main_proj").T, self._head("main_norm"), self.model.rms_eps)
        return [self._keys(stage, x, positions) for stage in range(self.config.stages)]

    @torch.no_grad()
    def draft(
        self, anchors: Tensor, positions: Tensor, context: list[Tensor], index: Tensor, visible: Tensor
    ) -> Block:
        """Drafts A blocks.

        Args:
            anchors: int64 ``[A]``, tokens that are said and not yet processed.
            positions: int64 ``[A]``, theirs.
            context: of :meth:`context`.
            index: int64 ``[A, W]``, the rows of ``context`` before each anchor.
            visible: bool ``[A, W]``, which of them there are.
        """
        hidden = self._hidden(anchors, positions, context, index, visible)
        logits = rms_norm(hidden, self._head("norm"), self.model.rms_eps) @ self.head.T
        before, tokens, doubts = anchors, [], []
        for row in range(self.config.block):
            markov = self._head("markov_w1")[before]
            seen = torch.cat((hidden[:, row], markov), -1)
            doubts.append(torch.sigmoid(seen @ self._head("conf_proj")[0]))
            before = (logits[:, row] + markov @ self._head("markov_w2").T).argmax(-1)
            tokens.append(before)
        return Block(torch.stack(tokens, 1), torch.stack(doubts, 1))

    def _hidden(
        self, anchors: Tensor, positions: Tensor, context: list[Tensor], index: Tensor, visible: Tensor
    ) -> Tensor:
        """``[A, K, hidden]`` before the output norm."""
        count, block = len(anchors), self.config.block
        ids = anchors.new_full((count, block), self.config.noise_token)
        ids[:, 0] = anchors
        at = (positions[:, None] + torch.arange(block, device=positions.device)).flatten()
        streams = self.embedding[ids.flatten()][:, None].repeat(1, self.model.streams, 1)
        for stage in range(self.config.stages):
            x, post, comb = self._enter(stage, "attn", streams)
            keys = torch.cat((context[stage][index], self._keys(stage, x, at).view(count, block, -1)), 1)
            seen = F.pad(visible, (0, block), value=True)
            out = self._attention(stage, x, at, keys, seen)
            streams = _merge(streams, out, post, comb)
            x, post, comb = self._enter(stage, "ffn", streams)
            streams = _merge(streams, self._experts(stage, x), post, comb)
        mix = rms_norm(streams.flatten(1), None, self.model.rms_eps) @ self._head("hc_head_fn").T
        share = torch.sigmoid(mix * self._head("hc_head_scale") + self._head("hc_head_base"))
        return torch.einsum("ns,nsd->nd", share + self.model.hc_eps, streams).view(count, block, -1)

    def _enter(self, stage: int, part: str, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A sub-layer's normed input, and how its output and the streams make the next streams."""
        m, count = self.model, self.model.streams
        mix = rms_norm(streams.flatten(1), None, m.rms_eps) @ self._of(stage, f"hc_{part}_fn").T
        base, scale = self._of(stage, f"hc_{part}_base"), self._of(stage, f"hc_{part}_scale")
        pre = torch.sigmoid(mix[:, :count] * scale[0] + base[:count]) + m.hc_eps
        post = 2 * torch.sigmoid(mix[:, count : 2 * count] * scale[1] + base[count : 2 * count])
        comb = (mix[:, 2 * count :] * scale[2] + base[2 * count :]).unflatten(1, (count, count))
        comb = comb.softmax(-1) + m.hc_eps
        for turn in range(2 * m.sinkhorn_iterations - 1):
            comb = comb / (comb.sum(1 + turn % 2, keepdim=True) + m.hc_eps)
        x = torch.einsum("ns,nsd->nd", pre, streams)
        return rms_norm(x, self._of(stage, f"{part}_norm"), m.rms_eps), post, comb

    def _keys(self, stage: int, x: Tensor, positions: Tensor) -> Tensor:
        """Key/value rows ``[N, D]`` as they are kept: FP8 but for the rotated dimensions."""
        rows = rms_norm(
            x @ self._of(stage, "attn_kv").T, self._of(stage, "attn_kv_a_norm"), self.model.rms_eps
        )
        rows = to_bf16(self._turned(to_bf16(rows), positions))
        plain = rows.shape[-1] - self.model.rope_dim
        return torch.cat((unpack_fp8(*pack_fp8(rows[:, :plain].contiguous())), rows[:, plain:]), -1)

    def _attention(self, stage: int, x: Tensor, positions: Tensor, keys: Tensor, seen: Tensor) -> Tensor:
        """The sub-layer's output ``[A·K, hidden]``, of keys ``[A, W + K, D]``."""
        m, count = self.model, len(keys)
        low = rms_norm(x @ self._of(stage, "attn_q_a").T, self._of(stage, "attn_q_a_norm"), m.rms_eps)
        q = rms_norm((low @ self._of(stage, "attn_q_b").T).unflatten(1, (m.heads, -1)), None, m.rms_eps)
        q = self._turned(q.flatten(0, 1), positions.repeat_interleave(m.heads)).view_as(q)
        scores = torch.einsum("akhd,awd->akhw", q.view(count, -1, *q.shape[1:]), keys) * m.head_dim**-0.5
        scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
        sinks = self._of(stage, "attn_sinks")[:, None].expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
        out = torch.einsum("akhw,awd->akhd", weights, keys).flatten(0, 1)
        out = self._turned(out.flatten(0, 1), -positions.repeat_interleave(m.heads)).view_as(out)
        groups = out.reshape(len(out), m.o_groups, -1)
        output_a = self._of(stage, "attn_output_a").unflatten(0, (m.o_groups, -1))
        return torch.einsum("ngi,gri->ngr", groups, output_a).flatten(1) @ self._of(stage, "attn_output_b").T

    def _experts(self, stage: int, x: Tensor) -> Tensor:
        """The best experts by score and bias, weighed by score, and the shared one."""
        m = self.model
        scores = F.softplus(x @ self._of(stage, "ffn_gate_inp").T).sqrt()
        bias = self.tensors[f"dspark.{stage}.exp_probs_b.bias"]
        chosen = (scores + bias).topk(m.experts_used, -1).indices
        picked = scores.gather(-1, chosen)
        picked = picked / picked.sum(-1, keepdim=True) * m.expert_scale
        share = torch.zeros_like(scores).scatter(-1, chosen, picked)
        total = self._expert(stage, "shexp", x, m.swiglu_clamp_shared[stage])
        for expert in range(m.experts):
            one = self._expert(stage, "exps", x, m.swiglu_clamp[stage], expert)
            total = total + share[:, expert, None] * one
        return total

    def _expert(self, stage: int, kind: str, x: Tensor, clamp: float, expert: int | None = None) -> Tensor:
        gate, up, down = (self._of(stage, f"ffn_{part}_{kind}") for part in ("gate", "up", "down"))
        if expert is not None:
            gate, up, down = gate[expert], up[expert], down[expert]
        return (F.silu((x @ gate.T).clamp(max=clamp)) * (x @ up.T).clamp(-clamp, clamp)) @ down.T

    def _turned(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rows with the pairs of their last dimensions turned by their positions."""
        width = self.model.rope_dim
        pair = torch.arange(0, width, 2, device=x.device, dtype=torch.float32)
        angle = positions[:, None].float() * (1 / self.model.rope_base ** (pair / width))
        turn = torch.polar(torch.ones_like(angle), angle)
        pairs = torch.view_as_complex(x[:, -width:].unflatten(-1, (-1, 2)).contiguous())
        return torch.cat((x[:, :-width], torch.view_as_real(pairs * turn).flatten(1)), -1)

    def _of(self, stage: int, name: str) -> Tensor:
        return self.tensors[f"dspark.{stage}.{name}.weight"]

    def _head(self, name: str) -> Tensor:
        return self.tensors[f"dspark.{name}.weight"]


def _merge(streams: Tensor, out: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    return post[:, :, None] * out[:, None] + torch.einsum("nst,nsd->ntd", comb, streams)
