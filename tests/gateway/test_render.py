"""Rendering against the official token counts, goldens and rules."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.vocabulary import real_vocabulary

from gateway.chat.conversation import Effort, Message, Role
from gateway.chat.render import opens_thinking, render
from gateway.chat.segments import text_of
from gateway.chat.tokens import ChatTokenizer

PROMPTS = Path(__file__).parents[2].parent / "shared" / "reference" / "prompts"
BOS, EOS, USER, ASSISTANT = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
)


def system(text: str) -> Message:
    return Message(Role.SYSTEM, text)


def user(text: str) -> Message:
    return Message(Role.USER, text)


def assistant(text: str, reasoning: str = "") -> Message:
    return Message(Role.ASSISTANT, text, reasoning)


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer(real_vocabulary())


@pytest.mark.skipif(not PROMPTS.is_dir(), reason=f"the official prompts are not at {PROMPTS}")
@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("short_italian_fact", 21),
        ("short_code_completion", 27),
        ("short_reasoning_plain", 18),
        ("long_memory_archive", 3353),
        ("long_code_audit", 3844),
    ],
)
def test_official_prompts_have_the_official_number_of_tokens(
    tokenizer: ChatTokenizer, name: str, count: int
) -> None:
    text = (PROMPTS / f"{name}.txt").read_text(encoding="utf-8")
    assert len(tokenizer.encode(render([user(text)], Effort.NONE))) == count


def test_a_conversation_has_the_reference_ids(tokenizer: ChatTokenizer) -> None:
    messages = [user("hello"), assistant("Hi there!", "dropped"), user("And now?")]
    expected = [0, 128803, 33310, 128804, 128822, 23166, 1031, 3, 1, 128803, 4195, 1928, 33, 128804, 128821]
    assert tokenizer.encode(render(messages, Effort.HIGH)) == expected


def test_maximum_effort_says_so_first_in_79_tokens(tokenizer: ChatTokenizer) -> None:
    plain = tokenizer.encode(render([user("hello")], Effort.HIGH))
    longest = tokenizer.encode(render([user("hello")], Effort.MAX))
    assert len(longest) - len(plain) == 79
    assert longest[0] == plain[0]
    assert longest[80:] == plain[1:]


@pytest.mark.parametrize(
    ("messages", "effort", "text"),
    [
        ([system("S"), user("a")], Effort.NONE, f"{BOS}S{USER}a{ASSISTANT}</think>"),
        ([user("a"), user("b")], Effort.HIGH, f"{BOS}{USER}a\n\nb{ASSISTANT}<think>"),
        (
            [user("a"), assistant("b"), system("S"), user("c")],
            Effort.NONE,
            f"{BOS}{USER}a{ASSISTANT}</think>b{EOS}S{USER}c{ASSISTANT}</think>",
        ),
        ([user("a"), system("S")], Effort.NONE, f"{BOS}S{USER}a{ASSISTANT}</think>"),
        ([user("a"), assistant("be")], Effort.NONE, f"{BOS}{USER}a{ASSISTANT}</think>be"),
        ([user("a"), assistant("be", "why")], Effort.HIGH, f"{BOS}{USER}a{ASSISTANT}<think>why</think>be"),
        (
            [user("a"), assistant("b"), assistant("c"), user("d")],
            Effort.NONE,
            f"{BOS}{USER}a{ASSISTANT}</think>b{EOS}c{EOS}{USER}d{ASSISTANT}</think>",
        ),
    ],
)
def test_turns_are_rendered_by_the_official_rules(messages: list[Message], effort: Effort, text: str) -> None:
    assert text_of(render(messages, effort)) == text


contents = st.text(alphabet="ab<｜User｜></think>\n", max_size=12)


@given(st.lists(st.tuples(contents, contents), max_size=4), contents, st.sampled_from(Effort))
def test_a_next_turn_extends_the_previous_prompt(
    turns: list[tuple[str, str]], last: str, effort: Effort
) -> None:
    """Without thinking, what a bank holds after a turn is a beginning of the next turn's prompt."""
    messages = [m for question, answer in turns for m in (user(question), assistant(answer))]
    before = text_of(render([*messages, user(last)], Effort.NONE))
    after = text_of(render([*messages, user(last), assistant("an answer"), user("next")], Effort.NONE))
    assert after.startswith(before + "an answer" + EOS)
    assert opens_thinking([user(last)], effort) == text_of(render([user(last)], effort)).endswith("<think>")
