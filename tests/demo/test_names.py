"""Every tensor of the file has its parameter, and every parameter its tensors."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import torch

from demo.architecture import DEMO_MODEL, new_model
from demo.names import sources
from worker.gguf.schema import expected_tensors

CONFIG = replace(
    DEMO_MODEL,
    layers=4,
    compress_ratios=(0, 4, 128, 4),
    hash_layers=1,
    swiglu_clamp=(10.0,) * 4,
    swiglu_clamp_shared=(10.0,) * 4,
)


def test_parameters_are_all_written_once_in_the_file_s_shapes() -> None:
    weights = new_model(CONFIG, 0).state_dict()
    halves: dict[str, list[int | None]] = defaultdict(list)
    for source in sources(CONFIG):
        assert tuple(source.of(weights).shape) == source.spec.shape, source.spec.name
        halves[source.parameter].append(source.half)
    assert all(parts in ([None], [0, 1]) for parts in halves.values())
    named = set(halves)
    assert named <= set(weights)
    left = set(weights) - named
    assert not left, "every parameter and saved buffer reaches the file"


def test_the_file_s_names_are_all_there_in_its_order() -> None:
    names = [source.spec.name for source in sources(CONFIG)]
    assert names == [spec.name for spec in expected_tensors(CONFIG)]
    assert len(set(names)) == len(names)


def test_the_halves_of_a_joint_parameter_are_gate_and_up() -> None:
    """transformers computes ``gate, up = linear(x, gate_up_proj).chunk(2)``."""
    weights = new_model(CONFIG, 0).state_dict()
    by_name = {source.spec.name: source for source in sources(CONFIG)}
    joint = weights["model.layers.2.mlp.experts.gate_up_proj"]
    gate, up = joint.chunk(2, 1)
    assert torch.equal(by_name["blk.2.ffn_gate_exps.weight"].of(weights), gate)
    assert torch.equal(by_name["blk.2.ffn_up_exps.weight"].of(weights), up)
