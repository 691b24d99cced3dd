"""What is measured is what speculative decoding would do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.drafting import DRAFTER, MODEL, random_drafter, small_base

from demo.compose import held_out_conversation
from demo.drafter.base import Base
from demo.drafter.evaluate import Tally, calibration, evaluate, measure
from demo.drafter.export import export
from demo.drafter.infer import Drafter
from demo.drafter.speak import Example, Said, examples_of, say
from demo.evaluate import Kind
from demo.quantize.q8_0 import rounded
from demo.render import render
from demo.rows import encode
from demo.vocabulary import load as load_tokenizer

BLOCK = 3
token = st.integers(0, 2)


@given(st.lists(token, min_size=1, max_size=20), st.data())
def test_walking_is_speculative_decoding(said: list[int], data: st.DataObject) -> None:
    """Against a decoder that knows only what it has been told, token by token."""
    drafts = data.draw(st.lists(st.lists(token, min_size=BLOCK, max_size=BLOCK), min_size=20, max_size=20))
    tally = Tally(BLOCK)
    tally.walk(said, drafts, [[0.5] * BLOCK] * len(drafts))
    text, steps, accepted = said[:1], 0, 0
    while len(text) < len(said):
        offered = drafts[len(text) - 1]
        steps += 1
        for one in offered:
            if len(text) == len(said) or one != said[len(text)]:
                break
            text.append(one)
            accepted += 1
        if len(text) < len(said):
            text.append(said[len(text)])
    assert (tally.steps, tally.tokens) == (steps, len(said) - 1)
    assert sum(tally.accepted) == accepted
    assert all(a <= r <= o for a, r, o in zip(tally.accepted, tally.reached, tally.offered, strict=True))
    assert tally.reached[1:] <= tally.accepted[:-1]


def test_tallies_add_up() -> None:
    tally, other, both = Tally(BLOCK), Tally(BLOCK), Tally(BLOCK)
    answers = ([1, 2, 0, 1, 1], [[2, 0, 0]] * 5), ([0, 0, 0], [[0, 1, 2]] * 3)
    for part, (said, drafts) in zip((tally, other), answers, strict=True):
        part.walk(said, drafts, [[0.9] * BLOCK] * 5)
        both.walk(said, drafts, [[0.9] * BLOCK] * 5)
    tally.add(other)
    assert tally == both


def test_calibration_compares_what_is_stated_with_what_happened() -> None:
    exact = [(0.25, number % 4 == 0) for number in range(400)] + [
        (0.75, number % 4 > 0) for number in range(400)
    ]
    assert calibration(exact)["expected_error"] == 0
    assert calibration([(0.95, False)] * 30)["expected_error"] == 0.95
    half = calibration([(0.95, False)] * 10 + [(0.05, False)] * 10)
    assert half["expected_error"] == pytest.approx(0.5)
    assert calibration([])["expected_error"] == 0
    assert sum(one["drafts"] for one in calibration([(1.0, True), (0.0, False)])["bins"]) == 2  # type: ignore[attr-defined, misc]


def bigram_base() -> Base:
    """A model whose sub-layers say nothing: its next token follows from its last alone."""
    base = small_base(8)
    weights = dict(base.weights)
    for name in weights:
        if name.endswith(("o_b_proj.weight", "down_proj", "down_proj.weight")):
            weights[name] = torch.zeros_like(weights[name])
    weights["lm_head.weight"] = rounded(weights["lm_head.weight"])
    return replace(base, weights=weights)


def bigram_drafter(base: Base, path: Path, noise: float) -> Drafter:
    """Says what ``base`` says, from the last token alone, with noise on its Markov head."""
    config = replace(DRAFTER, markov_rank=MODEL.hidden)
    weights = random_drafter(9, config)
    for name in weights:
        if name.endswith(("o_b_proj.weight", "down_proj", "down_proj.weight")):
            weights[name] = torch.zeros_like(weights[name])
    weights["model.norm.weight"] = torch.zeros(MODEL.hidden)
    generator = torch.Generator().manual_seed(10)
    embedded = base.embedding * base.embedding.square().mean(-1, keepdim=True).rsqrt()
    weights["markov_w1"] = embedded * base.weights["model.norm.weight"]
    scale = float(base.head.std())
    weights["markov_w2"] = base.head + noise * scale * torch.randn(base.head.shape, generator=generator)
    export(weights, config, MODEL, path)
    return Drafter.load(path, base)


def walked(drafter: Drafter, said: Said) -> Tally:
    tally = Tally(drafter.config.block)
    measure(drafter, said, tally)
    return tally


def test_an_exactly_predictable_drafter_saves_all_it_can(tmp_path: Path) -> None:
    base = bigram_base()
    rng = Random(11)
    prompts = [[rng.randrange(3, MODEL.vocab) for _ in range(length)] for length in (5, 40)]
    said = say(base, [Example(prompt, [9] * 27) for prompt in prompts], DRAFTER.target_layers, passes=60)
    assert [len(span) for span in said.spans] == [43] * 2, "a token of the prompt's step and 42 more"
    exact = walked(bigram_drafter(base, tmp_path / "exact.gguf", 0.0), said)
    assert exact.emitted == DRAFTER.block + 1
    assert exact.accepted == exact.offered == [14] * DRAFTER.block
    noisy = walked(bigram_drafter(base, tmp_path / "noisy.gguf", 0.5), said)
    assert 1.2 < noisy.emitted < 5
    useless = walked(bigram_drafter(base, tmp_path / "useless.gguf", 50.0), said)
    assert useless.emitted < 1.2


def test_an_untrained_drafter_saves_nothing_of_real_dialogues(tmp_path: Path) -> None:
    base = small_base(12)
    export(random_drafter(13), DRAFTER, MODEL, tmp_path / "random.gguf")
    tally = evaluate(Drafter.load(tmp_path / "random.gguf", base), base, Kind("smalltalk", 4), 0.5)
    assert tally.dialogues >= 2
    assert 1 <= tally.emitted < 1.1
    assert tally.report()["answers"] == tally.dialogues


@pytest.mark.parametrize(("kind", "thinking"), [("tool_call", True), ("memory", False), ("structured", True)])
def test_every_turn_is_a_prompt_and_the_dialogue_s_answer(kind: str, thinking: bool) -> None:
    examples = examples_of(kind, thinking, 3, 1)
    eos = load_tokenizer().token_to_id("<｜end▁of▁sentence｜>")
    assert examples == examples_of(kind, thinking, 3, 1)
    assert len(examples) >= 3
    for one in examples:
        assert one.answer[-1] == eos
        assert one.answer.count(eos) == 1
    rng = Random(f"1/{kind}/{thinking}")
    whole = held_out_conversation(kind, rng, thinking)
    turns = sum(message.role == "assistant" for message in whole.messages)
    last = examples[turns - 1]
    assert last.prompt + last.answer == encode(whole)[0], render(whole)
