"""The training copy of the weights: full-precision masters, and what the forward pass sees of them.

Large matrices are seen in the working type and, once quantization is on, as the file will give them back;
their gradients go to the masters unchanged (straight through the rounding).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

from demo.names import Source
from demo.quantize.blocks import SUPER_BLOCK
from demo.quantize.formats import QUANTIZERS

_QUANTIZED_CHUNK = 1 << 16
"""Super-blocks quantized at once, which bounds the codebook search's memory to 2 GiB."""


def is_large(name: str) -> bool:
    """Whether a parameter is a large matrix, whose products are in the working type."""
    return name.endswith(("proj.weight", "gate_up_proj", "down_proj", "lm_head.weight"))


class Working:
    """Masters by transformers' names, and the tensors that the forward pass takes.

    Args:
        masters: parameters, trained in place.
        buffers: what has no gradient.
        formats: the file's tensors with the names of their formats.
        dtype: of the large matrices' copies.
    """

    def __init__(
        self,
        masters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        formats: list[tuple[Source, str]],
        dtype: torch.dtype,
    ) -> None:
        self.masters, self.buffers = dict(masters), dict(buffers)
        self.leaves: dict[str, Tensor] = {}
        for name, master in self.masters.items():
            leaf = master.detach().to(dtype, copy=True).requires_grad_() if is_large(name) else master
            self.leaves[name] = leaf
        self.by_format: dict[str, list[Source]] = defaultdict(list)
        for source, name in formats:
            if name in QUANTIZERS:
                self.by_format[name].append(source)

    def weights(self) -> dict[str, Tensor]:
        """What :func:`demo.network.run` takes."""
        return self.buffers | self.leaves

    @torch.no_grad()
    def refresh(self, quantized: bool) -> None:
        """Brings the forward pass's copies up to date with the masters."""
        names = [name for name, leaf in self.leaves.items() if leaf is not self.masters[name]]
        torch._foreach_copy_([self.leaves[name] for name in names], [self.masters[name] for name in names])
        if quantized:
            for name, parts in self.by_format.items():
                self._quantize(name, parts)

    @torch.no_grad()
    def collect_gradients(self) -> None:
        """Hands the copies' gradients to the masters, and clears them."""
        for name, leaf in self.leaves.items():
            if leaf is not self.masters[name] and leaf.grad is not None:
                self.masters[name].grad = leaf.grad.float()
                leaf.grad = None

    def clear_gradients(self) -> None:
        """After the optimizers' step."""
        for master in self.masters.values():
            master.grad = None

    def _quantize(self, name: str, parts: list[Source]) -> None:
        blocks = torch.cat([part.of(self.masters).reshape(-1, SUPER_BLOCK) for part in parts])
        rounded = torch.cat([QUANTIZERS[name].rounded(chunk) for chunk in blocks.split(_QUANTIZED_CHUNK)])
        at = 0
        for part in parts:
            target = part.of(self.leaves)
            count = target.numel() // SUPER_BLOCK
            target.copy_(rounded[at : at + count].view(target.shape))
            at += count
