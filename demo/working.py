"""The training copy of the weights: full-precision masters, and what the forward pass sees of them.

Large matrices are seen in the working type and, once quantization is on, as the file will give them back;
their gradients go to the masters unchanged (straight through the rounding).
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor
from transformers import DeepseekV4ForCausalLM

from demo.names import Source, sources
from demo.quantize.blocks import SUPER_BLOCK
from demo.quantize.formats import QUANTIZERS
from demo.recipe import format_of
from worker.model.config import ModelConfig

_QUANTIZED_CHUNK = 1 << 16
"""Super-blocks quantized at once, which bounds the codebook search's memory to 2 GiB."""


class Working:
    """Masters by transformers' names, and the tensors that the forward pass takes."""

    def __init__(
        self, network: DeepseekV4ForCausalLM, config: ModelConfig, dtype: torch.dtype, device: torch.device
    ) -> None:
        network.to(device)  # type: ignore[arg-type]
        self.masters: dict[str, Tensor] = dict(network.named_parameters())
        self.buffers: dict[str, Tensor] = dict(network.named_buffers())
        self.leaves: dict[str, Tensor] = {}
        for name, master in self.masters.items():
            is_large = name.endswith(("proj.weight", "gate_up_proj", "down_proj", "lm_head.weight"))
            leaf = master.detach().to(dtype, copy=True).requires_grad_() if is_large else master
            self.leaves[name] = leaf
        self.by_format: dict[str, list[Source]] = defaultdict(list)
        for source in sources(config):
            if format_of(source.spec) in QUANTIZERS:
                self.by_format[format_of(source.spec)].append(source)

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
