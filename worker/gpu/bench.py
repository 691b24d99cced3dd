"""Speed of the model on this GPU: decode and prefill at several context lengths and numbers of streams.

``python -m worker.gpu.bench --synthetic flash-q2 --out FILE.json`` needs no model file: weights are random
blocks in the published layout, made on the device, and so are the banks' contents. A projection to GB10
divides the bytes that a decode step reads by that chip's memory bandwidth: a bound, not a measurement.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from worker.bank.layout import Span
from worker.bank.store import KvStore
from worker.gguf.presets import FLASH
from worker.gguf.synthetic import plan_tensors
from worker.gpu.executor import GpuExecutor
from worker.gpu.source import RandomSource
from worker.gpu.weights import load_weights
from worker.model.config import ModelConfig

GB10_BYTES_PER_S = 273e9

_MIXES = {"flash-q2": "q2", "flash-q4": "q4"}
_PROMPTS = ((0, 2048), (0, 8192), (32768, 8192), (122880, 8192))
_SUFFIXES = tuple((held, new) for held in (60000, 200000) for new in (30, 42, 249, 2264, 10398))
_STEPS = 20


@dataclass(frozen=True)
class DecodePoint:
    """One decode step's median time over :data:`_STEPS` steps, sampling included."""

    context: int
    streams: int
    step_ms: float
    tokens_per_s: float
    gb10_tokens_per_s_at_most: float


@dataclass(frozen=True)
class PrefillPoint:
    """``new`` tokens on a bank that holds ``held``, chunk by chunk."""

    held: int
    new: int
    seconds: float
    tokens_per_s: float


def step_bytes(config: ModelConfig, mix: str, streams: int, context: int) -> float:
    """Bytes that a decode step reads: dense weights once, the rows' experts, and their keys.

    Rows choose experts independently and evenly.
    """
    dense = experts = 0
    for tensor in plan_tensors(config, mix):
        name = tensor.spec.name
        if "_exps." in name:
            experts += tensor.nbytes
        elif name != "token_embd.weight" and "tid2eid" not in name:
            dense += tensor.nbytes
    touched = 1 - (1 - config.experts_used / config.experts) ** streams
    keys = 0
    for ratio in config.compress_ratios:
        rows = min(context, config.window)
        if ratio:
            rows += min(context // ratio, config.index_top_k if ratio == 4 else context // ratio)
        keys += rows * (config.head_dim + 71) + (
            context // 4 * (config.index_dim // 2 + 4) if ratio == 4 else 0
        )
    return dense + touched * experts + streams * keys


class Bench:
    """Measures one executor.

    Args:
        executor: warmed up, with :func:`fill` done.
        mix: of its weights.
    """

    def __init__(self, executor: GpuExecutor, mix: str) -> None:
        self._executor = executor
        self._mix = mix
        pages = executor.store.pages // executor.store.banks
        self._pages = [list(range(bank * pages, (bank + 1) * pages)) for bank in range(executor.store.banks)]
        self._generator = torch.Generator().manual_seed(1)

    def decode(self, context: int, streams: int) -> DecodePoint:
        """Streams of the same length; tokens are drawn greedily and fed back."""
        tokens = self._tokens(streams)
        times = []
        for step in range(_STEPS + 3):
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            spans = [
                Span(bank, context + step, [token], self._pages[bank], 1) for bank, token in enumerate(tokens)
            ]
            tokens = self._executor.decode(spans).argmax(1).tolist()
            ended.record()
            ended.synchronize()
            times.append(began.elapsed_time(ended))
        step_ms = statistics.median(times[3:])
        least_s = step_bytes(self._executor.config, self._mix, streams, context) / GB10_BYTES_PER_S
        return DecodePoint(
            context,
            streams,
            round(step_ms, 3),
            round(streams * 1000 / step_ms, 1),
            round(streams / least_s, 1),
        )

    def prefill(self, held: int, new: int, chunk: int) -> PrefillPoint:
        """The second of two runs."""
        for _ in range(2):
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            at = held
            while at < held + new:
                count = min(chunk - at % chunk, held + new - at)
                for _part in self._executor.prefill(Span(0, at, self._tokens(count), self._pages[0], 1)):
                    pass
                at += count
            ended.record()
            ended.synchronize()
            seconds = began.elapsed_time(ended) / 1000
        return PrefillPoint(held, new, round(seconds, 4), round(new / seconds, 1))

    def _tokens(self, count: int) -> list[int]:
        vocab = self._executor.config.vocab
        return torch.randint(0, vocab, (count,), generator=self._generator).tolist()


def fill(store: KvStore) -> None:
    """Random keys of ordinary size in every ring and page."""
    generator = torch.Generator(store.device).manual_seed(1)
    for layer in store.layers:
        for planes in (layer.ring, layer.entries, layer.index_entries):
            for place, plane in enumerate(planes):
                if plane.dtype == torch.bfloat16:
                    plane.copy_(torch.randn(plane.shape, generator=generator, device=store.device))
                    continue
                low, high = (118, 122) if place == 1 else (0, 120)  # exponents, or codes
                raw = plane.view(torch.uint8)
                raw.random_(low, high, generator=generator)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--synthetic", choices=sorted(_MIXES), default="flash-q2")
    parser.add_argument("--context", type=int, default=220_000, help="tokens a bank holds")
    parser.add_argument("--chunk", type=int, default=8192, help="prompt tokens processed at a time")
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 8192, 32768, 131072, 211000])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--quick", action="store_true", help="2K and 32K, 1 and 8 streams, two prompts")
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the results")
    options = parser.parse_args()
    device = torch.device("cuda", 0)
    mix = _MIXES[options.synthetic]
    contexts, streams, prompts = options.contexts, options.streams, (*_PROMPTS, *_SUFFIXES)
    if options.quick:
        contexts, streams, prompts = [2048, 32768], [1, 8], (*_PROMPTS[1:4:2], *_SUFFIXES[1:2])
    weights = load_weights(RandomSource(FLASH, mix, 1, device), FLASH, device)
    executor = GpuExecutor(FLASH, weights, max(streams), options.context, options.chunk)
    executor.warm_up(_show)
    fill(executor.store)
    bench = Bench(executor, mix)
    decode = [bench.decode(context, count) for context in contexts for count in streams]
    for point in decode:
        print(point, flush=True)
    prefill = []
    for held, new in prompts:
        prefill.append(bench.prefill(held, new, options.chunk))
        print(prefill[-1], flush=True)
    free, total = torch.cuda.mem_get_info()
    report = {
        "command": "python -m worker.gpu.bench " + shlex.join(sys.argv[1:]),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "banks": max(streams),
        "context": options.context,
        "allocated_bytes": torch.cuda.memory_allocated(),
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "device_used_bytes": total - free,
        "decode": [asdict(point) for point in decode],
        "prefill": [asdict(point) for point in prefill],
    }
    options.out.write_text(json.dumps(report, indent=1) + "\n")


def _show(stage: str, done: float) -> None:
    print(f"{stage} {done:.0%}", flush=True)


if __name__ == "__main__":
    main()
