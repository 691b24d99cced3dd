"""Files with any damage are either read or refused: no other error, no large allocation, no long wait."""

from __future__ import annotations

import struct
import time
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from worker.errors import ModelFileError
from worker.gguf.presets import TINY
from worker.gguf.read import open_gguf
from worker.gguf.schema import check_tensors
from worker.gguf.synthetic import write_synthetic
from worker.model.config import ModelConfig

PEAK_BYTES = 8 << 20
SECONDS = 5.0
ABSURD = [0, 1, 2**16, 2**24, 2**31 - 1, 2**32 - 1, 2**32, 2**40, 2**62, 2**63, 2**64 - 1]

fuzz = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("fuzz") / "tiny.gguf"
    write_synthetic(path, TINY, "f32", seed=0)
    return path.read_bytes()


@pytest.fixture(scope="module")
def header_bytes(whole: bytes, tmp_path_factory: pytest.TempPathFactory) -> int:
    path = tmp_path_factory.mktemp("fuzz") / "tiny.gguf"
    path.write_bytes(whole)
    return min(info.offset for info in open_gguf(path).tensors.values())


def opens_or_is_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    began = time.monotonic()
    tracemalloc.start()
    try:
        file = open_gguf(path)
        config = ModelConfig.from_metadata(file.metadata, str(path))
        check_tensors(file, config)
    except ModelFileError as error:
        message = str(error)
    else:
        message = str(path)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert str(path) in message
    assert len(message) < 4000
    assert peak < PEAK_BYTES
    assert time.monotonic() - began < SECONDS


@fuzz
@given(data=st.data())
def test_changed_bytes(data: st.DataObject, whole: bytes, header_bytes: int, tmp_path: Path) -> None:
    content = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 8))):
        content[data.draw(st.integers(0, header_bytes - 1))] = data.draw(st.integers(0, 255))
    opens_or_is_refused(tmp_path / "x.gguf", bytes(content))


@fuzz
@given(data=st.data())
def test_absurd_numbers_anywhere(
    data: st.DataObject, whole: bytes, header_bytes: int, tmp_path: Path
) -> None:
    content = bytearray(whole)
    at = data.draw(st.one_of(st.integers(0, 64), st.integers(0, header_bytes - 8)))
    number = data.draw(st.sampled_from(ABSURD))
    if data.draw(st.booleans()):
        content[at : at + 8] = struct.pack("<Q", number)
    else:
        content[at : at + 4] = struct.pack("<I", number & 0xFFFFFFFF)
    opens_or_is_refused(tmp_path / "x.gguf", bytes(content))


@fuzz
@given(data=st.data())
def test_cut_and_spliced(data: st.DataObject, whole: bytes, header_bytes: int, tmp_path: Path) -> None:
    begin = data.draw(st.integers(0, header_bytes))
    end = data.draw(
        st.integers(begin, min(len(whole), begin + data.draw(st.sampled_from([1, 8, 100, 10**7]))))
    )
    filling = data.draw(st.binary(max_size=64))
    opens_or_is_refused(tmp_path / "x.gguf", whole[:begin] + filling + whole[end:])


@fuzz
@given(content=st.binary(max_size=400))
def test_any_bytes_after_the_version(content: bytes, tmp_path: Path) -> None:
    opens_or_is_refused(tmp_path / "x.gguf", b"GGUF" + struct.pack("<I", 3) + content)


@pytest.mark.parametrize("number", ABSURD)
@pytest.mark.parametrize("at", [4, 8, 16])
def test_every_absurd_count(at: int, number: int, whole: bytes, tmp_path: Path) -> None:
    width = 4 if at == 4 else 8
    content = whole[:at] + struct.pack("<Q", number)[:width] + whole[at + width :]
    opens_or_is_refused(tmp_path / "x.gguf", content)
