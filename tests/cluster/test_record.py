"""The record of a running service outlives neither the service nor its pid."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.config import ConfigError
from cluster.record import (
    ServiceRecord,
    read_record,
    remove_record,
    single_service,
    this_process,
    write_record,
)


def record_of(pid: int, ticks: int) -> ServiceRecord:
    return ServiceRecord(pid, ticks, "http://127.0.0.1:1", "", "model.gguf", "1.0")


def test_a_live_process_is_found_until_its_record_goes(tmp_path: Path) -> None:
    assert read_record(tmp_path) is None
    record = record_of(*this_process())
    write_record(tmp_path, record)
    assert read_record(tmp_path) == record
    remove_record(tmp_path)
    assert read_record(tmp_path) is None


def test_a_dead_process_and_a_later_one_of_its_pid_are_not_taken_for_it(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    write_record(tmp_path, record_of(child.pid, 1))
    assert read_record(tmp_path) is None
    alive = record_of(*this_process())
    write_record(tmp_path, replace(alive, started_ticks=alive.started_ticks - 1))
    assert read_record(tmp_path) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}', "null"])
def test_a_damaged_record_is_no_record(tmp_path: Path, text: str) -> None:
    (tmp_path / "service.json").write_text(text)
    assert read_record(tmp_path) is None


def test_one_service_at_a_time(tmp_path: Path) -> None:
    with single_service(tmp_path / "state"):
        write_record(tmp_path / "state", record_of(*this_process()))
        with (
            pytest.raises(ConfigError, match="already running at http://127"),
            single_service(tmp_path / "state"),
        ):
            pass
    with single_service(tmp_path / "state"):
        pass


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file/state"), single_service(tmp_path / "file" / "state"):
        pass
