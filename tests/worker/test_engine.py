"""The engine: what a request gets does not depend on what else runs, and every way to end is clean."""

from __future__ import annotations

import random

import pytest
import torch
from support.harness import Harness
from support.models import random_tensors, small_config
from support.oracle import oracle_from

from kernels.sampling import SamplingParams
from worker.errors import BusyError, DrainingError, PromptTooLongError, RequestError
from worker.model.forward import Model
from worker.model.weights import assemble
from worker.schedule.request import AdmissionKind, FinishReason, Token

VOCAB = small_config().vocab


def prompt_of(length: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(2, VOCAB) for _ in range(length)]


def sampled(seed: int) -> dict[str, object]:
    return {"sampling": SamplingParams(temperature=1.0, top_p=0.95, seed=seed), "ignore_eos": True}


def test_greedy_tokens_are_those_of_transformers() -> None:
    config = small_config()
    tensors = random_tensors(config, 2)
    prompt = prompt_of(150, 2)
    with Harness(Model(config, assemble(config, tensors.__getitem__)), rounding=False) as harness:
        answer = harness.run("a", prompt, max_tokens=40, ignore_eos=True).tokens
    with torch.no_grad():
        logits = oracle_from(config, tensors.__getitem__)(torch.tensor([[*prompt, *answer]])).logits[0]
    assert logits[len(prompt) - 1 : -1].argmax(1).tolist() == answer


def test_batched_requests_equal_requests_alone() -> None:
    prompts = [prompt_of(length, length) for length in (5, 70, 130, 33, 200, 64)]
    alone = []
    for index, prompt in enumerate(prompts):
        with Harness() as harness:
            alone.append(harness.run("x", prompt, max_tokens=30, **sampled(index)).tokens)
    with Harness(banks=3) as harness:
        for index, prompt in enumerate(prompts):
            harness.submit(str(index), prompt, max_tokens=30, **sampled(index))
        together = [harness.wait(str(index)).tokens for index in range(len(prompts))]
    assert together == alone
    assert all(len(tokens) == 30 for tokens in alone)


def test_cancelling_leaves_the_others_alone_and_keeps_what_was_computed() -> None:
    long_prompt, other = prompt_of(400, 1), prompt_of(20, 2)
    with Harness() as harness:
        expected = harness.run("alone", other, max_tokens=60, **sampled(5)).tokens
        expected_retry = harness.run("long alone", long_prompt, max_tokens=5).tokens
    with Harness() as harness:
        harness.submit("other", other, max_tokens=60, **sampled(5))
        harness.wait("other", tokens=3)
        harness.submit("long", long_prompt)
        harness.wait_for_progress("long", 64)
        harness.engine.cancel("long")  # type: ignore[arg-type]
        assert harness.wait("other").tokens == expected
        retry = harness.run("retry", long_prompt, max_tokens=5)
        assert not harness.outcomes["long"].done
        assert retry.tokens == expected_retry
        assert retry.finished is not None
        assert retry.finished.usage.admission is AdmissionKind.WARM
        assert retry.finished.usage.cached_tokens >= 64
        assert harness.engine.view.counters.cancelled == 1


def test_pieces_of_prompts_may_wait_for_any_number_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [prompt_of(length, length) for length in (5, 70, 130, 64, 32)]

    def answers(*, disturbed: bool) -> list[list[int]]:
        with Harness(banks=3) as harness:
            for index, prompt in enumerate(prompts):
                harness.submit(str(index), prompt, max_tokens=30, **sampled(index))
                if disturbed:
                    harness.submit(f"gone {index}", prompt_of(300, 20 + index))
                    harness.wait(str(max(0, index - 1)), tokens=5)
                    harness.engine.cancel(f"gone {index}")  # type: ignore[arg-type]
            return [harness.wait(str(index)).tokens for index in range(len(prompts))]

    expected = answers(disturbed=False)
    monkeypatch.setattr("worker.engine._SLICE_S", 0.0)
    assert answers(disturbed=True) == expected


def test_a_next_turn_computes_only_its_new_tokens() -> None:
    first = prompt_of(100, 3)
    with Harness() as harness:
        answer = harness.run("one", first, max_tokens=10, ignore_eos=True).tokens
        second = [*first, *answer, *prompt_of(8, 4)]
        warm = harness.run("two", second, max_tokens=10, ignore_eos=True)
    with Harness() as harness:
        cold = harness.run("two", second, max_tokens=10, ignore_eos=True)
    assert warm.tokens == cold.tokens
    assert warm.finished is not None
    # The first turn's last token was sampled, but never processed.
    assert warm.finished.usage.cached_tokens == len(first) + len(answer) - 1


def test_a_turn_that_rewrites_the_last_tokens_goes_on_from_before_them() -> None:
    first = prompt_of(100, 3)
    with Harness() as harness:
        answer = harness.run("one", first, max_tokens=5, ignore_eos=True).tokens
        second = [*first, *answer[:2], *prompt_of(8, 9)]
        warm = harness.run("two", second, max_tokens=10, ignore_eos=True)
        cold_usage = harness.run("three", prompt_of(50, 77), max_tokens=1, ignore_eos=True).finished
    with Harness() as harness:
        assert warm.tokens == harness.run("two", second, max_tokens=10, ignore_eos=True).tokens
    assert warm.finished is not None
    assert cold_usage is not None
    assert warm.finished.usage.cached_tokens >= len(first) + 2
    assert cold_usage.usage.admission is AdmissionKind.COLD


