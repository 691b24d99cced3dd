"""Settings: flag before environment before default, and every mistake named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cluster.config import ConfigError, ServeConfig, load_config
from worker.device import Device


def test_a_flag_beats_the_environment_beats_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_config().port == 8000
    monkeypatch.setenv("TWINSPARK_PORT", "8100")
    monkeypatch.setenv("TWINSPARK_RESERVE", "2GiB")
    assert load_config().port == 8100
    assert load_config(port=8200).port == 8200
    assert load_config(port=None).port == 8100
    assert load_config().wanted(Device.CPU).reserve_bytes == 2 << 30


def test_threads_leave_one_of_the_cores_this_process_may_use() -> None:
    assert load_config().threads == max(1, len(os.sched_getaffinity(0)) - 1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", 70000),
        ("ctx", 0),
        ("banks", -1),
        ("memory", "a lot"),
        ("reserve", "-1GiB"),
        ("watchdog_s", 0),
    ],
)
def test_a_wrong_value_names_flag_and_environment(name: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(**{name: value})
    flag = "--" + name.replace("_", "-")
    assert flag in caught.value.message
    assert f"TWINSPARK_{name.upper()}" in caught.value.hint


def test_a_wrong_environment_value_is_named_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINSPARK_BANKS", "many")
    with pytest.raises(ConfigError, match="--banks is 'many'"):
        load_config()


def test_every_setting_is_described_and_frozen() -> None:
    assert all(field.description for field in ServeConfig.model_fields.values())
    with pytest.raises(ValueError, match="frozen"):
        load_config().port = 1  # type: ignore[misc]


def test_state_follows_the_xdg_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert load_config().state == tmp_path / "twinspark"
