"""Loading of tensors and shards, equal to what the `gguf` package makes of the same file."""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
import os
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.quant.formats import FORMATS
from worker.errors import ModelFileError
from worker.gguf import load
from worker.gguf.load import Shard, read_raw, read_rows
from worker.gguf.random_blocks import random_blocks
from worker.gguf.read import GgufFile, TensorInfo, open_gguf

WEIGHTS = sorted(name for name, fmt in FORMATS.items() if fmt.dequantize is not None)
EXPERTS, ROWS, COLUMNS = 3, 5, 768
TABLE = np.random.default_rng(9).integers(-(2**31), 2**31, (7, 6), dtype=np.int32)
VECTOR = np.random.default_rng(8).standard_normal(48, dtype=np.float32)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> GgufFile:
    """A three-dimensional tensor of every format, a table and a vector."""
    path = tmp_path_factory.mktemp("load") / "all.gguf"
    rng = np.random.default_rng(0)
    writer = GGUFWriter(path, "deepseek4")
    for name in WEIGHTS:
        fmt = FORMATS[name]
        raw = rng.integers(0, 256, (EXPERTS, ROWS, fmt.row_bytes(COLUMNS)), dtype=np.uint8)
        writer.add_tensor(name, raw, raw_dtype=GGMLQuantizationType[name])
    writer.add_tensor("table", TABLE)
    writer.add_tensor("vector", VECTOR)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return open_gguf(path)


@pytest.fixture(scope="module")
def oracle(file: GgufFile) -> dict[str, np.ndarray]:
    with np.errstate(all="ignore"):
        return {
            tensor.name: np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
            for tensor in GGUFReader(file.path).tensors
            if tensor.name in FORMATS
        }


def assert_same(found: torch.Tensor, expected: np.ndarray) -> None:
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(found.numpy()), nan)
    np.testing.assert_array_equal(
        found.contiguous().numpy().view(np.uint32)[~nan], np.ascontiguousarray(expected).view(np.uint32)[~nan]
    )


def read(info: TensorInfo, shard: Shard = load.WHOLE) -> torch.Tensor:
    out = torch.full(shard.shape(info), torch.nan)
    read_rows(info, out, shard)
    return out


@pytest.mark.parametrize("name", WEIGHTS)
def test_whole_tensors(file: GgufFile, oracle: dict[str, np.ndarray], name: str) -> None:
    assert_same(read(file.tensors[name]), oracle[name])


