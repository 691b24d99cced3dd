"""The architecture of one model as its GGUF metadata states it; nothing is fixed to one model's sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from worker.errors import ModelFileError
from worker.model.metadata import Metadata

ARCHITECTURE = "deepseek4"

_SQRT_SOFTPLUS = 4
_MAX_LAYERS = 1024
_MAX_WIDTH = 1 << 20
_MAX_VOCAB = 1 << 22
_MAX_POSITIONS = 1 << 24
"""Positions are float32 in the rotary angles, which counts exactly up to here."""


@dataclass(frozen=True)
class Yarn:
    """Stretching of the compressed layers' rotary frequencies to ``factor · original_context`` positions."""

    factor: float
    original_context: int
    beta_fast: float
    beta_slow: float


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and constants of a DeepSeek-V4 model.

    ``compress_ratios``, ``swiglu_clamp`` and ``swiglu_clamp_shared`` have one entry a layer. A ratio of 0
    is a layer with a sliding window only, 4 one with overlapping windows and an indexer, any other one with
    plain windows.
    """

    name: str
    layers: int
    hidden: int
    vocab: int
    context: int
    """Longest context the model was made for, in tokens."""
    heads: int
    head_dim: int
    q_rank: int
    o_rank: int
    """Width of one output group's low-rank projection."""
    o_groups: int
    window: int
    """Raw positions a token sees, itself included."""
    rms_eps: float
    compress_ratios: tuple[int, ...]
    rope_dim: int
    rope_base: float
    """Base of layers with ratio 0."""
    compress_rope_base: float
    yarn: Yarn | None
    """Applies to layers with a ratio; None leaves their frequencies as they are."""
    index_heads: int
    index_dim: int
    index_top_k: int
    experts: int
    experts_used: int
    expert_width: int
    shared_experts: int
    """The shared expert is one network of ``shared_experts · expert_width``."""
    expert_scale: float
    expert_norm: bool
    hash_layers: int
    """The first layers, whose experts follow from the token id alone."""
    swiglu_clamp: tuple[float, ...]
    swiglu_clamp_shared: tuple[float, ...]
    streams: int
    """Residual streams of the hyper-connections."""
    sinkhorn_iterations: int
    hc_eps: float
    bos_token: int
    eos_token: int

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, object], source: str) -> ModelConfig:
        """Reads and checks the metadata of the file called ``source``.

        Raises:
            ModelFileError: a key is missing, of the wrong type, out of range, or contradicts another.
        """
        architecture = Metadata(metadata, ARCHITECTURE, source).text("general.architecture")
        if architecture != ARCHITECTURE:
            raise ModelFileError(
                f"{source}: general.architecture is {architecture[:40]!r}, expected {ARCHITECTURE!r}",
                "this engine serves DeepSeek-V4 models only",
            )
        values = Metadata(metadata, ARCHITECTURE, source)
        _check_fixed(values)
        layers = values.integer(".block_count", 1, _MAX_LAYERS)
        clamp = values.numbers(".swiglu_clamp_exp", layers, 1e-6, 1e9)
        has_shared_clamp = values.has(".swiglu_clamp_shexp")
        shared_clamp = values.numbers(".swiglu_clamp_shexp", layers, 1e-6, 1e9) if has_shared_clamp else clamp
        vocab = _vocab(values)
        config = cls(
            name=values.text("general.name", "unnamed"),
            layers=layers,
            hidden=values.integer(".embedding_length", 1, _MAX_WIDTH),
            vocab=vocab,
            context=values.integer(".context_length", 1, _MAX_POSITIONS),
            heads=values.integer(".attention.head_count", 1, 4096),
            head_dim=values.integer(".attention.key_length", 2, 8192),
            q_rank=values.integer(".attention.q_lora_rank", 1, _MAX_WIDTH),
            o_rank=values.integer(".attention.output_lora_rank", 1, _MAX_WIDTH),
            o_groups=values.integer(".attention.output_group_count", 1, 4096),
            window=values.integer(".attention.sliding_window", 1, 65536),
            rms_eps=values.number(".attention.layer_norm_rms_epsilon", 1e-12, 0.1),
            compress_ratios=values.integers(".attention.compress_ratios", layers, 0, 65536),
            rope_dim=values.integer(".rope.dimension_count", 2, 8192),
            rope_base=values.number(".rope.freq_base", 1.0, 1e12, 10000.0),
            compress_rope_base=values.number(".attention.compress_rope_freq_base", 1.0, 1e12),
            yarn=_yarn(values),
            index_heads=values.integer(".attention.indexer.head_count", 1, 4096),
            index_dim=values.integer(".attention.indexer.key_length", 2, 8192),
            index_top_k=values.integer(".attention.indexer.top_k", 1, 65536),
            experts=values.integer(".expert_count", 1, 65536),
            experts_used=values.integer(".expert_used_count", 1, 1024),
            expert_width=values.integer(".expert_feed_forward_length", 1, _MAX_WIDTH),
            shared_experts=values.integer(".expert_shared_count", 1, 64),
            expert_scale=values.number(".expert_weights_scale", 1e-6, 1e6, 1.0),
            expert_norm=values.boolean(".expert_weights_norm"),
            hash_layers=values.integer(".hash_layer_count", 0, layers),
            swiglu_clamp=clamp,
            swiglu_clamp_shared=shared_clamp,
            streams=values.integer(".hyper_connection.count", 1, 64),
            sinkhorn_iterations=values.integer(".hyper_connection.sinkhorn_iterations", 1, 1000),
            hc_eps=values.number(".hyper_connection.epsilon", 1e-12, 0.1),
            bos_token=values.integer("tokenizer.ggml.bos_token_id", 0, vocab - 1),
            eos_token=values.integer("tokenizer.ggml.eos_token_id", 0, vocab - 1),
        )
        _check_together(config, values)
        return config


