"""The tensors a DeepSeek-V4 file must hold, by configuration, and the check of a file against them.

A file may hold more than the main model: the multi-token-prediction block (``mtp.*``, or layers numbered
from ``block_count`` on) is no part of it and is passed over. Any other surplus tensor means that the file
was made for an architecture that computes something else, and is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, auto

from kernels.quant.formats import FORMATS
from worker.errors import ModelFileError
from worker.gguf.read import GgufFile, TensorInfo
from worker.model.config import ModelConfig

_LAYER_NAME = re.compile(r"blk\.(\d{1,9})\.")
_SHOWN = 5


class Role(Enum):
    """What a tensor is for; files choose its type by this."""

    VECTOR = auto()
    """Norms, biases, sinks: one-dimensional, kept in full precision."""
    MATRIX = auto()
    """Embedding, hyper-connections, compressors, indexers, routers: sensitive matrices."""
    PROJECTION = auto()
    """Attention projections, shared experts, output head."""
    EXPERT_IN = auto()
    """Routed experts' gate and up."""
    EXPERT_OUT = auto()
    """Routed experts' down."""
    TOKEN_TABLE = auto()
    """A hash layer's expert ids by token: int32."""


@dataclass(frozen=True)
class TensorSpec:
    """A tensor the architecture has; ``shape`` is in torch's order."""

    name: str
    shape: tuple[int, ...]
    role: Role


def expected_tensors(config: ModelConfig) -> list[TensorSpec]:
    """Every tensor of the main model: those before the layers first, then layer by layer."""
    specs = list(_global_tensors(config))
    for layer in range(config.layers):
        specs.extend(_layer_tensors(config, layer))
    return specs


def check_tensors(file: GgufFile, config: ModelConfig) -> None:
    """Checks that the file holds exactly the tensors of the main model, with their shapes, in usable types.

    Raises:
        ModelFileError: tensors are missing, surplus, of another shape, or of a type that cannot be used;
        the message
            names each (the first few), what was expected and what was found.
    """
    check_against(file, expected_tensors(config), lambda name: is_ignorable(name, config))


def check_against(
    file: GgufFile, expected: list[TensorSpec], ignorable: Callable[[str], bool] = lambda _: False
) -> None:
    """Checks that the file holds exactly the expected tensors, apart from ignorable ones.

    Raises:
        ModelFileError: as :func:`check_tensors`.
    """
    specs = {spec.name: spec for spec in expected}
    problems = [
        problem for spec in specs.values() for problem in _problems(file.tensors.get(spec.name), spec)
    ]
    problems += [
        f"{info.name[:80]} in {info.path.name}: not a tensor of this architecture"
        for info in file.tensors.values()
        if info.name not in specs and not ignorable(info.name)
    ]
    if problems:
        shown = "; ".join(problems[:_SHOWN])
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise ModelFileError(
            f"{file.path}: tensors do not fit its metadata: {shown}{more}",
            "the file was converted for another engine or model; get another one",
        )


def is_ignorable(name: str, config: ModelConfig) -> bool:
    """Whether a tensor belongs to the multi-token-prediction block, which the main model runs without."""
    match = _LAYER_NAME.match(name)
    return name.startswith("mtp.") or (match is not None and int(match[1]) >= config.layers)


def _problems(info: TensorInfo | None, spec: TensorSpec) -> Iterator[str]:
    kind = "I32" if spec.role is Role.TOKEN_TABLE else "weights"
    if info is None:
        yield f"{spec.name}: missing, expected {list(spec.shape)} {kind}"
        return
    where = f"{spec.name} in {info.path.name}"
    if info.shape != spec.shape:
        yield f"{where}: expected shape {list(spec.shape)}, found {list(info.shape)}"
    is_table = info.format is FORMATS["I32"]
    if is_table != (spec.role is Role.TOKEN_TABLE):
        yield f"{where}: expected {kind}, found {info.format.name}"


def _global_tensors(c: ModelConfig) -> Iterator[TensorSpec]:
    yield TensorSpec("token_embd.weight", (c.vocab, c.hidden), Role.MATRIX)
    yield TensorSpec("output.weight", (c.vocab, c.hidden), Role.PROJECTION)
    yield TensorSpec("output_norm.weight", (c.hidden,), Role.VECTOR)
    yield TensorSpec("output_hc_fn.weight", (c.streams, c.streams * c.hidden), Role.MATRIX)
    yield TensorSpec("output_hc_base.weight", (c.streams,), Role.VECTOR)
    yield TensorSpec("output_hc_scale.weight", (1,), Role.VECTOR)


def _layer_tensors(c: ModelConfig, layer: int) -> Iterator[TensorSpec]:
    return layer_tensors(c, f"blk.{layer}.", c.compress_ratios[layer], is_hash=layer < c.hash_layers)


