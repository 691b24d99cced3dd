"""Which device an engine runs on, found without touching it: the NVIDIA driver's own tool is asked.

Nothing here loads CUDA, so the supervisor and ``twinspark plan`` may use it beside a running engine.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from enum import Enum

from worker.errors import TwinsparkError
from worker.memory import available_bytes

LEAST_CAPABILITY = (8, 0)
"""Older GPUs lack what the kernels need: bfloat16 and 163 KiB or 99 KiB of shared memory a block."""

_QUERY = ("nvidia-smi", "--query-gpu=name,compute_cap,memory.free", "--format=csv,noheader,nounits")
_TIMEOUT_S = 20.0


class Device(Enum):
    """Where an engine computes."""

    CPU = "cpu"
    GPU = "gpu"


class DeviceError(TwinsparkError):
    """There is no GPU that can serve; the box's owner must change that, or serve on the CPU."""


@dataclass(frozen=True)
class Gpu:
    """The first GPU as its driver describes it.

    Attributes:
        free_bytes: of its own memory; None where it shares the system's (GB10).
    """

    name: str
    capability: tuple[int, int]
    free_bytes: int | None


def find_gpu() -> Gpu | None:
    """The box's first GPU; None where no driver answers."""
    try:
        said = subprocess.run(_QUERY, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    lines = said.strip().splitlines()
    return parse_gpu(lines[0]) if lines else None


def parse_gpu(line: str) -> Gpu | None:
    """From a line of the driver's tool such as ``NVIDIA GB10, 12.1, [N/A]`` (free memory in MiB)."""
    fields = [field.strip() for field in line.rsplit(",", 2)]
    if len(fields) != 3 or not all(part.isdigit() for part in fields[1].split(".")):
        return None
    major, _, minor = fields[1].partition(".")
    free = int(fields[2]) << 20 if fields[2].isdigit() else None
    return Gpu(fields[0], (int(major), int(minor or 0)), free)


def choose_device(wanted: str, gpu: Gpu | None) -> Device:
    """The device for ``auto``, ``cpu`` or ``gpu``; auto takes a GPU that can serve.

    Raises:
        DeviceError: a GPU is asked for, and there is none or it is too old.
    """
    usable = gpu is not None and gpu.capability >= LEAST_CAPABILITY
    if wanted == "cpu" or (wanted == "auto" and not usable):
        return Device.CPU
    if gpu is None:
        raise DeviceError(
            "no GPU: nvidia-smi finds none, or is not installed",
            "install the NVIDIA driver, or serve with --device cpu (made for small models)",
        )
    if not usable:
        has, needs = (".".join(map(str, version)) for version in (gpu.capability, LEAST_CAPABILITY))
        raise DeviceError(
            f"{gpu.name} has compute capability {has}, and the kernels need {needs}",
            "use a newer GPU, or serve with --device cpu (made for small models)",
        )
    return Device.GPU


def device_bytes(device: Device, gpu: Gpu | None) -> int:
    """What an engine can take on the device now.

    Raises:
        MemoryPlanError: the system does not say.
    """
    if device is Device.GPU and gpu is not None and gpu.free_bytes is not None:
        return gpu.free_bytes
    return available_bytes()
