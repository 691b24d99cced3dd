"""Every kernel of the real model compiled for GB10, which need not be there: it must fit and not spill."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import triton
from support.aot import Compiled, compiling
from torch import Tensor

from kernels.gpu import tiles
from worker.bank.layout import Span
from worker.bank.store import KvGeometry, KvStore
from worker.gguf.presets import FLASH
from worker.gpu import decode, prefill, weights
from worker.gpu.source import RandomSource
from worker.model.config import ModelConfig

SHARED_BYTES = 101_376
SPILLED_BYTES = 128
CONTEXT = 262144
META = torch.device("meta")

pytestmark = pytest.mark.skipif(
    triton.knobs.runtime.interpret, reason="interpreted kernels cannot be compiled in the same process"
)


class _NoRows(RandomSource):
    """Shapes and formats without data."""

    def rows(self, name: str) -> Iterator[Tensor]:
        return iter(())


def _few_layers(**changes: object) -> ModelConfig:
    """Flash with one layer of each kind: hashed, with each ratio, and chosen by score."""
    kinds = replace(FLASH, layers=4, compress_ratios=(0, 4, 128, 4), hash_layers=1)
    return replace(kinds, swiglu_clamp=(10.0,) * 4, swiglu_clamp_shared=(10.0,) * 4, **changes)


def _half(config: ModelConfig) -> ModelConfig:
    """What one of two ranks has of it."""
    return replace(
        config, heads=config.heads // 2, o_groups=config.o_groups // 2, expert_width=config.expert_width // 2
    )


def _compiled(config: ModelConfig, mix: str, monkeypatch: pytest.MonkeyPatch) -> list[Compiled]:
    source = _NoRows(config, mix, 1, META)
    monkeypatch.setattr(
        weights._Loader, "vector", lambda self, name: torch.empty(source.shape(name), device=META)
    )
    monkeypatch.setattr(
        weights._Loader,
        "table",
        lambda self, name: torch.empty(source.shape(name), dtype=torch.int32, device=META),
    )
    for module in (decode, prefill):
        for name in ("grid_words", "sign_words"):
            monkeypatch.setattr(
                module, name, lambda device: torch.empty(256, dtype=torch.int32, device=device)
            )
    monkeypatch.setattr(prefill, "tiles_for", lambda device: tiles.SMALL)
    loaded = weights.load_weights(source, config, META)
    geometry = KvGeometry(config, rounding=True)
    store = KvStore(geometry, 1, geometry.pages_for(CONTEXT), META, spare=1)
    with compiling(121) as compiled:
        step = decode.DecodeForward(config, loaded, store, CONTEXT)
        for rows in (1, 8):
            step.run(rows)
        chunk = prefill.PrefillForward(config, loaded, store, CONTEXT, 1024)
        pages = list(range(geometry.pages_for(CONTEXT)))
        for _ in chunk.run(Span(0, 200_000, list(range(1024)), pages, 1)):
            pass
    return compiled


@pytest.mark.parametrize(("mix", "half"), [("q2", False), ("q4", True)])
@pytest.mark.timeout(600)
def test_kernels_fit_gb10(mix: str, half: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config = _few_layers()
    compiled = _compiled(_half(config) if half else config, mix, monkeypatch)
    names = {one.name for one in compiled}
    assert {"_q8", "_attend", "_attend_rows", "_gemm", "_gate_up", "_down", "_select"} <= names
    too_large = [(one.name, one.shared) for one in compiled if one.shared > SHARED_BYTES]
    spilling = [(one.name, one.spilled) for one in compiled if one.spilled > SPILLED_BYTES]
    assert not too_large, f"shared memory a block: {too_large}"
    assert not spilling, f"bytes spilled: {spilling}"
