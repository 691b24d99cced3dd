"""Tool calls in the model's tokens: what was rendered is parsed back, whatever the cuts; nothing fails."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.vocabulary import real_vocabulary

from gateway.chat.answer import AnswerParser, CallDelta, Delta
from gateway.chat.conversation import Effort, Message, Role, ToolCall
from gateway.chat.dsml import MARK, DsmlParser
from gateway.chat.render import render
from gateway.chat.segments import Segment, content, template, text_of
from gateway.chat.tokens import ChatTokenizer
from gateway.chat.tools import calls_block

OPEN, CLOSE = f"<{MARK}", f"</{MARK}"
HEAD = f"\n\n{OPEN}tool_calls>\n"
TAIL = f"\n{CLOSE}tool_calls>"


def parameter(name: str, value: str, kind: str = ' string="true"') -> str:
    return f'{OPEN}parameter name="{name}"{kind}>{value}{CLOSE}parameter>\n'


def invoke(name: str, *parameters: str) -> str:
    return f'{OPEN}invoke name="{name}">\n{"".join(parameters)}{CLOSE}invoke>\n'


def joined(deltas: Iterable[CallDelta]) -> list[tuple[str, str]]:
    """Names and arguments; every rule of the pieces is asserted."""
    calls: list[tuple[str, str]] = []
    for delta in deltas:
        if delta.index == len(calls):
            assert delta.id
            assert delta.arguments == ""
            calls.append((delta.name, ""))
        else:
            assert delta.index == len(calls) - 1
            assert delta.id == delta.name == ""
            assert delta.arguments
            calls[-1] = (calls[-1][0], calls[-1][1] + delta.arguments)
    return calls


def parse(
    text: str, sizes: Iterable[int] = (), *, cut: bool = False, single: bool = False
) -> tuple[str, list[tuple[str, str]], list[str]]:
    parser, said, deltas, at = DsmlParser(single=single), "", [], 0
    for size in [*sizes, len(text)]:
        parsed = parser.push(text[at : at + size])
        at += size
        said += parsed.content
        deltas += parsed.calls
    parsed = parser.finish(cut=cut)
    calls = joined([*deltas, *parsed.calls])
    assert [(call.name, call.arguments) for call in parser.calls] == calls
    return said + parsed.content, calls, parser.flaws


SOUP = [
    *(HEAD, TAIL, OPEN, CLOSE, MARK, "<", "</", "\n", " ", "x", '"', "{", "tool_calls>", "parameter>"),
    *(parameter("a", "1"), parameter("a", "{", ' string="false"'), parameter("b", "[1]", ""), invoke("g")),
    *(f'{OPEN}invoke name="f">', f"{CLOSE}invoke>", f'{OPEN}parameter name="c" string="false">', "y" * 1100),
]

names = st.text(st.characters(exclude_categories=["Cs"], exclude_characters='"'), max_size=8)
texts = st.text(
    st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from('\n<>/"\\')), max_size=12
) | st.sampled_from(["</｜DSML｜parameter>", "<｜DSML｜tool_calls>\n", "</", "<", "\n\n<"])
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)
calls = st.lists(st.tuples(names, st.dictionaries(names, values, max_size=4)), min_size=1, max_size=3)
cuts = st.lists(st.integers(1, 7), max_size=60)


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer(real_vocabulary())


@settings(max_examples=300, deadline=None)
@given(texts, calls, cuts)
def test_what_is_rendered_is_parsed_back(
    tokenizer: ChatTokenizer, said: str, made: list[tuple[str, dict[str, object]]], sizes: list[int]
) -> None:
    """Token by token or in any pieces; even where values hold the markup's own text."""
    block = calls_block([ToolCall("x", name, json.dumps(arguments)) for name, arguments in made])
    tokens = tokenizer.encode([content(said), *block])
    parser, deltas, at = AnswerParser(tokenizer, thinking=False, stops=(), tools=True), [], 0
    for size in [*sizes, len(tokens)]:
        deltas.append(parser.push(tokens[at : at + size]))
        at += size
    assert parser.complete
    assert parser.said == tokens
    assert not parser.flaws
    deltas.append(parser.finish())
    assert "".join(delta.content for delta in deltas) == said
    found = joined(call for delta in deltas for call in delta.calls)
    assert [(name, json.loads(arguments)) for name, arguments in found] == made


@settings(max_examples=500, deadline=None)
@given(
    st.lists(
        st.sampled_from(SOUP),
        max_size=12,
    ),
    cuts,
    st.booleans(),
    st.booleans(),
)
def test_any_cuts_of_anything_give_the_same(
    pieces: list[str], sizes: list[int], cut: bool, single: bool
) -> None:
    text = "".join(pieces)
    whole = parse(text, cut=cut, single=single)
    assert parse(text, sizes, cut=cut, single=single) == whole
    assert parse(text, [1] * len(text), cut=cut, single=single) == whole
    if not whole[1]:
        assert whole[0] == text.replace(MARK, "｜DSML｜")


