"""The engine: one thread that owns model, banks and queue, and runs step after step.

Everybody else sends it messages and hears, once a step, what happened to all requests in it.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kernels.sampling import TokenCounts, adjust, sample_rows, top_logprobs
from worker.bank.banks import DEFAULT_POINTS, Bank, Banks, TokenId
from worker.errors import BusyError, DrainingError, TwinsparkError
from worker.execute import Executor
from worker.schedule.admission import carry_out, choose
from worker.schedule.request import (
    AdmissionKind,
    Event,
    Failed,
    Finished,
    FinishReason,
    Progress,
    Request,
    RequestId,
    Token,
    TokenLogprob,
    Usage,
    check_request,
)
from worker.schedule.step import StepPlan, Work, plan_step
from worker.view import BankView, Counters, EngineView

log = logging.getLogger(__name__)

Sink = Callable[[Sequence[Event]], None]
"""Takes a step's events; called on the engine's thread and must not block."""

_RETRY_AFTER_S = 2.0
_SLICE_S = 0.1
"""For so long a prompt's piece runs before decoding sequences get a step."""


@dataclass(frozen=True)
class EngineLimits:
    """What the memory plan allows.

    Attributes:
        context: tokens a bank holds.
        banks: sequences at a time.
        prefill_chunk: prompt tokens a step.
        queue: requests that may wait for a bank.
        threads: of torch's own thread pool.
        points: restore points a bank keeps.
        truncate, fork: whether prompts may be admitted in these ways.
    """

    context: int
    banks: int
    prefill_chunk: int = 128
    queue: int = 64
    threads: int = 2
    points: int = DEFAULT_POINTS
    truncate: bool = True
    fork: bool = True


@dataclass
class _Running:
    """A request in a bank."""

    request: Request
    bank: Bank
    kind: AdmissionKind
    cached: int
    max_tokens: int
    arrived_at: float
    admitted_at: float
    counts: TokenCounts | None
    answer: list[TokenId] = field(default_factory=list)
    first_token_at: float = 0.0
    served_step: int = -1

    @property
    def work(self) -> Work:
        return Work(self.request.id, self.bank.length, len(self.request.prompt), self.served_step)

    def usage(self, stop: TokenId | None, now: float) -> Usage:
        """The numbers at this moment, from the first token on."""
        prompt_tokens = len(self.request.prompt)
        decode_s = now - self.first_token_at
        decode_steps = len(self.answer) - (1 if stop is None else 0)
        return Usage(
            prompt_tokens=prompt_tokens,
            cached_tokens=self.cached,
            completion_tokens=len(self.answer),
            queue_s=self.admitted_at - self.arrived_at,
            ttft_s=self.first_token_at - self.arrived_at,
            prefill_tokens_per_s=(prompt_tokens - self.cached)
            / max(self.first_token_at - self.admitted_at, 1e-9),
            decode_tokens_per_s=decode_steps / decode_s if decode_steps > 0 and decode_s > 0 else 0.0,
            admission=self.kind,
            stop_token=stop,
        )


@dataclass
class _Piece:
    """A piece of a prompt that is being processed."""

    running: _Running
    tokens: Sequence[TokenId]
    work: Generator[None, None, Tensor | None]


@dataclass
class _Waiting:
    request: Request
    arrived_at: float
    told_position: int = 0


