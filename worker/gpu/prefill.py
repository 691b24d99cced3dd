"""The forward of a chunk of one prompt: thousands of rows of one bank.

The chunk's state goes to a spare bank and is moved to its own bank only when the last layer has run, so a
chunk can stop between any two layers, for a step of decoding sequences or for good.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.gpu.attention import KeyLists
from kernels.gpu.attention_rows import attend_rows, copy_keys
from kernels.gpu.gemm import HalfWeights, gemm, swiglu_rows
from kernels.gpu.grouped import experts_down_rows, experts_gate_up, reorder, sort_pairs
from kernels.gpu.hyper import HyperState, embed, merge, mixed_input
from kernels.gpu.indexer import index_queries, score_rows, select_entries
from kernels.gpu.keys import IndexEntries, Rows, Turns, attention_inputs, compressed_entries
from kernels.gpu.matmul import matmul_q8
from kernels.gpu.matrix import Matrix
from kernels.gpu.quantize import Quantized
from kernels.gpu.router import choose_experts
from kernels.gpu.tables import grid_words, sign_words
from kernels.gpu.tiles import tiles_for
from worker.bank.layout import Span
from worker.bank.store import KvStore
from worker.gpu.turns import Frequencies
from worker.gpu.weights import LayerOnGpu, MixWeights, WeightsOnGpu
from worker.model.config import ModelConfig

_SCORE_BYTES = 256 << 20
"""Index scores held at a time."""


@dataclass(frozen=True)
class ChunkBuffers:
    """Memory of a chunk of T rows."""

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
    selected: Tensor
    low: Tensor
    logits: Tensor
    chosen: Tensor
    weights: Tensor
    both: Tensor
    shared: Tensor
    hidden: Tensor
    out: Tensor
    expert_out: Tensor
    vocabulary: Tensor
    keys: tuple[Tensor, ...]
    rows: Rows

    @classmethod
    def empty(
        cls, config: ModelConfig, store: KvStore, chunk: int, context: int, device: torch.device
    ) -> ChunkBuffers:
        """For chunks of ``chunk`` tokens in banks of ``context``."""
        c = config

        def floats(*shape: int) -> Tensor:
            return torch.zeros(chunk, *shape, device=device)

        def halves(*shape: int) -> Tensor:
            return torch.zeros(chunk, *shape, dtype=torch.float16, device=device)

        def ints(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int32, device=device)

        entries = max(-(-context // 4), 1)
        scored = max(1, min(chunk, _SCORE_BYTES // (4 * entries)))
        banks = store.banks + store.spare
        return cls(
            hyper=HyperState.empty(chunk, c.hidden, device),
            x=Quantized.empty(chunk, c.hidden, device),
            x_plain=halves(c.hidden),
            projected=floats(c.q_rank + c.head_dim),
            compress=floats(4 * c.head_dim + 4 * c.index_dim + c.index_heads),
            q_low=Quantized.empty(chunk, c.q_rank, device),
            q_low_plain=halves(c.q_rank),
            q=halves(c.heads * c.head_dim),
            index_q=halves(c.index_heads * c.index_dim),
            index_queries=halves(2, c.index_heads, c.index_dim // 2),
            scores=torch.empty(scored, entries, device=device),
            selected=ints(chunk, c.index_top_k),
            low=halves(c.o_groups * c.o_rank),
            logits=floats(c.experts),
            chosen=ints(chunk, c.experts_used),
            weights=floats(c.experts_used),
            both=floats(2 * c.expert_width),
            shared=halves(c.expert_width),
            hidden=halves(c.experts_used * c.expert_width).view(chunk * c.experts_used, c.expert_width),
            out=floats(1, c.hidden),
            expert_out=halves(c.experts_used + 1, c.hidden),
            vocabulary=torch.zeros(1, c.vocab, device=device),
            keys=store.geometry.keys.allocate(chunk + c.window - 1, device),
            rows=Rows(
                ints(chunk),
                ints(chunk),
                ints(chunk),
                ints(chunk),
                ints(banks, store.geometry.pages_for(context)),
            ),
        )


class PrefillForward:
    """Runs chunks on one store.

    Args:
        config, weights: of the model.
        store: the banks, one of them spare.
        context: tokens a bank holds.
        chunk: tokens of the largest chunk.
    """

    def __init__(
        self, config: ModelConfig, weights: WeightsOnGpu, store: KvStore, context: int, chunk: int
    ) -> None:
        device = store.device
        self.config = config
        self.weights = weights
        self.buffers = ChunkBuffers.empty(config, store, chunk, context, device)
        self._store = store
        self._tables = (grid_words(device), sign_words(device))
        self._tiles = tiles_for(device)
        self._frequencies = Frequencies(config, device)
        largest = max(
            matrix.rows * matrix.columns * (2 if matrix is layer.shared_gate else 1)
            for layer in weights.layers
            for matrix in _half_matrices(layer)
        )
        self._half = HalfWeights(largest, device)
        self._staging = store.banks

    def run(self, span: Span) -> Generator[None, None, Tensor | None]:
        """Extends a bank by a chunk; gives way after every layer.

        What the bank held stays as it was until the last layer has run. Returns the logits of the span's
        last row, float32 ``[1, vocab]`` in a buffer of fixed place, if the span wants them.
        """
        count, b, store = len(span.tokens), self.buffers, self._store
        store.copy_state(span.bank, self._staging)
        rows = self._upload(span)
        turns = {ratio: self._frequencies.turns(rows.positions, ratio) for ratio in self._frequencies.ratios}
        state = HyperState(b.hyper.streams[:count], b.hyper.mix[:count], b.hyper.partials[:count])
        layers = self.weights.layers
        embed(state, self.weights.embedding, rows.tokens, layers[0].attention_mix.fn, count)
        for index, layer in enumerate(layers):
            self._mixed(state, layer.attention_mix, layer.attention_norm)
            self._attention(index, layer, span, rows, turns[self.config.compress_ratios[index]])
            merge(state, b.out[:count], layer.moe_mix.fn, count)
            self._mixed(state, layer.moe_mix, layer.moe_norm)
            self._moe(index, layer, rows)
            if index + 1 < len(layers):
                merge(state, b.expert_out[:count], layers[index + 1].attention_mix.fn, count)
                yield
        logits = self._head(count) if span.outputs else None
        store.copy_state(self._staging, span.bank)
        return logits

    def _upload(self, span: Span) -> Rows:
        rows, count = self.buffers.rows, len(span.tokens)
        rows.tokens[:count].copy_(_ints(span.tokens), non_blocking=True)
        rows.positions[:count].copy_(torch.arange(span.start, span.end, dtype=torch.int32), non_blocking=True)
        rows.banks[:count] = self._staging
        rows.pages[self._staging, : len(span.pages)].copy_(_ints(span.pages), non_blocking=True)
        return Rows(
            rows.tokens[:count], rows.positions[:count], rows.banks[:count], rows.firsts[:count], rows.pages
        )

    def _mixed(self, state: HyperState, mix: MixWeights, norm: Tensor) -> None:
        config, b = self.config, self.buffers
        mixed_input(
            state,
            mix.base,
            mix.scale,
            norm,
            config.sinkhorn_iterations,
            config.hc_eps,
            config.rms_eps,
            b.x,
            b.x_plain,
            state.streams.shape[0],
        )

    def _head(self, count: int) -> Tensor:
        """Logits of the last row."""
        config, weights, b = self.config, self.weights, self.buffers
        last = slice(count - 1, count)
        state = HyperState(b.hyper.streams[last], b.hyper.mix[last], b.hyper.partials[last])
        merge(state, b.expert_out[last], weights.head_mix.fn, 1)
        mixed_input(
            state,
            weights.head_mix.base,
            weights.head_mix.scale,
            weights.norm,
            config.sinkhorn_iterations,
            config.hc_eps,
            config.rms_eps,
            b.x,
            b.x_plain,
            1,
            head=True,
        )
        matmul_q8(weights.output, b.x, b.vocabulary, 1)
        return b.vocabulary

    def _attention(self, index: int, layer: LayerOnGpu, span: Span, rows: Rows, turns: Turns) -> None:
        config, b, store, count = self.config, self.buffers, self._store.layers[index], len(span.tokens)
        geometry, tiles = self._store.geometry, self._tiles
        ratio, eps = config.compress_ratios[index], config.rms_eps
        modulus, ring = b.keys[0].shape[0], geometry.ring_rows
        x, pages = b.x_plain[:count], rows.pages[self._staging]
        gemm(self._half.of([layer.inputs]), x, b.projected[:count], tiles)
        copy_keys(
            store.ring,
            self._staging * ring,
            ring,
            b.keys,
            0,
            modulus,
            max(0, span.start - config.window + 1),
            span.start,
        )
        attention_inputs(
            b.projected,
            layer.q_a_norm,
            layer.kv_norm,
            b.q_low,
            b.q_low_plain,
            b.keys,
            rows.firsts,
            modulus,
            rows,
            turns,
            eps,
            count,
        )
        q_low, q = b.q_low_plain[:count], b.q[:count]
        gemm(self._half.of([layer.q_b]), q_low, q, tiles)
        selected = None
        if layer.compress is not None:
            projected = _narrow(b.compress, count, layer.compress.rows)
            gemm(self._half.of([layer.compress]), x, projected, tiles)
            self._entries(index, layer, rows, turns, projected)
            if layer.index_q_b is not None and span.end // ratio > config.index_top_k:
                selected = self._select(index, layer, span, rows, turns, projected)
        lists = KeyLists(
            bases=rows.firsts,
            modulus=modulus,
            raw=b.keys,
            entries=store.entries or b.keys,
            ratio=ratio,
            per_page=geometry.page_tokens // ratio if ratio else 1,
            selected=selected,
            most_entries=span.end // ratio if ratio else 0,
            window=config.window,
        )
        attend_rows(q, layer.sinks, lists, rows, pages, turns, eps, tiles)
        copy_keys(
            b.keys,
            0,
            modulus,
            store.ring,
            self._staging * ring,
            ring,
            max(span.start, span.end - ring),
            span.end,
        )
        gemm(self._half.of([layer.output_a]), q, b.low[:count], tiles, groups=config.o_groups)
        gemm(self._half.of([layer.output_b]), b.low[:count], b.out[:count, 0], tiles)

    def _entries(self, index: int, layer: LayerOnGpu, rows: Rows, turns: Turns, projected: Tensor) -> None:
        store, geometry = self._store.layers[index], self._store.geometry
        ratio, count = self.config.compress_ratios[index], projected.shape[0]
        assert layer.compressor is not None
        assert store.window is not None
        keys = None
        if layer.indexer is not None:
            assert store.index_window is not None
            ring = (store.index_window.vectors, store.index_window.scores)
            keys = IndexEntries(layer.indexer.ape, layer.indexer.norm, ring, store.index_entries)
        for pool in (True, False):
            compressed_entries(
                projected,
                layer.compressor.ape,
                layer.compressor.norm,
                (store.window.vectors, store.window.scores),
                store.entries,
                keys,
                rows,
                turns,
                ratio,
                geometry.page_tokens // ratio,
                self.config.rms_eps,
                count,
                pool=pool,
                keep=not pool,
            )

    def _select(
        self, index: int, layer: LayerOnGpu, span: Span, rows: Rows, turns: Turns, projected: Tensor
    ) -> Tensor:
        """The entries that each row reads, int32 ``[T, top]``."""
        config, b, count = self.config, self.buffers, len(span.tokens)
        ratio = config.compress_ratios[index]
        assert layer.index_q_b is not None
        gemm(self._half.of([layer.index_q_b]), b.q_low_plain[:count], b.index_q[:count], self._tiles)
        index_queries(b.index_q, b.index_queries, turns, count)
        weights = projected[:, -config.index_heads :]
        most = span.end // ratio
        together = max(b.scores.numel() // most // 16 * 16, 1)
        for first in range(0, count, together):
            part = slice(first, min(first + together, count))
            scores = b.scores.view(-1)[: (part.stop - first) * most].view(-1, most)
            positions = rows.positions[part]
            score_rows(
                b.index_queries[part],
                weights[part],
                self._store.layers[index].index_entries,
                positions,
                rows.pages[self._staging],
                scores,
                ratio,
                self._store.geometry.page_tokens // ratio,
                most,
                self._tiles,
            )
            some = Rows(rows.tokens[part], positions, rows.banks[part], rows.firsts[part], rows.pages)
            select_entries(scores, some, b.selected[part], ratio, part.stop - first, most)
        return b.selected[:count]

    def _moe(self, index: int, layer: LayerOnGpu, rows: Rows) -> None:
        config, b, tiles = self.config, self.buffers, self._tiles
        count, used = rows.tokens.shape[0], config.experts_used
        x, chosen, weights = b.x_plain[:count], b.chosen[:count], b.weights[:count]
        gemm(self._half.of([layer.router]), x, b.logits[:count], tiles)
        choose_experts(
            b.logits,
            layer.bias,
            layer.table,
            rows.tokens,
            b.chosen,
            b.weights,
            config.expert_scale,
            count,
            normalise=config.expert_norm,
        )
        pairs = sort_pairs(chosen, config.experts, tiles.experts_in[0])
        hidden, out = b.hidden[: count * used], b.expert_out[:count]
        experts_gate_up(
            layer.gate,
            layer.up,
            self._tables,
            reorder(x, layer.gate.format),
            pairs,
            weights,
            hidden,
            config.swiglu_clamp[index],
            tiles,
        )
        experts_down_rows(layer.down, reorder(hidden, layer.down.format), pairs, used, out, tiles)
        gemm(self._half.of([layer.shared_gate, layer.shared_up]), x, b.both[:count], tiles)
        swiglu_rows(b.both[:count], b.shared[:count], config.swiglu_clamp_shared[index])
        gemm(self._half.of([layer.shared_down]), b.shared[:count], out[:, used], tiles)


def _half_matrices(layer: LayerOnGpu) -> tuple[Matrix, ...]:
    """Those that are unpacked to float16."""
    dense = (
        layer.inputs,
        layer.q_b,
        layer.output_a,
        layer.output_b,
        layer.router,
        layer.shared_gate,
        layer.shared_down,
    )
    return tuple(
        one for one in (*dense, layer.compress, layer.index_q_b) if one is not None and one.format != "F16"
    )


def _narrow(buffer: Tensor, rows: int, columns: int) -> Tensor:
    """``[rows, columns]`` contiguous at the buffer's beginning."""
    return buffer.view(-1)[: rows * columns].view(rows, columns)


def _ints(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
