"""Incremental detokenization, stop strings and thinking: pieces add up to the whole, whatever the cuts."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.vocabulary import real_vocabulary

from gateway.chat.answer import AnswerParser
from gateway.chat.detokenize import Detokenizer
from gateway.chat.segments import Segment
from gateway.chat.stops import StopMatcher
from gateway.chat.tokens import ChatTokenizer

END_THINK = 128822


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer(real_vocabulary())


def cut(tokens: list[int], seed: int) -> list[list[int]]:
    chance, out = random.Random(seed), []
    while tokens:
        size = chance.randint(1, 4)
        out.append(tokens[:size])
        tokens = tokens[size:]
    return out


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 129279), max_size=30), st.integers(0, 99))
def test_any_tokens_in_any_pieces_give_the_whole_text(
    tokenizer: ChatTokenizer, tokens: list[int], seed: int
) -> None:
    stream = Detokenizer(tokenizer)
    pieces = [stream.push(piece) for piece in cut(tokens, seed)]
    assert "".join(pieces) + stream.flush() == tokenizer.decode(tokens)


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="aé日🙂👍🏽Ж", min_size=1, max_size=12))
def test_half_a_character_never_comes_out(tokenizer: ChatTokenizer, text: str) -> None:
    """Byte by byte: the vocabulary has a token for each byte."""
    of_byte = {tokenizer.token_bytes(token): token for token in range(3, 400)}
    stream = Detokenizer(tokenizer)
    out = ""
    for byte in text.encode():
        out += stream.push([of_byte[bytes([byte])]])
        assert text.startswith(out)
        assert "\ufffd" not in out
    assert out == text
    assert stream.flush() == ""


@given(
    st.text(alphabet="abc", max_size=30),
    st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(1, 5), max_size=30),
)
def test_the_stop_string_that_is_complete_first_cuts_the_text(
    text: str, stops: list[str], sizes: list[int]
) -> None:
    matcher, out, at = StopMatcher(stops), "", 0
    for size in [*sizes, len(text)]:
        out += matcher.push(text[at : at + size])
        at += size
    out += matcher.flush()
    upto = next((end for end in range(len(text)) if text[: end + 1].endswith(tuple(stops))), len(text))
    ended = [stop for stop in stops if text[: upto + 1].endswith(stop)]
    assert out == (text[: upto + 1].removesuffix(max(ended, key=len)) if ended else text)
    assert matcher.matched == (max(ended, key=len) if ended else None)


def test_text_is_not_held_back_without_need() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("hello E") == "hello "
    assert matcher.push("very") == "Every"


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=20), st.text(max_size=20), st.integers(0, 99))
def test_thinking_and_content_part_at_the_first_end_of_thinking(
    tokenizer: ChatTokenizer, reasoning: str, content: str, seed: int
) -> None:
    inside = tokenizer.encode([Segment(reasoning, template=False)])
    after = tokenizer.encode([Segment(content, template=False)])
    parser = AnswerParser(tokenizer, thinking=True, stops=())
    deltas = [parser.push(piece) for piece in cut([*inside, END_THINK, *after], seed)]
    deltas.append(parser.finish())
    assert "".join(delta.reasoning for delta in deltas) == reasoning
    assert "".join(delta.content for delta in deltas) == content
    assert parser.reasoning_tokens == len(inside) + 1
    assert [token for delta in deltas for token in delta.content_tokens] == after


def test_an_answer_that_ends_in_thinking_has_no_content(tokenizer: ChatTokenizer) -> None:
    parser = AnswerParser(tokenizer, thinking=True, stops=["x"])
    tokens = tokenizer.encode([Segment("thinking of x", template=False)])
    deltas = [parser.push(tokens), parser.finish()]
    assert "".join(delta.reasoning for delta in deltas) == "thinking of x"
    assert not any(delta.content for delta in deltas)
    assert not parser.stopped
