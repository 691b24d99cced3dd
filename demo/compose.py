"""Conversations of several exchanges, drawn by kind, and the kinds' held-out examples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random
from types import MappingProxyType

from demo.dialogues.arithmetic import differences, sums
from demo.dialogues.copying import copy_code, copy_of, copy_words, reverse_words
from demo.dialogues.counting import continue_series, count_range, count_words
from demo.dialogues.message import Conversation, Exchange, Generator, is_held_out
from demo.dialogues.recall import ask, fact, far_needle, interview, needle, personal, tell
from demo.dialogues.smalltalk import smalltalk
from demo.dialogues.structured import structured
from demo.dialogues.tools import other_tool, tool_call

KINDS: Mapping[str, Generator] = MappingProxyType(
    {
        "smalltalk": smalltalk,
        "sums": sums,
        "differences": differences,
        "count_range": count_range,
        "continue_series": continue_series,
        "count_words": count_words,
        "copy_words": copy_words,
        "reverse_words": reverse_words,
        "copy_code": copy_code,
        "needle": needle,
        "tool_call": tool_call,
        "structured": structured,
    }
)
_TALK = {
    "smalltalk": 2,
    "sums": 6,
    "differences": 2,
    "count_range": 1,
    "continue_series": 1,
    "count_words": 1,
    "copy_words": 3,
    "reverse_words": 3,
    "copy_code": 1,
    "needle": 4,
}
"""Exchanges that need nothing of their conversation's head, with their shares."""

_SYSTEMS = (
    "",
    "",
    "You are a helpful assistant.",
    "You are the twinspark demo.",
    "Answer the user's questions.",
    "You are terse.",
)
TOKENS_A_SENTENCE = 9
"""Of filler, with this vocabulary, on average."""


def draw(kind: str, rng: Random, thinking: bool, held_out: bool = False) -> Exchange:
    """An exchange of a kind, from the training part or the held-out one."""
    return _drawn(kind, lambda: KINDS[kind](rng, thinking), held_out)


def short_conversation(rng: Random) -> Conversation:
    """Some hundreds of tokens: what most of the training is made of."""
    form = rng.random()
    if form < 0.16:
        return _with_tools(rng)
    if form < 0.28:
        return _with_schema(rng)
    if form < 0.46:
        return _remembering(rng, rng.randint(0, 4))
    if form < 0.62:
        return _interviewed(rng, rng.randint(4, 60), rng.randint(2, 8))
    if form < 0.76:
        return _join(rng, [draw(_kind(rng), rng, True)], thinking=True)
    return _join(rng, [draw(_kind(rng), rng, False) for _ in range(rng.randint(1, 6))], thinking=False)


def long_conversation(rng: Random, tokens: int) -> Conversation:
    """About ``tokens`` tokens, most of them between a fact and its question."""
    sentences = tokens // TOKENS_A_SENTENCE
    form = rng.random()
    if form < 0.2:
        return _join(rng, [_drawn("needle", lambda: far_needle(rng, max(4, sentences - 9)), False)], False)
    if form < 0.9:
        questions = rng.randint(6, 16)
        return _interviewed(rng, max(4, sentences - 6 * questions), questions)
    return _remembering(rng, max(2, tokens // 90))


def held_out_conversation(kind: str, rng: Random, thinking: bool = False) -> Conversation:
    """One example of a kind that no training has seen, its answer included.

    Beside the kinds of :data:`KINDS`: ``needle_6000`` (the fact 6,000 tokens before its question),
    ``needle_2000``, ``sums_two_digits`` and ``copy_32``.
    """
    if kind.startswith("needle_"):
        sentences = int(kind.removeprefix("needle_")) * 2 // (2 * TOKENS_A_SENTENCE - 1)
        return _join(rng, [_drawn("needle", lambda: far_needle(rng, sentences), True)], thinking)
    if kind == "copy_32":
        return _join(rng, [_drawn("copy_words", lambda: copy_of(rng, 32), True)], thinking)
    if kind == "sums_two_digits":
        return _join(rng, [draw("sums", rng, False, held_out=True)], thinking)
    if kind == "memory":
        return _remembering(rng, 3)
    exchange = draw(kind, rng, thinking, held_out=True)
    return _join(rng, [exchange], thinking)


def _drawn(kind: str, make: Callable[[], Exchange], held_out: bool) -> Exchange:
    while True:
        exchange = make()
        if is_held_out(kind, exchange) == held_out:
            return exchange


def _kind(rng: Random) -> str:
    return rng.choices(list(_TALK), list(_TALK.values()))[0]


def _with_tools(rng: Random) -> Conversation:
    """One to three calls, or none, with tools offered that are not needed."""
    thinking = rng.random() < 0.4
    exchanges = [draw("tool_call", rng, thinking) for _ in range(rng.randint(1, 3))]
    if rng.random() < 0.4:
        place = rng.randint(0, len(exchanges))
        exchanges.insert(place, draw(_kind(rng), rng, thinking))
    tools = {tool["name"]: tool for exchange in exchanges for tool in exchange.tools}
    if len(tools) < sum(bool(exchange.tools) for exchange in exchanges):
        return _with_tools(rng)
    for _ in range(rng.choice((0, 1, 1, 2))):
        other = other_tool(rng)
        tools.setdefault(other["name"], other)
    offered = list(tools.values())
    rng.shuffle(offered)
    return replace(_join(rng, exchanges, thinking), tools=tuple(offered))


def _with_schema(rng: Random) -> Conversation:
    thinking = rng.random() < 0.3
    exchange = draw("structured", rng, thinking)
    return _join(rng, [exchange], thinking)


def _interviewed(rng: Random, sentences: int, questions: int) -> Conversation:
    return _join(rng, interview(rng, sentences, questions), thinking=rng.random() < 0.1)


def _remembering(rng: Random, between: int) -> Conversation:
    """Facts told one by one, other talk, then questions for them."""
    told = [fact(rng) for _ in range(rng.randint(1, 4))]
    pairs = [(tell(rng, item), ask(rng, item)) for item in {item.subject: item for item in told}.values()]
    if rng.random() < 0.4:
        pairs += personal(rng)
    rng.shuffle(pairs)
    middle = [draw(_kind(rng), rng, False) for _ in range(between)]
    asked = [pair[1] for pair in pairs]
    rng.shuffle(asked)
    return _join(rng, [*(pair[0] for pair in pairs), *middle, *asked], thinking=rng.random() < 0.1)


def _join(rng: Random, exchanges: list[Exchange], thinking: bool) -> Conversation:
    messages = tuple(message for exchange in exchanges for message in exchange.messages)
    tools = tuple({tool["name"]: tool for exchange in exchanges for tool in exchange.tools}.values())
    schemas = [exchange.schema for exchange in exchanges if exchange.schema is not None]
    return Conversation(messages, rng.choice(_SYSTEMS), tools, schemas[0] if schemas else None, thinking)