def layer_tensors(c: ModelConfig, prefix: str, ratio: int, *, is_hash: bool) -> Iterator[TensorSpec]:
    """The tensors of one layer of a compression ratio, their names after ``prefix``."""
    yield from _mix_tensors(c, prefix + "hc_attn")
    yield from _mix_tensors(c, prefix + "hc_ffn")
    yield from _attention_tensors(c, prefix)
    if ratio:
        yield from _compressor_tensors(c, prefix + "attn_compressor", ratio, c.head_dim)
    if ratio == 4:
        yield from _indexer_tensors(c, prefix, ratio)
    yield from _moe_tensors(c, prefix, is_hash=is_hash)


def _mix_tensors(c: ModelConfig, prefix: str) -> Iterator[TensorSpec]:
    """A hyper-connection's: one pre and one post weight a stream, and a matrix from streams to streams."""
    mixes = (2 + c.streams) * c.streams
    yield TensorSpec(f"{prefix}_fn.weight", (mixes, c.streams * c.hidden), Role.MATRIX)
    yield TensorSpec(f"{prefix}_base.weight", (mixes,), Role.VECTOR)
    yield TensorSpec(f"{prefix}_scale.weight", (3,), Role.VECTOR)


def _attention_tensors(c: ModelConfig, prefix: str) -> Iterator[TensorSpec]:
    width = c.heads * c.head_dim
    yield TensorSpec(prefix + "attn_norm.weight", (c.hidden,), Role.VECTOR)
    yield TensorSpec(prefix + "attn_q_a.weight", (c.q_rank, c.hidden), Role.PROJECTION)
    yield TensorSpec(prefix + "attn_q_a_norm.weight", (c.q_rank,), Role.VECTOR)
    yield TensorSpec(prefix + "attn_q_b.weight", (width, c.q_rank), Role.PROJECTION)
    yield TensorSpec(prefix + "attn_kv.weight", (c.head_dim, c.hidden), Role.PROJECTION)
    yield TensorSpec(prefix + "attn_kv_a_norm.weight", (c.head_dim,), Role.VECTOR)
    yield TensorSpec(prefix + "attn_sinks.weight", (c.heads,), Role.VECTOR)
    yield TensorSpec(
        prefix + "attn_output_a.weight", (c.o_groups * c.o_rank, width // c.o_groups), Role.PROJECTION
    )
    yield TensorSpec(prefix + "attn_output_b.weight", (c.hidden, c.o_groups * c.o_rank), Role.PROJECTION)


def _compressor_tensors(c: ModelConfig, prefix: str, ratio: int, dim: int) -> Iterator[TensorSpec]:
    """Ratio 4 pools overlapping windows: two series side by side."""
    width = (2 if ratio == 4 else 1) * dim
    yield TensorSpec(f"{prefix}_kv.weight", (width, c.hidden), Role.MATRIX)
    yield TensorSpec(f"{prefix}_gate.weight", (width, c.hidden), Role.MATRIX)
    yield TensorSpec(f"{prefix}_ape.weight", (ratio, width), Role.MATRIX)
    yield TensorSpec(f"{prefix}_norm.weight", (dim,), Role.VECTOR)


def _indexer_tensors(c: ModelConfig, prefix: str, ratio: int) -> Iterator[TensorSpec]:
    yield TensorSpec(prefix + "indexer.attn_q_b.weight", (c.index_heads * c.index_dim, c.q_rank), Role.MATRIX)
    yield TensorSpec(prefix + "indexer.proj.weight", (c.index_heads, c.hidden), Role.MATRIX)
    yield from _compressor_tensors(c, prefix + "indexer_compressor", ratio, c.index_dim)


def _moe_tensors(c: ModelConfig, prefix: str, is_hash: bool) -> Iterator[TensorSpec]:
    yield TensorSpec(prefix + "ffn_norm.weight", (c.hidden,), Role.VECTOR)
    yield TensorSpec(prefix + "ffn_gate_inp.weight", (c.experts, c.hidden), Role.MATRIX)
    if is_hash:
        yield TensorSpec(prefix + "ffn_gate_tid2eid.weight", (c.vocab, c.experts_used), Role.TOKEN_TABLE)
    else:
        yield TensorSpec(prefix + "exp_probs_b.bias", (c.experts,), Role.VECTOR)
    routed_in, routed_out = (c.experts, c.expert_width, c.hidden), (c.experts, c.hidden, c.expert_width)
    yield TensorSpec(prefix + "ffn_gate_exps.weight", routed_in, Role.EXPERT_IN)
    yield TensorSpec(prefix + "ffn_up_exps.weight", routed_in, Role.EXPERT_IN)
    yield TensorSpec(prefix + "ffn_down_exps.weight", routed_out, Role.EXPERT_OUT)
    shared = c.shared_experts * c.expert_width
    yield TensorSpec(prefix + "ffn_gate_shexp.weight", (shared, c.hidden), Role.PROJECTION)
    yield TensorSpec(prefix + "ffn_up_shexp.weight", (shared, c.hidden), Role.PROJECTION)
    yield TensorSpec(prefix + "ffn_down_shexp.weight", (c.hidden, shared), Role.PROJECTION)