def _vocab(values: Metadata) -> int:
    """The number of token ids: stated, or else counted in the tokenizer; both must agree."""
    tokens_key = "tokenizer.ggml.tokens"
    if not values.has(tokens_key):
        return values.integer(".vocab_size", 2, _MAX_VOCAB)
    counted = values.length(tokens_key)
    stated = values.integer(".vocab_size", 2, _MAX_VOCAB, counted)
    if stated != counted:
        raise values.error(".vocab_size", f"is {stated}, but {tokens_key} has {counted} entries")
    return stated


def _yarn(values: Metadata) -> Yarn | None:
    kind = values.text(".rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind != "yarn":
        raise values.error(".rope.scaling.type", f"is {kind[:40]!r}, expected 'yarn' or 'none'")
    fast = values.number(".rope.scaling.yarn_beta_fast", 1e-3, 1e6, 32.0)
    slow = values.number(".rope.scaling.yarn_beta_slow", 1e-3, 1e6, 1.0)
    if slow > fast:
        raise values.error(".rope.scaling.yarn_beta_slow", f"is {slow:g}, above yarn_beta_fast {fast:g}")
    return Yarn(
        factor=values.number(".rope.scaling.factor", 1.0, 1e6),
        original_context=values.integer(".rope.scaling.original_context_length", 1, _MAX_POSITIONS),
        beta_fast=fast,
        beta_slow=slow,
    )


def _check_fixed(values: Metadata) -> None:
    """Keys that allow the one value this architecture is implemented for."""
    values.integer(".attention.head_count_kv", 1, 1, default=1)
    values.integer(".expert_gating_func", _SQRT_SOFTPLUS, _SQRT_SOFTPLUS, default=_SQRT_SOFTPLUS)
    for key in (".expert_group_count", ".expert_group_used_count"):
        values.integer(key, 0, 1, default=0)


def _check_together(config: ModelConfig, values: Metadata) -> None:
    """What no single key can tell."""
    value_dim = values.integer(".attention.value_length", 1, 8192, default=config.head_dim)
    if value_dim != config.head_dim:
        raise values.error(".attention.value_length", f"is {value_dim}, but key_length is {config.head_dim}")
    if config.heads % config.o_groups:
        raise values.error(
            ".attention.output_group_count", f"is {config.o_groups}, does not divide {config.heads} heads"
        )
    if config.rope_dim % 2:
        raise values.error(".rope.dimension_count", f"is {config.rope_dim}, expected an even number")
    if config.rope_dim > config.head_dim:
        raise values.error(
            ".rope.dimension_count", f"is {config.rope_dim}, above the heads' {config.head_dim}"
        )
    if 4 in config.compress_ratios and config.rope_dim > config.index_dim:
        raise values.error(
            ".attention.indexer.key_length", f"is {config.index_dim}, below the rotary {config.rope_dim}"
        )
    if 1 in config.compress_ratios:
        raise values.error(".attention.compress_ratios", "has a ratio of 1, expected 0 or at least 2")
    if config.experts_used > config.experts:
        raise values.error(
            ".expert_used_count", f"is {config.experts_used}, above expert_count {config.experts}"
        )
    if config.bos_token == config.eos_token:
        raise values.error("tokenizer.ggml.eos_token_id", f"is {config.eos_token}, the same as bos_token_id")