class Engine:
    """Serves requests on one model.

    Args:
        executor: the model and its banks' memory.
        limits: sizes.
        sink: hears the events of every step.
        on_fatal: called once, on the engine's thread, when a step fails: the engine is then unusable.
    """

    def __init__(
        self, executor: Executor, limits: EngineLimits, sink: Sink, on_fatal: Callable[[BaseException], None]
    ) -> None:
        self.limits = limits
        self._executor = executor
        self._config = executor.config
        self._sink = sink
        self._on_fatal = on_fatal
        self._banks = Banks(executor.store, limits.points)
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._waiting: deque[_Waiting] = deque()
        self._running: dict[RequestId, _Running] = {}
        self._piece: _Piece | None = None
        self._events: list[Event] = []
        self._counters = Counters()
        self._draining = False
        self.step_started_at: float | None = None
        self.view = self._snapshot()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Starts the step loop."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the loop after the current step and waits for it; requests in flight are dropped."""
        self._inbox.put(None)
        self._thread.join()

    def submit(self, request: Request) -> None:
        """Queues a request; its events follow through the sink. Callable from any thread."""
        arrived_at = time.monotonic()
        self._inbox.put(lambda: self._accept(request, arrived_at))

    def cancel(self, request: RequestId) -> None:
        """Ends a request at the next step boundary without further events; unknown ids are ignored."""
        self._inbox.put(lambda: self._cancel(request))

    def drain(self) -> None:
        """Refuses requests from now on; those accepted go on."""
        self._inbox.put(self._start_draining)

    def _run(self) -> None:
        torch.set_num_threads(self.limits.threads)
        try:
            while self._take_messages():
                self._admit()
                plan = plan_step([one.work for one in self._running.values()], self.limits.prefill_chunk)
                if plan:
                    self.step_started_at = time.monotonic()
                    self._step(plan)
                    self.step_started_at = None
                self._report()
        except BaseException as error:
            log.exception("event=engine_failed")
            failure = TwinsparkError("the engine failed and is being restarted", "send the request again")
            ids = [*self._running, *(one.request.id for one in self._waiting)]
            self._sink([Failed(request, failure) for request in ids])
            self._on_fatal(error)

    def _take_messages(self) -> bool:
        """Handles what has arrived, waiting only when there is nothing else to do; False means stop."""
        block = not self._running and not self._waiting
        while True:
            try:
                message = self._inbox.get(block=block)
            except queue.Empty:
                return True
            if message is None:
                return False
            message()
            block = False

    def _accept(self, request: Request, arrived_at: float) -> None:
        try:
            if self._draining:
                raise DrainingError("the engine is shutting down", "send the request again in a moment")
            known = request.id in self._running or any(one.request.id == request.id for one in self._waiting)
            if known:
                raise TwinsparkError(f"request id {request.id!r} is in use")
            check_request(request, self._config.vocab, self.limits.context)
            self._admit()  # those before it may not need to wait
            if len(self._waiting) >= self.limits.queue:
                raise BusyError(
                    f"all {self.limits.banks} banks are busy and {len(self._waiting)} requests wait",
                    _RETRY_AFTER_S,
                )
        except TwinsparkError as error:
            self._count(refused=1)
            self._events.append(Failed(request.id, error))
            return
        self._count(requests=1)
        self._waiting.append(_Waiting(request, arrived_at))

    def _cancel(self, request: RequestId) -> None:
        running = self._running.get(request)
        if running is not None:
            self._release(running)
            self._count(cancelled=1)
        waiting = next((one for one in self._waiting if one.request.id == request), None)
        if waiting is not None:
            self._waiting.remove(waiting)
            self._count(cancelled=1)

    def _start_draining(self) -> None:
        self._draining = True

    def _admit(self) -> None:
        while self._waiting:
            waiting = self._waiting[0]
            request = waiting.request
            limits, now = self.limits, time.monotonic()
            admission = choose(
                request.prompt, self._banks.all, now, truncate=limits.truncate, fork=limits.fork
            )
            if admission is None:
                break
            self._waiting.popleft()
            carry_out(admission, self._banks)
            bank = admission.bank
            bank.in_use = True
            room = self.limits.context - len(request.prompt)
            counts = None
            if request.sampling.counts_tokens:
                counts = TokenCounts(
                    self._config.vocab, torch.tensor(request.prompt), self._executor.store.device
                )
            self._running[request.id] = _Running(
                request,
                bank,
                admission.kind,
                admission.cached,
                min(request.max_tokens or room, room),
                waiting.arrived_at,
                now,
                counts,
            )
            self._count(prompt_tokens=len(request.prompt), cached_tokens=admission.cached)
        for position, waiting in enumerate(self._waiting, start=1):
            if waiting.told_position != position:
                waiting.told_position = position
                request = waiting.request
                self._events.append(Progress(request.id, 0, len(request.prompt), position))

    def _step(self, plan: StepPlan) -> None:
        if plan.decode:
            self._decode([self._running[request] for request in plan.decode])
        if self._piece is None and plan.prefill is not None:
            self._piece = self._begin(self._running[plan.prefill], plan.prefill_tokens)
        if self._piece is not None:
            self._advance(self._piece)
        self._count(steps=1)

    def _decode(self, group: Sequence[_Running]) -> None:
        spans = [self._banks.span(running.bank, running.answer[-1:], 1) for running in group]
        logits = self._executor.decode(spans)
        for running in group:
            self._banks.commit(running.bank, running.answer[-1:])
            running.served_step = self._counters.steps
        self._sample(group, logits)

    def _begin(self, running: _Running, count: int) -> _Piece:
        begin, prompt = running.bank.length, running.request.prompt
        tokens = prompt[begin : begin + count]
        span = self._banks.span(running.bank, tokens, int(begin + count == len(prompt)))
        return _Piece(running, tokens, self._executor.prefill(span))

    def _advance(self, piece: _Piece) -> None:
        """Works on the piece until it is done, or others have waited for long enough."""
        until = time.monotonic() + _SLICE_S
        try:
            next(piece.work)
            while time.monotonic() < until:
                next(piece.work)
        except StopIteration as end:
            self._complete(piece, end.value)

    def _complete(self, piece: _Piece, logits: Tensor | None) -> None:
        running = piece.running
        self._piece = None
        self._banks.commit(running.bank, piece.tokens)
        running.served_step = self._counters.steps
        if logits is not None:
            self._sample([running], logits)
        else:
            done, total = running.bank.length, len(running.request.prompt)
            self._events.append(Progress(running.request.id, done, total, 0))

    def _sample(self, group: Sequence[_Running], logits: Tensor) -> None:
        """Draws each sequence's next token from its row of logits ``[len(group), vocab]``."""
        adjusted = [
            adjust(row, running.request.sampling, running.counts)
            for running, row in zip(group, logits, strict=True)
        ]
        params = [running.request.sampling for running in group]
        tokens = sample_rows(adjusted, params, [running.bank.length for running in group])
        for running, row, token in zip(group, logits, tokens, strict=True):
            self._take(running, TokenId(token), row)

    def _take(self, running: _Running, token: TokenId, logits: Tensor) -> None:
        """Adds a drawn token to the answer, or ends the answer with it."""
        request, now = running.request, time.monotonic()
        if not running.answer:
            running.first_token_at = now
        if token in request.stop_tokens or (token == self._config.eos_token and not request.ignore_eos):
            self._finish(running, FinishReason.STOP, token, now)
            return
        running.answer.append(token)
        if running.counts is not None:
            running.counts.add(token)
        logprob = None
        if request.logprobs:
            logprob = TokenLogprob(*top_logprobs(logits, token, request.top_logprobs))
        self._count(completion_tokens=1)
        usage = running.usage(None, now) if len(running.answer) == 1 else None
        self._events.append(Token(request.id, token, logprob, usage))
        if len(running.answer) >= running.max_tokens:
            self._finish(running, FinishReason.LENGTH, None, now)

    def _finish(self, running: _Running, reason: FinishReason, stop: TokenId | None, now: float) -> None:
        usage = running.usage(stop, now)
        self._release(running)
        self._count(finished=1)
        self._events.append(Finished(running.request.id, reason, usage))

    def _release(self, running: _Running) -> None:
        """Gives the bank back with all it holds, so that a retry or a next turn goes on from there."""
        if self._piece is not None and self._piece.running is running:
            self._piece.work.close()
            self._piece = None
        running.bank.in_use = False
        running.bank.used_at = time.monotonic()
        del self._running[running.request.id]

    def _count(self, **more: int) -> None:
        changed = {name: getattr(self._counters, name) + value for name, value in more.items()}
        self._counters = replace(self._counters, **changed)

    def _report(self) -> None:
        self.view = self._snapshot()
        if self._events:
            events, self._events = self._events, []
            self._sink(events)

    def _snapshot(self) -> EngineView:
        now = time.monotonic()
        by_bank = {running.bank.id: running for running in self._running.values()}
        banks = []
        for bank in self._banks.all:
            running = by_bank.get(bank.id)
            if running is not None:
                state = "decode" if running.work.decodes else "prefill"
                banks.append(BankView(state, bank.length, running.request.id, 0.0))
            else:
                idle_s = now - bank.used_at if bank.length else 0.0
                banks.append(BankView("idle" if bank.length else "free", bank.length, None, idle_s))
        pool = self._banks.pool
        return EngineView(
            len(self._running), len(self._waiting), tuple(banks), pool.total, pool.free, self._counters
        )
