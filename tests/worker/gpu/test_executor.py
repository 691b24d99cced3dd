"""The engine on a GPU: graphs, nothing compiled after warm-up, requests that do not disturb each other."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import triton
from support.gpu_model import write_model

from kernels.sampling import SamplingParams
from worker.bank.banks import TokenId
from worker.engine import Engine, EngineLimits
from worker.gguf.presets import SMALL
from worker.gpu.executor import GpuExecutor
from worker.gpu.source import FileSource
from worker.gpu.weights import load_weights
from worker.model.load import open_model
from worker.schedule.request import Event, Failed, Finished, Request, RequestId, Token

pytestmark = pytest.mark.gpu
CONTEXT, CHUNK = 4096, 512


class _Serving:
    """An engine and what its requests came to."""

    def __init__(self, path: Path, *, graphs: bool = True) -> None:
        device = torch.device("cuda", 0)
        file, config = open_model(path)
        weights = load_weights(FileSource(file, device), config, device)
        executor = GpuExecutor(config, weights, 4, CONTEXT, CHUNK, graphs=graphs)
        executor.warm_up(lambda stage, done: None)
        self.tokens: dict[str, list[int]] = {}
        self._done: dict[str, threading.Event] = {}
        self._fatal: list[BaseException] = []
        limits = EngineLimits(CONTEXT, 4, CHUNK, threads=2)
        self.engine = Engine(executor, limits, self._hear, self._fatal.append)
        self.engine.start()

    def submit(self, name: str, prompt: Sequence[int], count: int, **fields: object) -> None:
        self.tokens[name], self._done[name] = [], threading.Event()
        sampling = SamplingParams(seed=7, min_p=0.02, **fields)  # type: ignore[arg-type]
        self.engine.submit(
            Request(
                RequestId(name), [TokenId(t) for t in prompt], sampling, count, ignore_eos=True, logprobs=True
            )
        )

    def wait(self, name: str) -> list[int]:
        assert self._done[name].wait(60), name
        assert not self._fatal
        return self.tokens[name]

    def _hear(self, events: Sequence[Event]) -> None:
        for event in events:
            assert not isinstance(event, Failed), event
            if isinstance(event, Token):
                self.tokens[event.request].append(event.token)
            if isinstance(event, Finished):
                self._done[event.request].set()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("small") / "small.gguf", SMALL)


def _prompt(length: int, seed: int) -> list[int]:
    return torch.randint(0, SMALL.vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_batched_equals_alone_and_nothing_compiles_after_warm_up(small: Path) -> None:
    prompts = {str(number): _prompt(length, number) for number, length in enumerate((3, 700, 1300, 129))}
    serving = _Serving(small)
    compiled: list[object] = []
    before = torch.cuda.memory_allocated()
    triton.knobs.runtime.jit_post_compile_hook = lambda **what: compiled.append(what["fn"].name)
    try:
        for name, prompt in prompts.items():
            serving.submit(name, prompt, 40, frequency_penalty=0.3)
        together = {name: serving.wait(name) for name in prompts}
        serving.engine.stop()
    finally:
        triton.knobs.runtime.jit_post_compile_hook = None
    assert not compiled
    assert torch.cuda.memory_allocated() - before < 64 << 20
    for name, prompt in prompts.items():
        alone = _Serving(small)
        alone.submit(name, prompt, 40, frequency_penalty=0.3)
        assert alone.wait(name) == together[name]
        alone.engine.stop()


def test_graphs_change_nothing(small: Path) -> None:
    answers = []
    for graphs in (True, False):
        serving = _Serving(small, graphs=graphs)
        serving.submit("a", _prompt(300, 5), 30)
        answers.append(serving.wait("a"))
        serving.engine.stop()
    assert answers[0] == answers[1]


def test_a_cancelled_prompt_disturbs_nobody(small: Path) -> None:
    answers = []
    for disturbed in (False, True):
        serving = _Serving(small)
        serving.submit("a", _prompt(300, 5), 60)
        if disturbed:
            for number in range(3):
                serving.submit(f"c{number}", _prompt(3000, number), 5)
                serving.engine.cancel(RequestId(f"c{number}"))
        answers.append(serving.wait("a"))
        serving.engine.stop()
    assert answers[0] == answers[1]
