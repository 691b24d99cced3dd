"""Compressed key/value entries: one learned average of a window of tokens.

Each token contributes a vector and, per dimension, a score; an entry is the softmax-weighted sum over the
window's slots. With ratio 4 windows overlap: an entry pools eight slots, the previous window's first halves
(series a) and its own second halves (series b). With other ratios it pools its own tokens. Norm, rotation and
rounding follow outside.
"""

from __future__ import annotations

from torch import Tensor

from kernels.pointwise import exp


def pool_windows(vectors: Tensor, scores: Tensor) -> Tensor:
    """``Σ_slot softmax_slot(scores) · vectors``.

    Args:
        vectors: float32 ``[W, slots, D]``.
        scores: float32 ``[W, slots, D]``; −inf where a slot does not exist (before the first window).

    Returns:
        float32 ``[W, D]``, each window on its own.
    """
    weights = exp(scores - scores.amax(1, keepdim=True))
    weighted = weights * vectors
    numerator, denominator = weighted[:, 0], weights[:, 0]
    for slot in range(1, vectors.shape[1]):
        numerator = numerator + weighted[:, slot]
        denominator = denominator + weights[:, slot]
    return numerator / denominator