def part_of(size: int, step: int = 1) -> st.SearchStrategy[range | None]:
    bounds = st.tuples(st.integers(0, size // step - 1), st.integers(1, size // step))
    ranges = bounds.map(lambda pair: range(min(pair) * step, max(pair[0] + 1, pair[1]) * step))
    return st.none() | ranges


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(WEIGHTS),
    part_of(EXPERTS),
    part_of(ROWS),
    part_of(COLUMNS, 256),
    st.sampled_from([1, 2, 999]),
)
def test_any_shard_through_any_staging(
    file: GgufFile,
    oracle: dict[str, np.ndarray],
    name: str,
    experts: range | None,
    rows: range | None,
    columns: range | None,
    staging_rows: int,
) -> None:
    info = file.tensors[name]
    shard = Shard(experts, rows, columns)
    box = tuple(
        slice(None) if part is None else slice(part.start, part.stop) for part in (experts, rows, columns)
    )
    expected = oracle[name][box]
    assert shard.shape(info) == expected.shape
    staging = torch.empty(staging_rows * info.row_bytes, dtype=torch.uint8)
    out = torch.full(expected.shape, torch.nan)
    read_rows(info, out, shard, staging=staging)
    assert_same(out, expected)

    raw = torch.zeros(*expected.shape[:2], info.format.row_bytes(expected.shape[2]), dtype=torch.uint8)
    read_raw(info, raw, shard, staging=staging)
    assert raw.numel() == shard.nbytes(info)
    kind = GGMLQuantizationType[name]
    with np.errstate(all="ignore"):
        assert_same(torch.from_numpy(np.array(gguf.quants.dequantize(raw.numpy(), kind))), expected)


def test_two_halves_make_the_whole(file: GgufFile, oracle: dict[str, np.ndarray]) -> None:
    info = file.tensors["Q8_0"]
    halves = [Shard(columns=range(384)), Shard(columns=range(384, 768))]
    assert_same(torch.cat([read(info, half) for half in halves], dim=2), oracle["Q8_0"])


def test_tables_and_vectors(file: GgufFile) -> None:
    table = torch.zeros(7, 6, dtype=torch.int32)
    read_rows(file.tensors["table"], table)
    np.testing.assert_array_equal(table.numpy(), TABLE)
    part = torch.zeros(2, 3, dtype=torch.int32)
    read_rows(file.tensors["table"], part, Shard(rows=range(4, 6), columns=range(1, 4)))
    np.testing.assert_array_equal(part.numpy(), TABLE[4:6, 1:4])
    np.testing.assert_array_equal(read(file.tensors["vector"]).numpy(), VECTOR)
    half = Shard(columns=range(24, 48))
    np.testing.assert_array_equal(read(file.tensors["vector"], half).numpy(), VECTOR[24:])


def test_into_a_part_of_something_larger(file: GgufFile, oracle: dict[str, np.ndarray]) -> None:
    both = torch.zeros(EXPERTS, 2 * ROWS, COLUMNS)
    read_rows(file.tensors["Q6_K"], both[:, ROWS:])
    assert_same(both[:, ROWS:].contiguous(), oracle["Q6_K"])
    assert not both[:, :ROWS].any()


def test_into_a_narrower_type(file: GgufFile) -> None:
    out = torch.zeros(48, dtype=torch.bfloat16)
    read_rows(file.tensors["vector"], out)
    assert torch.equal(out, torch.from_numpy(VECTOR).to(torch.bfloat16))


def test_progress_counts_the_bytes_read(file: GgufFile) -> None:
    info = file.tensors["Q4_K"]
    sizes: list[int] = []
    staging = torch.empty(2 * info.row_bytes, dtype=torch.uint8)
    read_rows(info, torch.empty(info.shape), on_bytes=sizes.append, staging=staging)
    assert sum(sizes) == info.nbytes
    assert len(sizes) == EXPERTS * 3
    sizes.clear()
    one = Shard(experts=range(1, 2))
    read_rows(info, torch.empty(one.shape(info)), one, on_bytes=sizes.append)
    assert sum(sizes) == info.nbytes // EXPERTS == one.nbytes(info)


@pytest.mark.parametrize(
    ("name", "shard"),
    [
        ("Q4_K", Shard(columns=range(128))),
        ("Q4_K", Shard(columns=range(128, 384))),
        ("F32", Shard(rows=range(2, 2))),
        ("F32", Shard(rows=range(ROWS + 1))),
        ("F32", Shard(rows=range(-1, 2))),
        ("F32", Shard(rows=range(0, 4, 2))),
        ("table", Shard(experts=range(1))),
        ("vector", Shard(rows=range(1))),
    ],
)
def test_impossible_shards_are_refused(file: GgufFile, name: str, shard: Shard) -> None:
    with pytest.raises(ValueError, match=name):
        shard.shape(file.tensors[name])


def test_memory_that_does_not_fit_is_refused(file: GgufFile) -> None:
    info = file.tensors["Q4_K"]
    with pytest.raises(ValueError, match="out is"):
        read_rows(info, torch.empty(EXPERTS, ROWS, COLUMNS + 1))
    with pytest.raises(ValueError, match="does not go into"):
        read_rows(info, torch.empty(info.shape, dtype=torch.int32))
    with pytest.raises(ValueError, match="does not go into"):
        read_rows(file.tensors["table"], torch.empty(7, 6))
    with pytest.raises(ValueError, match="staging"):
        read_rows(info, torch.empty(info.shape), staging=torch.empty(info.row_bytes - 1, dtype=torch.uint8))
    with pytest.raises(ValueError, match="uint8"):
        read_raw(info, torch.empty(info.shape))


def test_a_file_that_shrank_or_went_is_told(file: GgufFile, tmp_path: Path) -> None:
    info = file.tensors["Q8_0"]
    path = tmp_path / "copy.gguf"
    path.write_bytes(file.path.read_bytes()[: info.offset + info.nbytes - 1])
    moved = dataclasses.replace(info, path=path)
    with pytest.raises(ModelFileError, match=r"copy\.gguf: ends at byte \d+, within tensor Q8_0"):
        read(moved)
    path.unlink()
    with pytest.raises(ModelFileError, match="cannot be opened"):
        read(moved)
    path.mkdir()
    with pytest.raises(ModelFileError, match="cannot be read"):
        read(moved)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> TensorInfo:
    """40 MB of IQ2_XXS, larger than the staging buffer."""
    path = tmp_path_factory.mktemp("large") / "large.gguf"
    rows, columns = 10000, 16384
    fmt = FORMATS["IQ2_XXS"]
    raw = random_blocks(fmt, rows * columns // 256, 1.0, np.random.default_rng(0)).reshape(rows, -1)
    writer = GGUFWriter(path, "deepseek4")
    writer.add_tensor("w", raw, raw_dtype=GGMLQuantizationType.IQ2_XXS)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return open_gguf(path).tensors["w"]


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_memory_beside_the_target_is_bounded(large: TensorInfo) -> None:
    out = torch.zeros(large.nbytes, dtype=torch.uint8).view(large.shape[0], -1)
    small = Shard(rows=range(1000))
    values = torch.zeros(small.shape(large))
    read_rows(large, values, small)
    highest = before = resident_bytes()

    def watch(_: int) -> None:
        nonlocal highest
        highest = max(highest, resident_bytes())

    tracemalloc.start()
    read_raw(large, out, on_bytes=watch)
    read_rows(large, values, small, on_bytes=watch)
    python_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert large.nbytes > 2 * load.STAGING_BYTES
    assert highest - before < load.STAGING_BYTES + (8 << 20)
    assert python_bytes < 1 << 20


def cached_pages(path: Path) -> int:
    """Pages of the file in the page cache, by mincore."""
    libc = ctypes.CDLL(None, use_errno=True)
    size = path.stat().st_size
    with path.open("r+b") as opened, mmap.mmap(opened.fileno(), size) as mapping:
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        pages = -(-size // mmap.PAGESIZE)
        vector = (ctypes.c_ubyte * pages)()
        assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), vector) == 0
        return sum(byte & 1 for byte in vector)


def test_the_page_cache_is_left_empty(large: TensorInfo) -> None:
    descriptor = os.open(large.path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    pages = large.nbytes // os.sysconf("SC_PAGE_SIZE")
    large.path.read_bytes()
    if cached_pages(large.path) < pages // 2:
        pytest.skip("this file system keeps no page cache")
    read_raw(large, torch.empty(large.nbytes, dtype=torch.uint8).view(large.shape[0], -1))
    assert cached_pages(large.path) < pages // 50
