"""The choice of device from what the driver's tool says."""

from __future__ import annotations

import pytest

from worker.device import Device, DeviceError, Gpu, choose_device, device_bytes, parse_gpu

SPARK = Gpu("NVIDIA GB10", (12, 1), None)
OLD = Gpu("Tesla T4", (7, 5), 15 << 30)


@pytest.mark.parametrize(
    ("line", "gpu"),
    [
        ("NVIDIA GB10, 12.1, [N/A]", SPARK),
        ("NVIDIA GB10, 12.1, [Insufficient Permissions]", SPARK),
        ("NVIDIA H200, 9.0, 143000", Gpu("NVIDIA H200", (9, 0), 143000 << 20)),
        ("Odd, name, 8.6, 100", Gpu("Odd, name", (8, 6), 100 << 20)),
        ("No devices were found", None),
        ("NVIDIA H200, [N/A], 3", None),
        ("", None),
    ],
)
def test_parse(line: str, gpu: Gpu | None) -> None:
    assert parse_gpu(line) == gpu


@pytest.mark.parametrize(
    ("wanted", "gpu", "device"),
    [
        ("auto", SPARK, Device.GPU),
        ("auto", None, Device.CPU),
        ("auto", OLD, Device.CPU),
        ("cpu", SPARK, Device.CPU),
        ("gpu", SPARK, Device.GPU),
    ],
)
def test_choice(wanted: str, gpu: Gpu | None, device: Device) -> None:
    assert choose_device(wanted, gpu) is device


@pytest.mark.parametrize(("gpu", "words"), [(None, "nvidia-smi"), (OLD, "compute capability 7.5")])
def test_a_gpu_that_cannot_serve_is_refused_with_what_to_do(gpu: Gpu | None, words: str) -> None:
    with pytest.raises(DeviceError, match=words) as refused:
        choose_device("gpu", gpu)
    assert "--device cpu" in refused.value.hint


def test_unified_memory_is_the_systems() -> None:
    own = Gpu("NVIDIA H200", (9, 0), 7 << 30)
    assert device_bytes(Device.GPU, own) == 7 << 30
    assert device_bytes(Device.GPU, SPARK) == pytest.approx(device_bytes(Device.CPU, own), rel=0.2)
