"""The forward of a few rows: one step of decoding sequences, at most 32 rows.

Everything a step reads besides weights and banks lies in buffers of fixed place, so that a recorded step can
be replayed with other rows. A row's results depend on its own sequence alone: kernels treat rows apart, and
tiles are chosen by the matrix.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.gpu.attention import AttentionParts, KeyLists, attend
from kernels.gpu.experts import experts_down, experts_swiglu
from kernels.gpu.hyper import HyperState, embed, merge, mixed_input
from kernels.gpu.indexer import index_queries, score_entries, select_entries
from kernels.gpu.keys import IndexEntries, Rows, Turns, attention_inputs, compressed_entries
from kernels.gpu.matmul import matmul_plain, matmul_q8, row_tile, swiglu_q8
from kernels.gpu.quantize import Quantized, quantize
from kernels.gpu.router import choose_experts
from kernels.gpu.tables import grid_words, sign_words
from worker.bank.store import KvStore, LayerStore, WindowRing
from worker.gpu.turns import Frequencies
from worker.gpu.weights import LayerOnGpu, MixWeights, WeightsOnGpu
from worker.model.config import ModelConfig

MAX_ROWS = 32


@dataclass(frozen=True)
class StepBuffers:
    """Memory of a step of up to ``rows`` rows; shapes begin with the row."""

    hyper: HyperState
    x: Quantized
    x_plain: Tensor
    projected: Tensor
    compress: Tensor
    q_low: Quantized
    q_low_plain: Tensor
    q: Tensor
    index_q: Tensor
    index_queries: Tensor
    scores: Tensor
    parts: AttentionParts
    heads: Quantized
    low: Tensor
    low_rounded: Quantized
    logits: Tensor
    chosen: Tensor
    weights: Tensor
    hidden: Tensor
    hidden_rounded: Quantized
    out: Tensor
    expert_out: Tensor
    vocabulary: Tensor

    @classmethod
    def empty(
        cls, config: ModelConfig, rows: int, context: int, splits: int, device: torch.device
    ) -> StepBuffers:
        """For banks of ``context`` tokens."""
        c = config

        def floats(*shape: int) -> Tensor:
            return torch.zeros(rows, *shape, device=device)

        def halves(*shape: int) -> Tensor:
            return torch.zeros(rows, *shape, dtype=torch.float16, device=device)

        def ints(*shape: int) -> Tensor:
            return torch.zeros(rows, *shape, dtype=torch.int32, device=device)

        widest = 4 * c.head_dim + 4 * c.index_dim + c.index_heads
        experts = c.experts_used + 1
        return cls(
            hyper=HyperState.empty(rows, c.hidden, device),
            x=Quantized.empty(rows, c.hidden, device),
            x_plain=halves(c.hidden),
            projected=floats(c.q_rank + c.head_dim),
            compress=floats(widest),
            q_low=Quantized.empty(rows, c.q_rank, device),
            q_low_plain=halves(c.q_rank),
            q=floats(c.heads * c.head_dim),
            index_q=floats(c.index_heads * c.index_dim),
            index_queries=halves(2, c.index_heads, c.index_dim // 2),
            scores=floats(-(-context // 4)),
            parts=AttentionParts.empty(rows, splits, c.heads, c.head_dim, device),
            heads=Quantized.empty(rows * c.o_groups, c.heads * c.head_dim // c.o_groups, device),
            low=floats(c.o_groups * c.o_rank),
            low_rounded=Quantized.empty(rows, c.o_groups * c.o_rank, device),
            logits=floats(c.experts),
            chosen=ints(c.experts_used),
            weights=floats(c.experts_used),
            hidden=floats(experts, c.expert_width),
            hidden_rounded=Quantized.empty(rows * experts, c.expert_width, device),
            out=floats(1, c.hidden),
            expert_out=floats(experts, c.hidden),
            vocabulary=floats(c.vocab),
        )


class DecodeForward:
    """Runs steps on one store.

    Args:
        config, weights: of the model.
        store: the banks.
        context: tokens a bank holds.
    """

    def __init__(self, config: ModelConfig, weights: WeightsOnGpu, store: KvStore, context: int) -> None:
        device = store.device
        self.config = config
        self.weights = weights
        self._store = store
        self._context = context
        self._tables = (grid_words(device), sign_words(device))
        self._frequencies = Frequencies(config, device)
        pages = store.geometry.pages_for(context)

        def ints(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int32, device=device)

        self.rows = Rows(
            ints(MAX_ROWS),
            ints(MAX_ROWS),
            ints(MAX_ROWS),
            ints(MAX_ROWS),
            ints(store.banks + store.spare, pages),
        )
        self._bases = ints(MAX_ROWS)
        self._selected = ints(MAX_ROWS, config.index_top_k)
        self._lists = [self._key_lists(index) for index in range(config.layers)]
        splits = max(lists.splits for lists in self._lists)
        self.buffers = StepBuffers.empty(config, MAX_ROWS, context, splits, device)

    def run(self, count: int) -> Tensor:
        """One step of the first ``count`` rows of :attr:`rows`, padded to their row tile.

        Rows past the real ones repeat a real row.

        Returns:
            logits, float32 ``[count padded, vocab]``, in a buffer that the next step overwrites.
        """
        tile = row_tile(count)
        count = -(-count // tile) * tile
        config, weights, b = self.config, self.weights, self.buffers
        torch.mul(self.rows.banks, self._store.geometry.ring_rows, out=self._bases)
        turns = {
            ratio: self._frequencies.turns(self.rows.positions, ratio) for ratio in self._frequencies.ratios
        }
        embed(b.hyper, weights.embedding, self.rows.tokens, weights.layers[0].attention_mix.fn, count)
        for index, layer in enumerate(weights.layers):
            ratio = config.compress_ratios[index]
            self._mixed(layer.attention_mix, layer.attention_norm, count)
            self._attention(index, layer, turns[ratio], count)
            merge(b.hyper, b.out, layer.moe_mix.fn, count)
            self._mixed(layer.moe_mix, layer.moe_norm, count)
            self._moe(index, layer, count)
            last = index + 1 == config.layers
            after = weights.head_mix if last else weights.layers[index + 1].attention_mix
            merge(b.hyper, b.expert_out, after.fn, count)
        self._mixed(weights.head_mix, weights.norm, count, head=True)
        matmul_q8(weights.output, b.x, b.vocabulary, count)
        return b.vocabulary[:count]

    def _mixed(self, mix: MixWeights, norm: Tensor, count: int, *, head: bool = False) -> None:
        config, b = self.config, self.buffers
        mixed_input(
            b.hyper,
            mix.base,
            mix.scale,
            norm,
            config.sinkhorn_iterations,
            config.hc_eps,
            config.rms_eps,
            b.x,
            b.x_plain,
            count,
            head=head,
        )

    def _attention(self, index: int, layer: LayerOnGpu, turns: Turns, count: int) -> None:
        config, b, store = self.config, self.buffers, self._store.layers[index]
        ratio, eps = config.compress_ratios[index], config.rms_eps
        lists = self._lists[index]
        matmul_q8(layer.inputs, b.x, b.projected, count)
        attention_inputs(
            b.projected,
            layer.q_a_norm,
            layer.kv_norm,
            b.q_low,
            b.q_low_plain,
            store.ring,
            self._bases,
            lists.modulus,
            self.rows,
            turns,
            eps,
            count,
        )
        matmul_q8(layer.q_b, b.q_low, b.q, count)
        if layer.compress is not None:
            self._entries(layer, store, ratio, turns, count)
        if layer.index_q_b is not None and lists.most_entries > config.index_top_k:
            matmul_plain(layer.index_q_b, b.q_low_plain, b.index_q, count)
            index_queries(b.index_q, b.index_queries, turns, count)
            weights = self._compressed(layer)[:, -config.index_heads :]
            score_entries(
                b.index_queries,
                weights,
                store.index_entries,
                self.rows,
                b.scores,
                ratio,
                lists.per_page,
                config.index_top_k,
                count,
                lists.most_entries,
            )
            select_entries(b.scores, self.rows, self._selected, ratio, count, lists.most_entries)
        attend(b.q, layer.sinks, lists, self.rows, turns, eps, b.parts, b.heads, config.o_groups, count)
        matmul_q8(layer.output_a, b.heads, b.low, count, groups=config.o_groups, step=config.o_groups)
        quantize(b.low[:count], b.low_rounded)
        matmul_q8(layer.output_b, b.low_rounded, b.out, count)

    def _compressed(self, layer: LayerOnGpu) -> Tensor:
        """The compressors' projections, ``[T, N]`` contiguous."""
        assert layer.compress is not None
        columns = layer.compress.rows
        return self.buffers.compress.view(-1)[: MAX_ROWS * columns].view(MAX_ROWS, columns)

    def _entries(self, layer: LayerOnGpu, store: LayerStore, ratio: int, turns: Turns, count: int) -> None:
        assert layer.compress is not None
        assert layer.compressor is not None
        assert store.window is not None
        projected = self._compressed(layer)
        matmul_plain(layer.compress, self.buffers.x_plain, projected, count)
        index = None
        if layer.indexer is not None:
            assert store.index_window is not None
            index = IndexEntries(
                layer.indexer.ape, layer.indexer.norm, _ring(store.index_window), store.index_entries
            )
        compressed_entries(
            projected,
            layer.compressor.ape,
            layer.compressor.norm,
            _ring(store.window),
            store.entries,
            index,
            self.rows,
            turns,
            ratio,
            self._store.geometry.page_tokens // ratio,
            self.config.rms_eps,
            count,
            pool=True,
            keep=True,
        )

    def _moe(self, index: int, layer: LayerOnGpu, count: int) -> None:
        config, b = self.config, self.buffers
        clamp, shared_clamp = config.swiglu_clamp[index], config.swiglu_clamp_shared[index]
        matmul_plain(layer.router, b.x_plain, b.logits, count)
        choose_experts(
            b.logits,
            layer.bias,
            layer.table,
            self.rows.tokens,
            b.chosen,
            b.weights,
            config.expert_scale,
            count,
            normalise=config.expert_norm,
        )
        used, width = config.experts_used, config.expert_width
        experts_swiglu(layer.gate, layer.up, self._tables, b.x, b.chosen, b.weights, b.hidden, count, clamp)
        shared = b.hidden[:, used]
        swiglu_q8(layer.shared_gate, layer.shared_up, b.x, shared, b.hidden.stride(0), count, shared_clamp)
        quantize(b.hidden[:count].view(-1, width), b.hidden_rounded)
        experts_down(layer.down, b.hidden_rounded, b.chosen, b.expert_out, count)
        matmul_q8(
            layer.shared_down, b.hidden_rounded, b.expert_out[:, used], count, first=used, step=used + 1
        )

    def _key_lists(self, index: int) -> KeyLists:
        config, geometry = self.config, self._store.geometry
        ratio = config.compress_ratios[index]
        layer = self._store.layers[index]
        most = self._context // ratio if ratio else 0
        selects = geometry.indexed(ratio) and most > config.index_top_k
        return KeyLists(
            bases=self._bases,
            modulus=geometry.ring_rows,
            raw=layer.ring,
            entries=layer.entries or layer.ring,
            ratio=ratio,
            per_page=geometry.page_tokens // ratio if ratio else 1,
            selected=self._selected if selects else None,
            most_entries=most,
            window=config.window,
        )


def _ring(window: WindowRing) -> tuple[Tensor, Tensor]:
    return window.vectors, window.scores
