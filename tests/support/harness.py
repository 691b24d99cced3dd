"""An engine on a small random model, and what its requests came to."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from kernels.sampling import SamplingParams
from support.models import random_tensors, small_config
from worker.bank.banks import TokenId
from worker.engine import Engine, EngineLimits
from worker.errors import TwinsparkError
from worker.execute import CpuExecutor
from worker.model.forward import Model
from worker.model.weights import assemble
from worker.schedule.request import Event, Failed, Finished, Progress, Request, RequestId, Token

WAIT_S = 60


@dataclass
class Outcome:
    """Everything heard about one request."""

    events: list[Event] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    progress: list[Progress] = field(default_factory=list)
    finished: Finished | None = None
    error: TwinsparkError | None = None

    @property
    def done(self) -> bool:
        return self.finished is not None or self.error is not None


class Harness:
    """Starts an engine; a context manager that stops it. Waits are bounded."""

    def __init__(self, model: Model | None = None, *, seed: int = 0, **limits: int | bool) -> None:
        if model is None:
            config = small_config()
            model = Model(config, assemble(config, random_tensors(config, seed).__getitem__))
        rounding = bool(limits.pop("rounding", True))
        sizes = {"context": 512, "banks": 4, "prefill_chunk": 32, "threads": 1, **limits}
        self.outcomes: dict[str, Outcome] = {}
        self.fatal: list[BaseException] = []
        self._heard = threading.Condition()
        self.executor = CpuExecutor(model, sizes["banks"], sizes["context"], rounding=rounding)
        self.engine = Engine(self.executor, EngineLimits(**sizes), self._hear, self.fatal.append)  # type: ignore[arg-type]

    def __enter__(self) -> Harness:
        self.engine.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.stop()

    def submit(self, name: str, prompt: Sequence[int], *, max_tokens: int = 12, **fields: object) -> None:
        sampling = fields.pop("sampling", SamplingParams(temperature=0))
        tokens = [TokenId(token) for token in prompt]
        self.outcomes[name] = Outcome()
        self.engine.submit(Request(RequestId(name), tokens, sampling, max_tokens, **fields))  # type: ignore[arg-type]

    def wait(self, name: str, tokens: int | None = None) -> Outcome:
        """Waits until the request is done, or has at least ``tokens`` tokens."""
        outcome = self.outcomes[name]

        def ready() -> bool:
            return outcome.done or (tokens is not None and len(outcome.tokens) >= tokens)

        with self._heard:
            assert self._heard.wait_for(ready, WAIT_S), f"{name}: nothing within {WAIT_S} s"
        return outcome

    def wait_for_progress(self, name: str, done_tokens: int) -> None:
        """Waits until so much of the prompt is processed."""
        outcome = self.outcomes[name]
        with self._heard:
            assert self._heard.wait_for(
                lambda: outcome.done or any(p.done_tokens >= done_tokens for p in outcome.progress), WAIT_S
            )

    def run(self, name: str, prompt: Sequence[int], **fields: object) -> Outcome:
        self.submit(name, prompt, **fields)  # type: ignore[arg-type]
        return self.wait(name)

    def _hear(self, events: Sequence[Event]) -> None:
        with self._heard:
            for event in events:
                outcome = self.outcomes[event.request]
                outcome.events.append(event)
                if isinstance(event, Token):
                    outcome.tokens.append(event.token)
                elif isinstance(event, Progress):
                    outcome.progress.append(event)
                elif isinstance(event, Finished):
                    outcome.finished = event
                elif isinstance(event, Failed):
                    outcome.error = event.error
            self._heard.notify_all()
