"""Answers found all at once are those of one token after another."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.drafting import MODEL, small_base, text

from demo.drafter.base import Base
from demo.drafter.outputs import own_outputs
from demo.drafter.speak import Example, say
from demo.layout import ALIGNMENT, Batch
from demo.network import Mode, logits_of, run

PROMPT, LENGTH = 20, 24


@pytest.fixture(scope="module")
def base() -> Base:
    return small_base(4)


def one_by_one(base: Base, prompt: list[int], count: int) -> list[int]:
    """Greedy decoding by running the whole text for every token."""
    ids = list(prompt)
    for _ in range(count):
        padded = torch.zeros(1, -(-len(ids) // ALIGNMENT) * ALIGNMENT, dtype=torch.int64)
        padded[0, : len(ids)] = torch.tensor(ids)
        positions = torch.arange(padded.shape[1])[None]
        batch = Batch(padded, positions, torch.zeros_like(padded), padded, torch.zeros(padded.shape))
        with torch.no_grad():
            hidden = run(base.weights, base.config, batch, Mode(rounding=True)).hidden[len(ids) - 1]
        ids.append(int(logits_of(base.weights, hidden, torch.float32).argmax()))
    return ids[len(prompt) :]


def one_answer(seed: int) -> Batch:
    batch = text([128], seed)
    weights = torch.zeros_like(batch.weights)
    weights[0, PROMPT - 1 : PROMPT - 1 + LENGTH] = 1
    return replace(batch, weights=weights)


def test_own_outputs_settle_into_greedy_decoding(base: Base) -> None:
    batch = one_answer(1)
    expected = one_by_one(base, batch.ids[0, :PROMPT].tolist(), LENGTH)
    assert MODEL.eos_token not in expected, "else the dialogue's tokens stay"
    found = own_outputs(base, batch, (2,), 0.0, LENGTH + 1, 0)
    assert found.batch.ids[0, PROMPT : PROMPT + LENGTH].tolist() == expected
    assert torch.equal(found.choices[found.answer], found.batch.targets.flatten()[found.answer])
    assert torch.equal(found.batch.ids[0, :PROMPT], batch.ids[0, :PROMPT]), "the prompt stays"
    assert torch.equal(found.batch.ids[0, PROMPT + LENGTH :], batch.ids[0, PROMPT + LENGTH :])


def test_noise_gives_other_outputs_and_the_same_seed_the_same(base: Base) -> None:
    batch = one_answer(2)
    greedy, first, again, other = (
        own_outputs(base, batch, (2,), temperature, LENGTH + 1, seed).batch.ids
        for temperature, seed in ((0.0, 1), (1.0, 1), (1.0, 1), (1.0, 2))
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first, greedy)


def test_sampled_tokens_have_the_model_s_probabilities() -> None:
    """Over many seeds, against the softmax; a sharp head makes few tokens likely."""
    base = small_base(5)
    base.weights["lm_head.weight"] = base.weights["lm_head.weight"] * 8
    batch = text([128], 3)
    weights = torch.zeros_like(batch.weights)
    weights[0, PROMPT - 1] = 1
    batch = replace(batch, weights=weights)
    count = 150
    draws = torch.tensor(
        [int(own_outputs(base, batch, (2,), 1.0, 1, seed).choices[PROMPT - 1]) for seed in range(count)]
    )
    hidden = own_outputs(base, batch, (2,), 0.0, 1, 0).hidden[PROMPT - 1]
    p = logits_of(base.weights, hidden, torch.float32).softmax(-1)
    for token in p.topk(3).indices.tolist():
        share, chance = float((draws == token).float().mean()), float(p[token])
        assert abs(share - chance) < 4 * (chance * (1 - chance) / count) ** 0.5 + 1e-3


def test_an_end_of_turn_stays_where_it_is(base: Base) -> None:
    batch = one_answer(3)
    end = PROMPT + 5
    ids, targets = batch.ids.clone(), batch.targets.clone()
    ids[0, end] = targets[0, end - 1] = MODEL.eos_token
    found = own_outputs(base, replace(batch, ids=ids, targets=targets), (2,), 0.0, 8, 0)
    assert found.batch.ids[0, end] == MODEL.eos_token
    assert found.choices[end - 1] != MODEL.eos_token, "the model says something else there"
    assert int((found.batch.ids == MODEL.eos_token).sum()) == 1


def test_answers_are_those_of_one_token_after_another(base: Base) -> None:
    prompts = [text([128], seed).ids[0, :length].tolist() for seed, length in ((5, 9), (6, 30))]
    said = say(base, [Example(prompt, [7, 8, 9, 1]) for prompt in prompts], (1, 2), passes=40)
    assert said.cut == 2, "an untrained model does not end its turn"
    for row, prompt, span in zip(said.ids, prompts, said.spans, strict=True):
        assert span == range(len(prompt), len(prompt) + 20)
        assert row[span.start : span.stop].tolist() == one_by_one(base, prompt, len(span))


def test_an_answer_that_has_not_settled_is_cut(base: Base) -> None:
    prompt = text([128], 7).ids[0, :12].tolist()
    said = say(base, [Example(prompt, [7] * 30)], (2,), passes=3)
    (span,) = said.spans
    assert 0 < len(span) < 30
    assert said.cut == 1
    found = said.ids[0, span.start : span.stop].tolist()
    assert found == one_by_one(base, prompt, len(span))
