"""Quantizers by the format's GGUF name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from demo.quantize import iq2_xxs, q2_k, q4_k, q8_0


@dataclass(frozen=True)
class Quantizer:
    """``rounded`` gives a matrix as the file will give it back, ``pack`` the file's rows of bytes."""

    rounded: Callable[[Tensor], Tensor]
    pack: Callable[[Tensor], NDArray[np.uint8]]


QUANTIZERS: Mapping[str, Quantizer] = MappingProxyType(
    {
        "Q8_0": Quantizer(q8_0.rounded, q8_0.pack),
        "Q2_K": Quantizer(q2_k.rounded, q2_k.pack),
        "Q4_K": Quantizer(q4_k.rounded, q4_k.pack),
        "IQ2_XXS": Quantizer(iq2_xxs.rounded, iq2_xxs.pack),
    }
)
