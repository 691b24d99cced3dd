"""Which format each tensor ships in.

Routed experts take two bits a weight, in Flash's own pair of formats; everything else is what the published
two-bit files use.
"""

from __future__ import annotations

from demo.names import Source, sources
from worker.gguf.schema import Role, TensorSpec
from worker.model.config import ModelConfig

FOUR_BIT_LAYERS: frozenset[int] = frozenset()
"""Layers whose experts need more than two bits."""

_BY_ROLE = {
    Role.VECTOR: "F32",
    Role.MATRIX: "F16",
    Role.PROJECTION: "Q8_0",
    Role.TOKEN_TABLE: "I32",
}


def shipped(config: ModelConfig) -> list[tuple[Source, str]]:
    """Every tensor of the file with the name of its format."""
    return [(source, format_of(source.spec)) for source in sources(config)]


def format_of(spec: TensorSpec) -> str:
    """The GGUF name of a tensor's format."""
    if spec.role in _BY_ROLE:
        return _BY_ROLE[spec.role]
    if int(spec.name.split(".")[1]) in FOUR_BIT_LAYERS:
        return "Q4_K"
    return "IQ2_XXS" if spec.role is Role.EXPERT_IN else "Q2_K"