@pytest.mark.parametrize(
    ("text", "said", "made"),
    [
        ("plain", "plain", []),
        ("a < b\n", "a < b\n", []),
        ("Sure." + HEAD + invoke("f", parameter("p", "v")) + TAIL, "Sure.", [("f", {"p": "v"})]),
        (HEAD + invoke("f") + TAIL + "\n", "", [("f", {})]),
        (HEAD + invoke("f") + invoke("g", parameter("n", " 5 ", ' string="false"')) + TAIL, "",
         [("f", {}), ("g", {"n": 5})]),
        # Missing parts are added where it is clear what was meant.
        (invoke("f", parameter("p", "v")), "", [("f", {"p": "v"})]),
        (HEAD + invoke("f", parameter("p", "v")), "", [("f", {"p": "v"})]),
        (HEAD + f'{OPEN}invoke name="f">\n' + parameter("p", "v"), "", [("f", {"p": "v"})]),
        (HEAD + f'{OPEN}invoke name="f">{OPEN}parameter name="p">v{CLOSE}invoke>' + TAIL, "",
         [("f", {"p": "v"})]),
        (HEAD + f'{OPEN}invoke name="f">{OPEN}parameter name="p">v{OPEN}parameter name="q">w' + TAIL.strip(),
         "", [("f", {"p": "v", "q": "w"})]),
        (HEAD + invoke("f", parameter("p", "v"), parameter("p", "again")) + TAIL, "", [("f", {"p": "v"})]),
        (HEAD + invoke("f", "chatter", parameter("p", "v")) + "more" + invoke("g") + TAIL, "",
         [("f", {"p": "v"}), ("g", {})]),
        # Values that are no JSON become strings; raw line breaks in JSON strings are escaped.
        (HEAD + invoke("f", parameter("p", "True", ' string="false"')) + TAIL, "", [("f", {"p": "True"})]),
        (HEAD + invoke("f", parameter("p", "NaN", ' string="false"')) + TAIL, "", [("f", {"p": "NaN"})]),
        (HEAD + invoke("f", parameter("p", "", ' string="false"')) + TAIL, "", [("f", {"p": ""})]),
        (HEAD + invoke("f", parameter("p", '["a\n\\"b\t"]', " string='false'")) + TAIL, "",
         [("f", {"p": ['a\n"b\t']})]),
        (HEAD + invoke("f", parameter("p", f"a{CLOSE}b{MARK}<{MARK}{CLOSE}")) + TAIL, "",
         [("f", {"p": "a</｜DSML｜b｜DSML｜<｜DSML｜</｜DSML｜"})]),
        # No call, no block: all of it is text.
        (HEAD + TAIL, HEAD + TAIL, []),
        (HEAD + "prose", HEAD + "prose", []),
        (HEAD + f'{OPEN}invoke name="f', HEAD + f'{OPEN}invoke name="f', []),
        (f"see {OPEN}parameter>", f"see {OPEN}parameter>", []),
    ],
)  # fmt: skip
def test_calls_are_found_and_recovered(text: str, said: str, made: list[tuple[str, object]]) -> None:
    content, found, _ = parse(text)
    assert content == said.replace(MARK, "｜DSML｜")
    assert [(name, json.loads(arguments)) for name, arguments in found] == made


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        (HEAD + f'{OPEN}invoke name="f">\n', ""),
        (HEAD + f'{OPEN}invoke name="f">\n' + parameter("p", "v"), '{"p": "v"'),
        (HEAD + f'{OPEN}invoke name="f">\n{OPEN}parameter name="p" string="true">half <', '{"p": "half <'),
        (HEAD + f'{OPEN}invoke name="f">\n{OPEN}parameter name="p" string="true">v{CLOSE}par', '{"p": "v'),
        (HEAD + f'{OPEN}invoke name="f">\n{OPEN}parameter name="p" string="false">12', '{"p": 12'),
    ],
)
def test_a_call_that_is_cut_stays_cut(text: str, arguments: str) -> None:
    assert parse(text, cut=True)[:2] == ("", [("f", arguments)])


def test_only_the_first_of_parallel_calls_when_there_may_be_one() -> None:
    both = HEAD + invoke("f", parameter("p", "v")) + invoke("g") + TAIL
    assert [name for name, _ in parse(both, single=True)[1]] == ["f"]
    assert parse(both, single=True)[2]
    assert not parse(HEAD + invoke("f") + TAIL, single=True)[2]


def test_arguments_come_while_they_are_written() -> None:
    parser = DsmlParser()
    parser.push(HEAD + f'{OPEN}invoke name="f">\n{OPEN}parameter name="p" string="true">')
    for word in ("some ", "words ", 'and "quotes" '):
        assert "".join(one.arguments for one in parser.push(word).calls) == json.dumps(word)[1:-1]
    parser.push(f'{CLOSE}parameter>\n{OPEN}parameter name="q" string="false">')
    assert "".join(one.arguments for one in parser.push('[{"a": ').calls) == '[{"a": '


