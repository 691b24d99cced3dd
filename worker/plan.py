"""The memory plan: everything the engine will take, added up before anything is loaded.

The plan is arithmetic on the file's tensor table and the model's sizes. What it counts is taken at start and
does not grow; if it does not fit what the box has available, the engine refuses to start and says what would
fit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from kernels.attention import KEY_TILE
from worker.bank.banks import DEFAULT_POINTS
from worker.bank.store import KvGeometry
from worker.device import Device
from worker.errors import MemoryPlanError
from worker.gguf.load import STAGING_BYTES
from worker.gguf.read import GgufFile
from worker.memory import show_bytes
from worker.model.config import ModelConfig
from worker.schedule.step import MAX_DECODE_ROWS

DEFAULT_RESERVE_BYTES = 1 << 30
DEFAULT_CHUNKS = {Device.CPU: 128, Device.GPU: 4096}
"""Prompt tokens processed at a time: on a GPU the experts' weights are read once a chunk."""
MAX_BANKS = MAX_DECODE_ROWS
MIN_CONTEXT = 256

_RUNTIME_BYTES = 400 << 20
"""Interpreter, torch, gRPC and Ray's part of the engine's process, measured at 350 MiB."""
_FLOAT_BYTES = 4
_BANK_CHOICES = (4, 2, 1)
_COMFORTABLE_CONTEXT = 32768


@dataclass(frozen=True)
class Wanted:
    """What the user asked for; None leaves the choice to the plan."""

    context: int | None = None
    banks: int | None = None
    prefill_chunk: int | None = None
    reserve_bytes: int = DEFAULT_RESERVE_BYTES
    device: Device = Device.CPU

    @property
    def chunk(self) -> int:
        """The prefill chunk asked for, or the device's usual one."""
        return DEFAULT_CHUNKS[self.device] if self.prefill_chunk is None else self.prefill_chunk


@dataclass(frozen=True)
class Item:
    """One line of the plan."""

    name: str
    bytes: int
    note: str = ""


@dataclass(frozen=True)
class MemoryPlan:
    """A plan that fits."""

    context: int
    banks: int
    prefill_chunk: int
    device: Device
    items: tuple[Item, ...]
    available_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(item.bytes for item in self.items)

    @property
    def headroom_bytes(self) -> int:
        return self.available_bytes - self.total_bytes


def make_plan(file: GgufFile, config: ModelConfig, wanted: Wanted, available: int) -> MemoryPlan:
    """The best plan that fits.

    Where the user leaves it open: four banks before two before one, each with the longest context that fits;
    contexts below 32,768 tokens only when not even one bank of that fits.

    Raises:
        MemoryPlanError: not even the smallest allowed choice fits; the message has the table, the hint what
            would fit.
    """
    _check(config, wanted)
    plans = list(_plans(file, config, wanted, available))
    fitting = next((plan for plan in plans if plan.headroom_bytes >= 0), None)
    if fitting is None:
        raise MemoryPlanError(_refusal(plans[-1]), _advice(file, config, wanted, available))
    return fitting


def table(plan: MemoryPlan) -> list[tuple[str, str, str]]:
    """Name, size and note of each line, total and headroom last."""
    lines = [(item.name, show_bytes(item.bytes), item.note) for item in plan.items]
    lines.append(("total", show_bytes(plan.total_bytes), f"of {show_bytes(plan.available_bytes)} available"))
    lines.append(("headroom", show_bytes(plan.headroom_bytes), ""))
    return lines


def _check(config: ModelConfig, wanted: Wanted) -> None:
    if wanted.banks is not None and not 1 <= wanted.banks <= MAX_BANKS:
        raise MemoryPlanError(f"{wanted.banks} banks asked for", f"choose --banks from 1 to {MAX_BANKS}")
    shortest = min(MIN_CONTEXT, config.context)
    if wanted.context is not None and not shortest <= wanted.context <= config.context:
        raise MemoryPlanError(
            f"a context of {wanted.context} tokens asked for",
            f"choose --ctx from {shortest} to {config.context}, the longest the model was made for",
        )
    if wanted.chunk < 1:
        raise MemoryPlanError(f"a prefill chunk of {wanted.chunk} asked for", "choose at least 1")


def _plans(file: GgufFile, config: ModelConfig, wanted: Wanted, available: int) -> Iterator[MemoryPlan]:
    """Every allowed plan from the best to the least, fitting or not."""
    contexts = (wanted.context,) if wanted.context else _contexts(config)
    comfortable = [context for context in contexts if context >= _COMFORTABLE_CONTEXT]
    short = [context for context in contexts if context < _COMFORTABLE_CONTEXT]
    for group in (comfortable, short):
        for banks in (wanted.banks,) if wanted.banks else _BANK_CHOICES:
            for context in group:
                items = _items(file, config, wanted, context, banks)
                yield MemoryPlan(context, banks, wanted.chunk, wanted.device, items, available)


