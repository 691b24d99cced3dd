"""The shipped vocabulary."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from demo.architecture import DEMO_MODEL
from demo.compose import short_conversation
from demo.render import render
from demo.vocabulary import FIRST, LAST, load


@given(st.text())
def test_text_comes_back(text: str) -> None:
    ids = load().encode(text, add_special_tokens=False).ids
    assert load().decode(ids, skip_special_tokens=False) == text


@given(st.integers(0, 10**30))
def test_a_number_is_one_token_a_digit(number: int) -> None:
    tokens = load().encode(f"It is {number}.", add_special_tokens=False).tokens
    assert "".join(token for token in tokens if token.isdigit()) == str(number)
    assert all(len(token) == 1 for token in tokens if any(map(str.isdigit, token)))


def test_special_tokens_are_whole_and_the_size_is_the_model_s() -> None:
    assert load().get_vocab_size() == DEMO_MODEL.vocab
    for text in FIRST + LAST:
        assert load().encode(text, add_special_tokens=False).tokens == [text]
    assert [load().token_to_id(text) for text in FIRST[:2]] == [DEMO_MODEL.bos_token, DEMO_MODEL.eos_token]


def test_its_own_conversations_are_short_in_it() -> None:
    rng = Random(1)
    texts = [render(short_conversation(rng)) for _ in range(100)]
    tokens = sum(len(load().encode(text, add_special_tokens=False).ids) for text in texts)
    assert sum(map(len, texts)) > 2.5 * tokens
