"""The optimizers of a training: Muon for the projections, AdamW for everything else."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from demo.muon import Muon
from worker.model.config import ModelConfig

_MATRIX_RATE, _OTHER_RATE = 0.01, 2e-3
_CLIP = 1.0
_ADAM_STATE = ("step", "exp_avg", "exp_avg_sq")


class Optimizers:
    """Both, over masters by transformers' names."""

    def __init__(self, masters: Mapping[str, Tensor], config: ModelConfig) -> None:
        matrices = {name: _stacked(name, config) for name in masters if _is_matrix(name)}
        self.muon = Muon(
            [(masters[name], parts) for name, parts in matrices.items()], momentum=0.95, decay=0.03
        )
        self.others = {name: master for name, master in masters.items() if name not in matrices}
        self.adam = torch.optim.AdamW(
            list(self.others.values()), lr=_OTHER_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )

    def step(self, rate: float) -> Tensor:
        """One update at ``rate`` of the full learning rates; returns the other parameters' gradient norm."""
        norm = torch.nn.utils.clip_grad_norm_(self.others.values(), _CLIP, foreach=True)
        self.muon.step(_MATRIX_RATE * rate)
        self.adam.param_groups[0]["lr"] = _OTHER_RATE * rate
        self.adam.step()
        return norm

    def state(self) -> dict[str, Tensor]:
        """Everything that :meth:`restore` needs to go on as if never interrupted."""
        found = {f"muon/{rows}x{columns}": each for (rows, columns), each in self.muon.velocity.items()}
        for name, master in self.others.items():
            for key, value in self.adam.state.get(master, {}).items():
                found[f"adam/{key}/{name}"] = value
        return found

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Goes back to a saved state."""
        for (rows, columns), each in self.muon.velocity.items():
            each.copy_(state[f"muon/{rows}x{columns}"])
        for name, master in self.others.items():
            self.adam.state[master] = {
                key: state[f"adam/{key}/{name}"].to(master.device) for key in _ADAM_STATE
            }


def _is_matrix(name: str) -> bool:
    return name.endswith(("_proj.weight", "gate_up_proj", "down_proj")) and "weights_proj" not in name


def _stacked(name: str, config: ModelConfig) -> int:
    """How many matrices a parameter stacks."""
    if name.endswith("gate_up_proj"):
        return 2 * config.experts
    if name.endswith("experts.down_proj"):
        return config.experts
    return config.o_groups if name.endswith("o_a_proj.weight") else 1
