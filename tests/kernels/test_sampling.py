"""Sampling against transformers' logits processors and against the distribution it claims to draw from."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation import logits_process as hf

from kernels.sampling import (
    SamplingParams,
    TokenCounts,
    adjust,
    sample,
    sample_together,
    top_logprobs,
    uniform,
)

CPU = torch.device("cpu")


def random_logits(seed: int, size: int = 200) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 3


def support(logits: torch.Tensor, params: SamplingParams, draws: int = 600) -> set[int]:
    return {sample(logits, params, position) for position in range(draws)}


@given(seed=st.integers(0, 1000), temperature=st.floats(0.2, 3))
def test_filters_keep_what_transformers_keeps(seed: int, temperature: float) -> None:
    logits = random_logits(seed, 12)
    warp = hf.TemperatureLogitsWarper(temperature)(None, logits[None].double())
    for params, processor in (
        (SamplingParams(temperature, top_k=3, seed=seed), hf.TopKLogitsWarper(3)),
        (SamplingParams(temperature, top_p=0.7, seed=seed), hf.TopPLogitsWarper(0.7)),
        (SamplingParams(temperature, min_p=0.2, seed=seed), hf.MinPLogitsWarper(0.2)),
    ):
        probability = processor(None, warp)[0].softmax(0)
        likely = {int(token) for token in torch.nonzero(probability > 0.03)}
        allowed = {int(token) for token in torch.nonzero(probability > 0)}
        assert likely <= support(logits, params) <= allowed


def test_draws_follow_the_distribution() -> None:
    logits = random_logits(1, 20)
    params = SamplingParams(temperature=1.3, seed=7)
    draws = 20000
    counts = torch.bincount(torch.tensor([sample(logits, params, p) for p in range(draws)]), minlength=20)
    expected = (logits / 1.3).softmax(0) * draws
    common = expected > 5
    chi_square = ((counts - expected).square() / expected)[common].sum()
    assert chi_square < 2.5 * common.sum()


def test_repetition_penalty_equals_transformers() -> None:
    logits = random_logits(2)
    prompt, answer = torch.tensor([3, 5, 5, 8]), [9, 3, 9]
    counts = TokenCounts(200, prompt, CPU)
    for token in answer:
        counts.add(token)
    ids = torch.cat((prompt, torch.tensor(answer)))[None]
    expected = hf.RepetitionPenaltyLogitsProcessor(1.7)(ids, logits[None].clone())[0]
    assert torch.equal(adjust(logits, SamplingParams(repetition_penalty=1.7), counts), expected)


def test_frequency_and_presence_penalties_count_generated_tokens() -> None:
    logits = torch.zeros(4)
    counts = TokenCounts(4, torch.tensor([0]), CPU)
    for token in (1, 1, 1, 2):
        counts.add(token)
    adjusted = adjust(logits, SamplingParams(frequency_penalty=0.5, presence_penalty=0.25), counts)
    assert adjusted.tolist() == [0.0, -1.75, -0.75, 0.0]


def test_bias_decides_and_leaves_the_input_alone() -> None:
    logits = random_logits(3)
    before = logits.clone()
    params = SamplingParams(temperature=0, logit_bias={17: 100.0})
    assert sample(adjust(logits, params, None), params, 0) == 17
    assert torch.equal(logits, before)


def test_zero_temperature_takes_the_lowest_of_equals() -> None:
    logits = torch.tensor([0.0, 2.0, 2.0, 1.0])
    assert sample(logits, SamplingParams(temperature=0), 5) == 1


def test_logprobs_are_of_the_plain_distribution() -> None:
    logits = random_logits(4)
    logprob, tokens, values = top_logprobs(logits, 11, 5)
    expected = logits.double().log_softmax(0)
    assert logprob == float(expected[11])
    assert values == sorted(expected.tolist(), reverse=True)[:5]
    assert [float(expected[token]) for token in tokens] == values


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**20))
def test_randomness_is_a_function_of_seed_and_position(seed: int, position: int) -> None:
    value = uniform(seed, position)
    assert 0 <= value < 1
    assert value == uniform(seed, position)
    assert value != uniform(seed, position + 1)
    assert value != uniform(seed ^ 1, position)


@given(
    rows=st.lists(
        st.builds(
            SamplingParams,
            temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
            top_p=st.sampled_from([0.1, 0.9, 1.0]),
            top_k=st.sampled_from([0, 1, 5]),
            min_p=st.sampled_from([0.0, 0.05, 1.0]),
            seed=st.integers(0, 1 << 62),
        ),
        min_size=1,
        max_size=5,
    ),
    position=st.integers(0, 10000),
)
def test_rows_drawn_together_equal_rows_drawn_alone(rows: list[SamplingParams], position: int) -> None:
    logits = torch.stack([random_logits(number) for number in range(len(rows))]).round(decimals=1)
    positions = [position + number for number in range(len(rows))]
    alone = [sample(*row) for row in zip(logits, rows, positions, strict=True)]
    assert sample_together(logits, rows, positions) == alone
