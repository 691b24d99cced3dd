"""Tool calls in a model's text, found while it is generated.

An answer's calls are one block at its end::

    <｜DSML｜tool_calls>
    <｜DSML｜invoke name="NAME">
    <｜DSML｜parameter name="KEY" string="true">text</｜DSML｜parameter>
    <｜DSML｜parameter name="KEY" string="false">JSON</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜tool_calls>

Only the special token makes markup: the text given has :data:`MARK` in its place, so that the same characters
in ordinary tokens, which a model may copy from what it read, are text. A block without any call is given back
as text; after that, what does not belong is left out and missing closings are added, each noted as a flaw.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from gateway.chat.conversation import ToolCall
from gateway.chat.segments import DSML
from gateway.chat.values import JsonValue, TextValue, Value

MARK = "\ud800"
"""Stands for the special token; decoded UTF-8 never has it."""

_TAG_LIMIT = 1024
_NAMED = rf'name="([^"{MARK}]*)"([^>{MARK}]*)>'
_OPENINGS = {
    "calls": re.compile("tool_calls>"),
    "invoke": re.compile(f"invoke {_NAMED}"),
    "parameter": re.compile(f"parameter {_NAMED}"),
}
_CLOSINGS = {kind: re.compile(f"{name}>") for kind, name in
             (("calls", "tool_calls"), ("invoke", "invoke"), ("parameter", "parameter"))}  # fmt: skip
_BEGINNINGS = {
    False: ("tool_calls>", 'invoke name="', 'parameter name="'),
    True: ("tool_calls>", "invoke>", "parameter>"),
}
_MAY_BEGIN_BLOCK = re.compile(r"\n{0,2}<?\Z")
_MAY_BEGIN_TAG = re.compile(r"(?:</?)?\Z")


@dataclass(frozen=True)
class CallDelta:
    """A piece of the tool call number ``index``: its first has ``id`` and ``name``, ``arguments`` is a
    fragment of JSON text.
    """

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True)
class Parsed:
    """What a piece of text brought; content comes before any call."""

    content: str = ""
    calls: tuple[CallDelta, ...] = ()


class _State(Enum):
    TEXT = auto()
    BLOCK = auto()
    INVOKE = auto()
    VALUE = auto()
    DONE = auto()


@dataclass(frozen=True)
class _Tag:
    """A tag in the buffer, from ``begin`` to ``end``; of no known kind, it ends after its mark."""

    kind: str
    closes: bool
    begin: int
    end: int
    name: str = ""
    attributes: str = ""


def new_call_id() -> str:
    """An id no other call has."""
    return f"call_{uuid.uuid4().hex}"


class DsmlParser:
    """Takes one answer's text in pieces; the pieces' cuts make no difference.

    Args:
        single: whether the first call is the last one.
    """

    def __init__(self, *, single: bool = False, new_id: Callable[[], str] = new_call_id) -> None:
        self._single = single
        self._new_id = new_id
        self._state = _State.TEXT
        self._buffer = ""
        self._head = ""
        self._content: list[str] = []
        self._pieces: list[CallDelta] = []
        self._heads: list[tuple[str, str]] = []
        self._arguments: list[list[str]] = []
        self._keys: set[str] = set()
        self._value: Value | None = None
        self.flaws: list[str] = []
        """What was wrong with the markup, each once."""

    @property
    def complete(self) -> bool:
        """Whether no further text can be part of the answer."""
        return self._state is _State.DONE

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The calls so far; those that were cut have incomplete arguments."""
        return tuple(
            ToolCall(call_id, name, "".join(fragments))
            for (call_id, name), fragments in zip(self._heads, self._arguments, strict=True)
        )

    def push(self, text: str) -> Parsed:
        """What is certain after this text."""
        self._buffer += text
        while self._step():
            pass
        return self._take()

    def finish(self, *, cut: bool) -> Parsed:
        """What was held back, at the answer's end.

        Args:
            cut: whether the model would have gone on.
        """
        if self._state is _State.TEXT or (self._state is _State.BLOCK and not self._heads):
            self._say(self._head + self._buffer)
        elif self._state is _State.VALUE:
            self._write(self._before_tag() if MARK in self._buffer else self._buffer)
            if self._value is not None:
                self._argue(self._value.cut())
        if self._state in (_State.BLOCK, _State.INVOKE, _State.VALUE):
            self._flaw(f"ended in {self._state.name.lower()}")
        if self._state is _State.INVOKE and not cut:
            self._end_call()
        self._state, self._buffer = _State.DONE, ""
        return self._take()

    def _take(self) -> Parsed:
        parsed = Parsed("".join(self._content), tuple(self._pieces))
        self._content, self._pieces = [], []
        return parsed

    def _step(self) -> bool:
        """Takes what it can from the buffer; returns whether there may be more to take."""
        match self._state:
            case _State.TEXT:
                return self._in_text()
            case _State.BLOCK:
                return self._in_block()
            case _State.INVOKE:
                return self._in_invoke()
            case _State.VALUE:
                return self._in_value()
            case _State.DONE:
                return self._after_all()

    def _in_text(self) -> bool:
        tag = self._next_tag()
        if tag is None:
            held = _MAY_BEGIN_BLOCK.search(self._before_mark())
            assert held is not None  # it matches the empty end
            self._say(self._cut_off(held.start()))
            return False
        if tag.closes or tag.kind not in ("calls", "invoke"):
            self._say(self._cut_off(tag.end))
            return True
        before = self._buffer[: tag.begin]
        breaks = len(before) - len(before.rstrip("\n"))
        self._say(self._cut_off(tag.begin - min(breaks, 2)))
        if tag.kind == "calls":
            self._head = self._cut_off(min(breaks, 2) + tag.end - tag.begin)
        else:
            self._flaw("no opening of the block")
            self._cut_off(min(breaks, 2))
        self._state = _State.BLOCK
        return True

    def _in_block(self) -> bool:
        tag = self._next_tag()
        before = self._buffer[: tag.begin] if tag else self._before_tag()
        known = tag is not None and (tag.kind == "invoke" if not tag.closes else tag.kind == "calls")
        if not self._heads and (before.strip() or (tag and (tag.closes or not known))):
            self._give_back()
            return True
        if tag is None:
            return bool(self._heads) and self._drop(before)
        self._drop(before)
        if not known:
            return self._drop(self._buffer[: tag.end - len(before)])
        if self._single and self._heads and not tag.closes:
            self._flaw("a further call")
            self._state = _State.DONE
            return True
        self._cut_off(tag.end - len(before))
        if tag.closes:
            self._state = _State.DONE
        else:
            self._begin_call(tag.name)
        return True

    def _in_invoke(self) -> bool:
        tag = self._next_tag()
        before = self._buffer[: tag.begin] if tag else self._before_tag()
        self._drop(before)
        if tag is None:
            return False
        size = tag.end - len(before)
        if tag.kind == "parameter" and not tag.closes:
            self._cut_off(size)
            self._begin_value(tag)
        elif tag.kind == "invoke" and tag.closes:
            self._cut_off(size)
            self._end_call()
        elif (tag.kind, tag.closes) in (("invoke", False), ("calls", True)):
            self._flaw("no closing of a call")
            self._end_call()
        else:
            self._drop(self._buffer[:size])
        return True

    def _in_value(self) -> bool:
        tag = self._next_tag()
        if tag is None:
            self._write(self._cut_off(len(self._before_tag())))
            return False
        if not tag.kind or (tag.kind, tag.closes) == ("calls", False):
            self._write(self._cut_off(tag.end))
            return True
        self._write(self._cut_off(tag.begin))
        if (tag.kind, tag.closes) == ("parameter", True):
            self._cut_off(tag.end - tag.begin)
        else:
            self._flaw("no closing of a parameter")
        self._end_value()
        return True

    def _after_all(self) -> bool:
        if self._buffer.strip():
            self._flaw("text after the calls")
        self._buffer = ""
        return False

    def _begin_call(self, name: str) -> None:
        self._head = ""
        self._heads.append((self._new_id(), name))
        self._arguments.append([])
        self._pieces.append(CallDelta(len(self._heads) - 1, *self._heads[-1]))
        self._keys = set()
        self._state = _State.INVOKE

    def _end_call(self) -> None:
        self._argue("}" if self._keys else "{}")
        self._state = _State.BLOCK

    def _begin_value(self, tag: _Tag) -> None:
        self._state = _State.VALUE
        if tag.name in self._keys:
            self._flaw("a parameter twice")
            return
        self._value = JsonValue() if "false" in tag.attributes else TextValue()
        self._argue(", " if self._keys else "{")
        self._argue(json.dumps(tag.name, ensure_ascii=False) + ": " + self._value.open())
        self._keys.add(tag.name)

    def _write(self, text: str) -> None:
        if self._value is not None:
            self._argue(self._value.push(text.replace(MARK, DSML)))

    def _end_value(self) -> None:
        if self._value is not None:
            self._argue(self._value.close())
            if isinstance(self._value, JsonValue) and not self._value.is_sound:
                self._flaw("a value that is no JSON")
        self._value = None
        self._state = _State.INVOKE

    def _argue(self, fragment: str) -> None:
        if fragment:
            self._arguments[-1].append(fragment)
            self._pieces.append(CallDelta(len(self._heads) - 1, arguments=fragment))

    def _say(self, text: str) -> None:
        self._content.append(text.replace(MARK, DSML))

    def _give_back(self) -> None:
        """A block that has turned out to be none."""
        self._flaw("a block without a call")
        self._say(self._head)
        self._head = ""
        self._state = _State.TEXT

    def _drop(self, text: str) -> bool:
        """Leaves out the buffer's beginning, which is this text; returns whether there was any."""
        if text.strip():
            self._flaw("text between calls")
        self._buffer = self._buffer[len(text) :]
        return bool(text)

    def _cut_off(self, length: int) -> str:
        text, self._buffer = self._buffer[:length], self._buffer[length:]
        return text

    def _flaw(self, what: str) -> None:
        if what not in self.flaws:
            self.flaws.append(what)

    def _before_mark(self) -> str:
        return self._buffer.partition(MARK)[0]

    def _before_tag(self) -> str:
        """The buffer up to what may begin a tag."""
        before = self._before_mark()
        held = _MAY_BEGIN_TAG.search(before)
        assert held is not None  # it matches the empty end
        return before[: held.start()]

    def _next_tag(self) -> _Tag | None:
        """The first tag in the buffer, once it is certain what it is."""
        mark = self._buffer.find(MARK)
        if mark < 0:
            return None
        closes = self._buffer.endswith("</", 0, mark)
        begin = mark - 2 if closes else mark - 1
        if not closes and not self._buffer.endswith("<", 0, mark):
            return _Tag("", False, mark, mark + 1)
        rest = self._buffer[mark + 1 : mark + 1 + _TAG_LIMIT]
        for kind, pattern in (_CLOSINGS if closes else _OPENINGS).items():
            if found := pattern.match(rest):
                return _Tag(kind, closes, begin, mark + 1 + found.end(), *found.groups())
        may_become_one = any(
            beginning.startswith(rest) or rest.startswith(beginning) for beginning in _BEGINNINGS[closes]
        )
        if may_become_one and MARK not in rest and len(rest) < _TAG_LIMIT:
            return None
        return _Tag("", closes, begin, mark + 1)
