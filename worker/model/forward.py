"""DeepSeek-V4's forward over one ragged step, in plain torch.

Rows of several banks run together; what a row may read and where its results go is in the step's layout.
Compressed entries are stored as they are computed, past the end of what their bank holds; rings, whose rows
replace older ones, are written after the last layer. So a forward that fails or is given up leaves every bank
as it was.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.attention import Attention, pad_keys
from kernels.compressor import pool_windows
from kernels.hyper import hyper_head, hyper_input, hyper_merge
from kernels.indexer import index_scores, select_entries
from kernels.linear import linear, pad_rows
from kernels.moe import choose_by_score, expert_weights, routed_experts, router_scores, shared_expert
from kernels.norm import rms_norm
from kernels.rope import Rotation, YarnScaling, inverse_frequencies, rotate, rotation
from worker.bank.codec import Planes, RowCodec, put, take
from worker.bank.layout import RingUse, StepLayout
from worker.bank.store import KvStore, LayerStore, WindowRing
from worker.model.config import ModelConfig
from worker.model.weights import CompressorWeights, IndexerWeights, LayerWeights, ModelWeights, MoeWeights


class Model:
    """Weights and their forward.

    Args:
        config: of the model file.
        weights: float32.
    """

    def __init__(self, config: ModelConfig, weights: ModelWeights) -> None:
        self.config = config
        self.weights = weights
        yarn = YarnScaling(**vars(config.yarn)) if config.yarn else None
        self._plain_frequencies = inverse_frequencies(config.rope_dim, config.rope_base, None)
        self._compress_frequencies = inverse_frequencies(config.rope_dim, config.compress_rope_base, yarn)

    @torch.inference_mode()
    def forward(self, layout: StepLayout, store: KvStore) -> Tensor:
        """Runs the step's T rows and writes their state.

        Returns:
            logits, float32 ``[len(layout.output_rows), vocab]``.
        """
        config, weights = self.config, self.weights
        step = _Step(config, layout, store, self._plain_frequencies, self._compress_frequencies)
        embedded = pad_rows(weights.embedding[layout.tokens])
        streams = embedded[:, None].expand(-1, config.streams, -1).clone()
        for index, layer in enumerate(weights.layers):
            x, mix = hyper_input(
                streams, layer.attention_mix, config.sinkhorn_iterations, config.hc_eps, config.rms_eps
            )
            x = rms_norm(x, layer.attention_norm, config.rms_eps)
            streams = hyper_merge(streams, step.attention(index, layer, x), mix)
            x, mix = hyper_input(
                streams, layer.moe_mix, config.sinkhorn_iterations, config.hc_eps, config.rms_eps
            )
            x = rms_norm(x, layer.moe_norm, config.rms_eps)
            streams = hyper_merge(streams, _moe(config, index, layer.moe, x, layout.tokens), mix)
        step.commit()
        wanted = pad_rows(streams[layout.output_rows])
        x = hyper_head(wanted, weights.head_mix, config.hc_eps, config.rms_eps)
        x = rms_norm(x, weights.norm, config.rms_eps)
        return linear(x, weights.output)[: len(layout.output_rows)]


def _moe(config: ModelConfig, index: int, moe: MoeWeights, x: Tensor, tokens: Tensor) -> Tensor:
    """The sub-layer's output for ``x [T padded, hidden]``; padding rows choose no experts."""
    scores = router_scores(x, moe.router)[: len(tokens)]
    if moe.token_experts is not None:
        chosen = moe.token_experts[tokens].to(torch.int64)
    else:
        assert moe.bias is not None
        chosen = choose_by_score(scores, moe.bias, config.experts_used)
    weights = expert_weights(scores, chosen, config.expert_scale, normalise=config.expert_norm)
    out = routed_experts(x[: len(tokens)], chosen, weights, moe.routed, config.swiglu_clamp[index])
    return pad_rows(out) + shared_expert(x, moe.shared, config.swiglu_clamp_shared[index])


