"""Sizes of the key/value store."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.models import small_config

from worker.bank.banks import Banks, TokenId
from worker.bank.pages import PagePool
from worker.bank.store import KvGeometry, KvStore
from worker.model.config import ModelConfig


def flash_config() -> ModelConfig:
    ratios = (0, 0, *(4, 128) * 20, 4)
    return replace(
        small_config(),
        layers=43,
        compress_ratios=ratios,
        head_dim=512,
        rope_dim=64,
        index_dim=128,
        window=128,
    )


def test_flash_sizes_are_within_their_budgets() -> None:
    geometry = KvGeometry(flash_config(), rounding=True)
    # 21 layers of ratio 4 and 20 of ratio 128: 583-byte key rows, 68-byte index rows.
    assert geometry.bytes_per_token == pytest.approx(21 * (583 + 68) / 4 + 20 * 583 / 128)
    assert geometry.bytes_per_token <= 3520
    assert geometry.bank_bytes <= 18e6
    assert geometry.page_tokens == 128


@pytest.mark.parametrize("rounding", [False, True])
def test_the_store_takes_what_the_geometry_says(rounding: bool) -> None:
    geometry = KvGeometry(small_config(), rounding)
    store = KvStore(geometry, banks=3, pages=5)
    taken = 0
    for layer in store.layers:
        windows = [w for w in (layer.window, layer.index_window) if w is not None]
        planes = [*layer.ring, *layer.entries, *layer.index_entries]
        tensors = [*planes, *(t for w in windows for t in (w.vectors, w.scores))]
        taken += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    assert taken == 3 * geometry.bank_bytes + 5 * geometry.page_bytes


def test_pages_balance_through_growth_undo_and_clearing() -> None:
    geometry = KvGeometry(small_config(), rounding=True)
    banks = Banks(KvStore(geometry, banks=2, pages=6), points=2)
    first, second = banks.all
    for bank, count in ((first, 300), (second, 129)):
        tokens = [TokenId(0)] * count
        banks.span(bank, tokens, 1)
        banks.commit(bank, tokens)
    banks.check()
    assert banks.pool.free == 6 - 3 - 2
    banks.undo(second, 1)
    assert banks.pool.free == 2
    with pytest.raises(ValueError, match="cannot take back 7"):
        banks.undo(first, 7)
    with pytest.raises(ValueError, match="pages wanted"):
        banks.span(first, [TokenId(0)] * 500, 1)
    banks.truncate(first, 0)
    banks.check()
    assert banks.pool.free == 5


def test_page_pool_refuses_a_double_release() -> None:
    pool = PagePool(2)
    pages = pool.allocate(1)
    pool.release(pages)
    with pytest.raises(ValueError, match="not held"):
        pool.release(pages)


def test_store_is_dense_memory() -> None:
    store = KvStore(KvGeometry(small_config(), rounding=True), banks=1, pages=1)
    assert all(
        plane.is_contiguous() and plane.device == torch.device("cpu") for plane in store.layers[1].entries
    )
