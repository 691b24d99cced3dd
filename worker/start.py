"""From a model file and its memory plan to an executor that is ready to serve."""

from __future__ import annotations

from collections.abc import Callable

from worker.device import Device, DeviceError
from worker.execute import CpuExecutor, Executor
from worker.gguf.read import GgufFile
from worker.model.config import ModelConfig
from worker.model.load import load_model
from worker.plan import MemoryPlan

OnStage = Callable[[str, float], None]
"""Told what is being done, in words, and how much of it is done, 0 to 1."""


def make_executor(
    file: GgufFile, config: ModelConfig, plan: MemoryPlan, on_stage: OnStage, *, graphs: bool = True
) -> Executor:
    """Loads the weights, takes the memory that the plan names, and compiles what will run.

    Raises:
        ModelFileError: the file has changed, cannot be read, or has types that the device has no kernels for.
        DeviceError: the GPU's software does not work.
    """
    if plan.device is Device.GPU:
        return _on_gpu(file, config, plan, on_stage, graphs=graphs)
    model = load_model(file, config, lambda done, total: on_stage("loading", done / total))
    return CpuExecutor(model, plan.banks, plan.context)


def _on_gpu(
    file: GgufFile, config: ModelConfig, plan: MemoryPlan, on_stage: OnStage, *, graphs: bool
) -> Executor:
    # Triton and CUDA are loaded only where a GPU serves.
    import torch

    if not torch.cuda.is_available():
        raise DeviceError(
            "torch cannot use the GPU: it is built for the CPU, or does not fit the driver",
            "install a CUDA build of torch (`pip install torch`) and a driver that it supports",
        )
    from worker.gpu.executor import GpuExecutor
    from worker.gpu.source import FileSource
    from worker.gpu.weights import load_weights

    device = torch.device("cuda", 0)
    done = 0

    def count(more: int) -> None:
        nonlocal done
        done += more
        on_stage("loading", done / file.tensor_bytes)

    weights = load_weights(FileSource(file, device, count), config, device)
    executor = GpuExecutor(config, weights, plan.banks, plan.context, plan.prefill_chunk, graphs=graphs)
    executor.warm_up(on_stage)
    return executor