class _Step:
    """The attention sub-layer of every layer of one step."""

    def __init__(
        self, config: ModelConfig, layout: StepLayout, store: KvStore, plain: Tensor, compressed: Tensor
    ) -> None:
        self._config = config
        self._layout = layout
        self._store = store
        self._rows = len(layout.tokens)
        self._turns = {0: rotation(layout.positions, plain)}
        self._entry_turns: dict[int, Rotation] = {}
        self._ring_writes: list[tuple[Planes, Tensor, Planes]] = []
        for ratio, ratio_layout in layout.ratios.items():
            self._turns[ratio] = rotation(layout.positions, compressed)
            self._entry_turns[ratio] = rotation(ratio_layout.positions, compressed)

    def attention(self, index: int, layer: LayerWeights, x: Tensor) -> Tensor:
        """The sub-layer's output, float32, for ``x [T padded, hidden]``; rows past T are padding."""
        config, weights, store = self._config, layer.attention, self._store.layers[index]
        ratio, rows = config.compress_ratios[index], self._rows
        turn = self._turns[ratio]
        q_low = rms_norm(linear(x, weights.q_a), weights.q_a_norm, config.rms_eps)
        q = linear(q_low, weights.q_b).unflatten(1, (config.heads, config.head_dim))
        q = rotate(rms_norm(q, None, config.rms_eps)[:rows], turn)
        keys = rms_norm(linear(x, weights.kv), weights.kv_norm, config.rms_eps)[:rows]

        attention = Attention(q, weights.sinks)
        raw_keys = self._raw_keys(store, keys, turn)
        attention.read(self._layout.window, lambda tile: raw_keys[tile])
        if ratio:
            ratio_layout = self._layout.ratios[ratio]
            entries = self._compressed_entries(store, ratio, layer, x, q_low)
            codec = self._store.geometry.keys
            attention.read(
                entries, _entry_reader(codec, store.entries, ratio_layout.entries, entries.numel())
            )
        out = rotate(attention.output(), turn, inverse=True)
        return self._project(pad_rows(out.flatten(1)), weights.output_a, weights.output_b)

    def commit(self) -> None:
        """Writes the rings, once every layer has run."""
        for planes, index, rows in self._ring_writes:
            put(planes, index, rows)

    def _raw_keys(self, store: LayerStore, keys: Tensor, turn: Rotation) -> Tensor:
        """The ring's source of raw keys: those kept from before, then the step's, rounded."""
        codec, ring = self._store.geometry.keys, self._layout.ring
        new = self._encode(codec, keys, turn)
        old = codec.decode(take(store.ring, ring.take))
        self._ring_writes.append((store.ring, ring.put_at, take(new, ring.put_rows)))
        return torch.cat((old, codec.decode(new)))

    def _compressed_entries(
        self, store: LayerStore, ratio: int, layer: LayerWeights, x: Tensor, q_low: Tensor
    ) -> Tensor:
        """Completes the step's entries and returns those that each row reads, int64 ``[T, L]``."""
        layout = self._layout.ratios[ratio]
        assert layer.compressor is not None
        assert store.window is not None
        keys = self._store.geometry.keys
        self._append(keys, store.entries, store.window, layer.compressor, ratio, x)
        if layer.indexer is None:
            return layout.all_visible
        assert store.index_window is not None
        index_keys = self._store.geometry.index_keys
        self._append(index_keys, store.index_entries, store.index_window, layer.indexer.compressor, ratio, x)
        if layout.most_visible <= self._config.index_top_k:
            return layout.all_visible
        return self._select(store, ratio, layer.indexer, x, q_low)

    def _append(
        self,
        codec: RowCodec,
        entries: Planes,
        window: WindowRing,
        weights: CompressorWeights,
        ratio: int,
        x: Tensor,
    ) -> None:
        """Stores the compressor inputs of the step's rows and the entries whose windows they complete."""
        layout, rows = self._layout.ratios[ratio], self._rows
        vectors = linear(x, weights.kv)[:rows]
        scores = linear(x, weights.gate)[:rows] + weights.ape[self._layout.positions % ratio]
        if len(layout.put_at):
            overlap = self._store.geometry.overlap(ratio)
            pooled = pool_windows(
                _window_slots(window.vectors, vectors, layout.ring, layout.slots, overlap, 0.0),
                _window_slots(window.scores, scores, layout.ring, layout.slots, overlap, -torch.inf),
            )
            pooled = rms_norm(pooled, weights.norm, self._config.rms_eps)
            put(entries, layout.put_at, self._encode(codec, pooled, self._entry_turns[ratio]))
        kept = take((vectors, scores), layout.ring.put_rows)
        self._ring_writes.append(((window.vectors, window.scores), layout.ring.put_at, kept))

    def _select(
        self, store: LayerStore, ratio: int, indexer: IndexerWeights, x: Tensor, q_low: Tensor
    ) -> Tensor:
        """The index_top_k best visible entries of each row, int64 ``[T, L]`` into the layout's entries."""
        config, layout, rows = self._config, self._layout.ratios[ratio], self._rows
        codec = self._store.geometry.index_keys
        q = linear(q_low, indexer.q_b)[:rows].unflatten(1, (config.index_heads, config.index_dim))
        q = codec.decode(codec.encode(rotate(q, self._turns[ratio])))
        weight = linear(x, indexer.proj)[:rows] * (config.index_dim * config.index_heads) ** -0.5
        picked = torch.full((rows, config.index_top_k), -1, dtype=torch.int64)
        for span in layout.spans:
            keys = codec.decode(take(store.index_entries, layout.entries[span.entries]))
            if len(keys) == 0:
                continue
            scores = index_scores(q[span.rows], weight[span.rows], keys)
            best = select_entries(scores, layout.visible[span.rows], config.index_top_k)
            picked[span.rows] = torch.where(best < 0, best, best + span.entries.start)
        return pad_keys(picked)

    def _encode(self, codec: RowCodec, rows: Tensor, turn: Rotation) -> Planes:
        """Rounds, rotates and packs normalised rows."""
        if self._store.geometry.rounding:
            rows = rows.to(torch.bfloat16).to(torch.float32)
        return codec.encode(rotate(rows, turn))

    def _project(self, heads: Tensor, output_a: Tensor, output_b: Tensor) -> Tensor:
        groups, _, width = output_a.shape
        low = [
            linear(heads[:, group * width : (group + 1) * width], output_a[group]) for group in range(groups)
        ]
        return linear(torch.cat(low, dim=1), output_b)


def _entry_reader(codec: RowCodec, planes: Planes, entries: Tensor, reads: int) -> Callable[[Tensor], Tensor]:
    """Maps indices into ``entries`` to keys; unpacks each entry once where that is less work than on every
    read.
    """
    if reads < len(entries):
        return lambda tile: codec.decode(take(planes, entries[tile]))
    unpacked = codec.decode(take(planes, entries))
    return lambda tile: unpacked[tile]


def _window_slots(
    ring: Tensor, new: Tensor, use: RingUse, slots: Tensor, overlap: int, absent: float
) -> Tensor:
    """A compressor's inputs by window and slot, float32 ``[W, slots, D]``.

    With overlap the first half of the slots takes series a (the first D columns), the second half series b.
    """
    source = torch.cat((ring[use.take], new))
    width = source.shape[1] // overlap
    per_series = slots.shape[1] // overlap
    parts = []
    for series in range(overlap):
        index = slots[:, series * per_series : (series + 1) * per_series]
        part = source[:, series * width : (series + 1) * width][index.clamp(min=0)]
        parts.append(part.masked_fill(index[:, :, None] < 0, absent))
    return torch.cat(parts, dim=1)