def test_stop_tokens_end_the_answer_without_being_part_of_it() -> None:
    with Harness() as harness:
        free = harness.run("free", prompt_of(30, 1), max_tokens=20, ignore_eos=True).tokens
        stop = free[7]
        outcome = harness.run("stop", prompt_of(30, 1), max_tokens=20, stop_tokens=frozenset({stop}))
    assert outcome.tokens == free[: free.index(stop)]
    assert outcome.finished is not None
    assert outcome.finished.reason is FinishReason.STOP
    assert outcome.finished.usage.stop_token == stop


def test_the_end_of_the_context_ends_the_answer() -> None:
    with Harness(context=128) as harness:
        outcome = harness.run("full", prompt_of(100, 1), max_tokens=0, ignore_eos=True)
        assert outcome.finished is not None
        assert outcome.finished.reason is FinishReason.LENGTH
        assert len(outcome.tokens) == 28


def test_a_prompt_that_does_not_fit_is_refused_with_both_numbers() -> None:
    with Harness(context=128) as harness:
        assert not harness.run("fits", prompt_of(127, 1), ignore_eos=True).error
        error = harness.run("long", prompt_of(128, 1)).error
    assert isinstance(error, PromptTooLongError)
    assert "128 tokens" in error.message
    assert "context size is 128" in error.message


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": [VOCAB]}, f"token id {VOCAB}"),
        ({"sampling": SamplingParams(temperature=-1)}, "temperature"),
        ({"sampling": SamplingParams(top_p=float("nan"))}, "top_p"),
        ({"sampling": SamplingParams(logit_bias={VOCAB + 3: 1.0})}, "logit_bias"),
        ({"sampling": SamplingParams(logit_bias={1: 1000.0})}, "logit_bias"),
        ({"stop_tokens": frozenset({-1})}, "stop_tokens"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    ],
)
def test_bad_requests_are_refused_by_name_and_disturb_nobody(fields: dict[str, object], named: str) -> None:
    with Harness() as harness:
        harness.submit("good", prompt_of(40, 1), max_tokens=20, ignore_eos=True)
        prompt = fields.pop("prompt", prompt_of(5, 1))
        error = harness.run("bad", prompt, **fields).error  # type: ignore[arg-type]
        assert isinstance(error, RequestError)
        assert named in error.message
        assert len(harness.wait("good").tokens) == 20


def test_a_full_queue_answers_busy_and_waiting_requests_know_their_place() -> None:
    with Harness(banks=1, queue=2) as harness:
        harness.submit("running", prompt_of(20, 1), max_tokens=300, ignore_eos=True)
        harness.wait("running", tokens=1)
        for name in ("first", "second"):
            harness.submit(name, prompt_of(20, 2), max_tokens=1, ignore_eos=True)
        error = harness.run("refused", prompt_of(20, 3)).error
        assert isinstance(error, BusyError)
        assert error.retry_after_s > 0
        harness.engine.cancel("running")  # type: ignore[arg-type]
        assert harness.wait("second").finished
        positions = [p.queue_position for p in harness.outcomes["second"].progress if p.queue_position]
        assert positions == [2, 1]


def test_draining_finishes_what_runs_and_refuses_the_rest() -> None:
    with Harness() as harness:
        harness.submit("running", prompt_of(20, 1), max_tokens=50, ignore_eos=True)
        harness.wait("running", tokens=1)
        harness.engine.drain()
        assert isinstance(harness.run("late", prompt_of(5, 1)).error, DrainingError)
        assert len(harness.wait("running").tokens) == 50


def test_logprobs_describe_the_sampled_tokens() -> None:
    with Harness() as harness:
        outcome = harness.run(
            "a", prompt_of(30, 1), max_tokens=5, ignore_eos=True, logprobs=True, top_logprobs=3
        )
    tokens = [event for event in outcome.events if isinstance(event, Token)]
    assert len(tokens) == 5
    for event in tokens:
        assert event.logprob is not None
        assert event.logprob.top_tokens[0] == event.token
        assert event.logprob.top_logprobs[0] == event.logprob.logprob
        assert len(event.logprob.top_tokens) == 3
        assert sum(torch.tensor(event.logprob.top_logprobs).exp().tolist()) <= 1


def test_penalties_change_what_is_generated() -> None:
    with Harness() as harness:
        plain = harness.run("plain", prompt_of(30, 1), max_tokens=40, ignore_eos=True).tokens
        params = SamplingParams(temperature=0, frequency_penalty=2.0, presence_penalty=2.0)
        varied = harness.run(
            "varied", prompt_of(30, 1), max_tokens=40, ignore_eos=True, sampling=params
        ).tokens
    assert len(set(varied)) > len(set(plain))


def test_a_failing_step_fails_every_request_and_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with Harness() as harness:
        harness.submit("a", prompt_of(20, 1), max_tokens=400, ignore_eos=True)
        harness.submit("b", prompt_of(20, 2), max_tokens=400, ignore_eos=True)
        harness.wait("b", tokens=2)

        def fail(*_: object) -> None:
            raise RuntimeError("injected device error")

        monkeypatch.setattr(harness.executor, "decode", fail)
        assert harness.wait("a").error
        assert harness.wait("b").error
    assert [str(error) for error in harness.fatal] == ["injected device error"]


def test_pages_balance_after_random_work() -> None:
    chance = random.Random(8)
    with Harness(banks=3, context=256) as harness:
        for index in range(25):
            name = str(index)
            harness.submit(name, prompt_of(chance.randint(1, 200), chance.randint(0, 4)), max_tokens=10)
            if chance.random() < 0.4:
                harness.engine.cancel(name)  # type: ignore[arg-type]
                harness.outcomes[name].error = RequestError("cancelled by the test")
            if chance.random() < 0.3:
                harness.wait(name)
        for name in list(harness.outcomes):
            harness.wait(name)
    harness.engine._banks.check()
    assert (harness.engine.view.running, harness.engine.view.queued) == (0, 0)
