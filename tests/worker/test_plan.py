"""The memory plan: pure arithmetic, checked against what a process really takes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.device import Device
from worker.errors import MemoryPlanError
from worker.gguf.presets import FLASH, SMALL
from worker.gguf.read import GgufFile
from worker.gguf.synthetic import plan_tensors, write_synthetic
from worker.memory import available_bytes, parse_bytes, show_bytes
from worker.model.config import ModelConfig
from worker.model.load import open_model
from worker.plan import MemoryPlan, Wanted, make_plan, table

GIB = 1 << 30


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[GgufFile, ModelConfig]:
    path = tmp_path_factory.mktemp("plan") / "demo.gguf"
    write_synthetic(path, SMALL, "q2", seed=0)
    return open_model(path)


def test_a_roomy_box_gets_four_banks_of_the_whole_context(demo: tuple[GgufFile, ModelConfig]) -> None:
    plan = make_plan(*demo, Wanted(), 64 * GIB)
    assert (plan.banks, plan.context) == (4, SMALL.context)
    assert plan.headroom_bytes == 64 * GIB - sum(item.bytes for item in plan.items)
    assert table(plan)[-2][1] == show_bytes(plan.total_bytes)


@settings(max_examples=60, deadline=None)
@given(
    available=st.integers(1, 4 * GIB),
    banks=st.sampled_from([None, 1, 3, 32]),
    ctx=st.sampled_from([None, 512]),
)
def test_every_plan_fits_and_every_advice_holds(
    demo: tuple[GgufFile, ModelConfig], available: int, banks: int | None, ctx: int | None
) -> None:
    try:
        plan = make_plan(*demo, Wanted(ctx, banks), available)
    except MemoryPlanError as error:
        assert "are missing" in error.message
        if "this would fit: " not in error.hint:
            assert "takes at least" in error.hint
            with pytest.raises(MemoryPlanError):
                make_plan(*demo, Wanted(256, 1), available)
            return
        words = error.hint.removeprefix("this would fit: ").split(", or ")[0].split()
        plan = make_plan(*demo, Wanted(int(words[3]), int(words[1])), available)
    assert plan.total_bytes <= available
    assert banks is None or plan.banks <= banks


@pytest.mark.parametrize(
    "wanted", [Wanted(banks=0), Wanted(banks=33), Wanted(context=SMALL.context + 1), Wanted(1)]
)
def test_wishes_out_of_range_are_refused(demo: tuple[GgufFile, ModelConfig], wanted: Wanted) -> None:
    with pytest.raises(MemoryPlanError, match="asked for") as caught:
        make_plan(*demo, wanted, 64 * GIB)
    assert "choose" in caught.value.hint


def test_sizes_are_read_as_written() -> None:
    assert parse_bytes("119GiB") == 119 * GIB
    assert parse_bytes(" 1.5 gb ") == 1_500_000_000
    assert parse_bytes("4096") == 4096
    for wrong in ("", "GiB", "-1GiB", "12 apples", "0"):
        with pytest.raises(ValueError, match="no size"):
            parse_bytes(wrong)
    assert show_bytes(86_720_111_488) == "80.8 GiB"


def test_available_memory_is_what_the_system_says() -> None:
    lines = Path("/proc/meminfo").read_text().splitlines()
    total = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal"))
    assert 0 < available_bytes() < total


MEASURE = """
import sys
from pathlib import Path
from types import SimpleNamespace
import ray, grpc, torch
from kernels.sampling import SamplingParams
from worker.engine import Engine, EngineLimits
from worker.execute import CpuExecutor
from worker.model.load import load_model, open_model
from worker.schedule.request import Finished, Request
import threading
file, config = open_model(Path(sys.argv[1]))
context, banks, chunk = 4096, 4, 512
done = threading.Semaphore(0)
def sink(events):
    for event in events:
        if isinstance(event, Finished):
            done.release()
executor = CpuExecutor(load_model(file, config), banks, context)
engine = Engine(executor, EngineLimits(context, banks, chunk, threads=2), sink, print)
engine.start()
for bank in range(banks):
    prompt = [(7 * bank + 13 * i) % config.vocab for i in range(context - 8)]
    engine.submit(Request(str(bank), prompt, SamplingParams(seed=bank), 4, ignore_eos=True))
for bank in range(banks):
    assert done.acquire(timeout=240)
engine.stop()
status = Path("/proc/self/status").read_text().splitlines()
print(next(line.split()[1] for line in status if line.startswith("VmHWM")))
"""


@pytest.mark.slow
def test_the_longest_prompt_on_every_bank_stays_within_the_plan(demo: tuple[GgufFile, ModelConfig]) -> None:
    file, config = demo
    plan: MemoryPlan = make_plan(file, config, Wanted(4096, 4, prefill_chunk=512, reserve_bytes=0), 64 * GIB)
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(file.path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=280,
    )
    peak = int(run.stdout.split()[-1]) * 1024
    print(f"peak {show_bytes(peak)} of {show_bytes(plan.total_bytes)} planned")
    assert peak <= plan.total_bytes


def test_flash_q2_fits_a_spark() -> None:
    """81 GB of weights in 119 GiB: four banks of 262,144 tokens, with 11 GiB left."""
    wanted = Wanted(262144, 4, device=Device.GPU, reserve_bytes=0)
    plan = make_plan(_flash_file(), FLASH, wanted, 119 * GIB)
    assert plan.headroom_bytes >= 11 * GIB
    make_plan(_flash_file(), FLASH, Wanted(524288, 1, device=Device.GPU), 119 * GIB)


def test_gpu_plan_refuses_with_what_would_fit() -> None:
    with pytest.raises(MemoryPlanError) as refused:
        make_plan(_flash_file(), FLASH, Wanted(1048576, 8, device=Device.GPU), 96 * GIB)
    assert "this would fit" in refused.value.hint


def _flash_file() -> GgufFile:
    """The published q2 file's tensor table, without its data."""
    tensors = {
        tensor.spec.name: SimpleNamespace(shape=tensor.spec.shape, nbytes=tensor.nbytes)
        for tensor in plan_tensors(FLASH, "q2")
    }
    total = sum(tensor.nbytes for tensor in tensors.values())
    return SimpleNamespace(tensors=tensors, tensor_bytes=total)  # type: ignore[return-value]