def _contexts(config: ModelConfig) -> tuple[int, ...]:
    """The model's longest context and the powers of two below it, descending."""
    powers = (1 << power for power in range(24, 7, -1))
    return (config.context, *(context for context in powers if MIN_CONTEXT <= context < config.context))


def _items(file: GgufFile, config: ModelConfig, wanted: Wanted, context: int, banks: int) -> tuple[Item, ...]:
    geometry = KvGeometry(config, rounding=True)
    pages = geometry.pages_for(context)
    if wanted.device is Device.GPU:
        # Only a plan for a GPU needs Triton to be there.
        from worker.gpu.plan import RUNTIME_BYTES, workspace_bytes

        weights = Item("weights", file.tensor_bytes, "as in the file, one copy")
        work = workspace_bytes(config, context, banks, wanted.chunk)
        states, runtime = banks + 1, Item("runtime", RUNTIME_BYTES, "CUDA context, recorded steps, libraries")
    else:
        floats = sum(math.prod(info.shape) * _FLOAT_BYTES for info in file.tensors.values())
        weights = Item("weights", floats, f"{show_bytes(file.tensor_bytes)} in the file, float32 in memory")
        work = _workspace_bytes(config, wanted.chunk, context)
        states, runtime = banks, Item("runtime", _RUNTIME_BYTES, "interpreter, libraries")
    return (
        weights,
        Item("key/value pages", banks * pages * geometry.page_bytes, f"{banks} banks x {context} tokens"),
        Item("bank state", states * geometry.bank_bytes, f"{show_bytes(geometry.bank_bytes)} a bank"),
        Item(
            "restore points",
            banks * (DEFAULT_POINTS + 1) * geometry.point_bytes,
            f"{DEFAULT_POINTS} a bank of {show_bytes(geometry.point_bytes)}",
        ),
        Item(
            "workspace",
            max(work, 3 * STAGING_BYTES),
            f"prefill chunks of {wanted.chunk} tokens",
        ),
        runtime,
        Item("reserve", wanted.reserve_bytes, "for the system and other programs"),
    )


def _workspace_bytes(config: ModelConfig, chunk: int, context: int) -> int:
    """Upper bound of what a step holds at once, from the shapes of the forward's tensors."""
    rows = chunk + MAX_DECODE_ROWS
    streams = 4 * config.streams * config.hidden
    heads = 6 * config.heads * config.head_dim
    attention = 3 * KEY_TILE * (config.head_dim + 2 * config.heads)
    experts = 2 * config.experts_used * config.hidden + 6 * config.expert_width
    index = 0
    if 4 in config.compress_ratios:
        entries = context // 4
        index = 6 * entries + 2 * 512 * config.index_heads + 2 * config.index_heads * config.index_dim
    logits = MAX_DECODE_ROWS * config.vocab * 2 + config.vocab * 16
    unpacked_entries = context // 4 * (config.head_dim + config.index_dim) * 3
    return _FLOAT_BYTES * (rows * (streams + heads + attention + experts + index) + logits + unpacked_entries)


def _refusal(plan: MemoryPlan) -> str:
    lines = "\n".join(f"  {name:<16} {size:>12}  {note}".rstrip() for name, size, note in table(plan)[:-1])
    short = show_bytes(-plan.headroom_bytes)
    return f"{plan.banks} banks of {plan.context} tokens do not fit, {short} are missing:\n{lines}"


def _advice(file: GgufFile, config: ModelConfig, wanted: Wanted, available: int) -> str:
    """What would fit when one wish is given up, or both; else what it takes."""
    fitting = []
    for wish in (replace(wanted, banks=None), replace(wanted, context=None)):
        plans = _plans(file, config, wish, available)
        fitting += [plan for plan in plans if plan.headroom_bytes >= 0][:1]
    if fitting:
        return "this would fit: " + ", or ".join(
            dict.fromkeys(f"--banks {plan.banks} --ctx {plan.context}" for plan in fitting)
        )
    least = list(_plans(file, config, replace(wanted, banks=None, context=None), available))[-1]
    if least.headroom_bytes >= 0:
        return f"this would fit: --banks {least.banks} --ctx {least.context}"
    return (
        f"this model takes at least {show_bytes(least.total_bytes)} on one box: "
        "free memory, lower --reserve, or choose a smaller file"
    )