def tokens_of(tokenizer: ChatTokenizer, said: str, *made: ToolCall) -> list[int]:
    return tokenizer.encode([Segment(said, template=False), *calls_block(made)])


CALL = ToolCall("x", "f", '{"p": "one STOP two"}')


def test_without_tools_nothing_is_a_call(tokenizer: ChatTokenizer) -> None:
    parser = AnswerParser(tokenizer, thinking=False, stops=())
    delta = parser.push(tokens_of(tokenizer, "a", CALL))
    assert delta.content == "a" + text_of(calls_block([CALL]))
    assert not delta.calls
    assert not parser.complete


def test_markup_in_ordinary_tokens_is_text(tokenizer: ChatTokenizer) -> None:
    text = text_of(calls_block([CALL]))
    parser = AnswerParser(tokenizer, thinking=False, stops=(), tools=True)
    delta = parser.push(tokenizer.encode([content(text)]))
    assert delta.content + parser.finish().content == text
    assert not parser.calls


def test_calls_in_the_thinking_are_thinking(tokenizer: ChatTokenizer) -> None:
    parser = AnswerParser(tokenizer, thinking=True, stops=(), tools=True)
    tokens = tokenizer.encode([*calls_block([CALL]), template("</think>"), content("done")])
    delta = parser.push(tokens)
    assert (delta.reasoning, delta.content, delta.calls) == (text_of(calls_block([CALL])), "done", ())


@pytest.mark.parametrize(
    ("said", "stopped", "content"),
    [("Look: ", False, "Look: "), ("a STOP b", True, "a "), ("a STO", False, "a STO"), ("", False, "")],
)
def test_stop_strings_count_in_the_content_alone(
    tokenizer: ChatTokenizer, said: str, stopped: bool, content: str
) -> None:
    parser = AnswerParser(tokenizer, thinking=False, stops=["STOP", "\n"], tools=True)
    deltas = [parser.push([token]) for token in tokens_of(tokenizer, said, CALL)]
    deltas.append(parser.finish())
    assert "".join(delta.content for delta in deltas) == content
    assert parser.stopped == stopped
    arguments = [call.arguments for call in parser.calls]
    assert arguments == ([] if stopped else [CALL.arguments])
    assert bool([call for delta in deltas for call in delta.calls]) != stopped


@settings(max_examples=100, deadline=None)
@given(texts, st.booleans(), st.integers(0, 99))
def test_every_token_of_the_content_is_told_once(
    tokenizer: ChatTokenizer, said: str, calls: bool, seed: int
) -> None:
    """What logprobs belong to; a token that holds content and line breaks of the block counts as content."""
    alone = tokenizer.encode([content(said)])
    tokens = tokens_of(tokenizer, said, CALL) if calls else alone
    parser, chance, deltas = (
        AnswerParser(tokenizer, thinking=False, stops=(), tools=True),
        random.Random(seed),
        [],
    )
    while tokens:
        size = chance.randint(1, 4)
        deltas.append(parser.push(tokens[:size]))
        tokens = tokens[size:]
    deltas.append(parser.finish())
    told = [token for delta in deltas for token in delta.content_tokens]
    text = tokenizer.decode(told)
    assert text.startswith(said)
    assert text[len(said) :].strip("\n") == ""
    assert calls or told == alone


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 129279) | st.sampled_from([128825, 30, 1718]), max_size=40))
def test_any_tokens_are_survived(tokenizer: ChatTokenizer, tokens: list[int]) -> None:
    parser = AnswerParser(tokenizer, thinking=False, stops=(), tools=True)
    deltas = [Delta(), *(parser.push([token]) for token in tokens), parser.finish()]
    if not parser.calls:
        assert "".join(delta.content for delta in deltas) == tokenizer.decode(tokens)


def test_a_long_answer_takes_linear_time() -> None:
    """Half a megabyte of text, then of an argument, in small pieces."""
    text = "words < and > more\n\n" * 12_500
    body = text + HEAD + f'{OPEN}invoke name="f">\n' + parameter("p", text) + f"{CLOSE}invoke>" + TAIL
    said, made, _ = parse(body, [5] * (len(body) // 5))
    assert said == text
    assert json.loads(made[0][1]) == {"p": text}


def test_a_history_with_calls_can_be_rendered_after_parsing(tokenizer: ChatTokenizer) -> None:
    """A canonical call that was sampled is rendered from its JSON as the very same tokens."""
    sampled = tokens_of(tokenizer, "Well.", CALL)
    parser = AnswerParser(tokenizer, thinking=False, stops=(), tools=True)
    said = parser.push(sampled).content
    messages = [Message(Role.USER, "q"), Message(Role.ASSISTANT, said, tool_calls=parser.calls)]
    prompt = tokenizer.encode(render(messages, Effort.NONE))
    assert prompt[-len(sampled) :] == sampled
