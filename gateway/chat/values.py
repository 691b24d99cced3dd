"""A parameter's value as JSON text while it is being generated."""

from __future__ import annotations

import json
from typing import Protocol


class Value(Protocol):
    """One value: ``open``, pieces, ``close``; what they return is JSON when put together."""

    def open(self) -> str:
        """What comes before the first piece."""

    def push(self, text: str) -> str:
        """The JSON that is certain after this piece of the model's text."""

    def close(self) -> str:
        """What is left once the value is complete."""

    def cut(self) -> str:
        """What is left of a value that was never completed."""


class TextValue:
    """A string, written by the model as is."""

    def open(self) -> str:
        return '"'

    def push(self, text: str) -> str:
        return json.dumps(text, ensure_ascii=False)[1:-1]

    def close(self) -> str:
        return '"'

    def cut(self) -> str:
        return ""


class JsonValue:
    """A value written as JSON.

    Objects and lists go through as they come, with raw control characters in their strings escaped; anything
    else waits for its end, and becomes a string if it is no JSON.
    """

    def __init__(self) -> None:
        self._waiting = ""
        self._streams = False
        self._in_string = False
        self._escaped = False
        self.is_sound = True

    def open(self) -> str:
        return ""

    def push(self, text: str) -> str:
        if self._streams:
            return self._escape_controls(text)
        self._waiting += text
        begin = self._waiting.lstrip()
        if not begin.startswith(("{", "[")):
            return ""
        self._streams, self._waiting = True, ""
        return self._escape_controls(begin)

    def close(self) -> str:
        if self._streams:
            return ""
        text = self._waiting.strip()
        self.is_sound = _is_json(text)
        return text if self.is_sound else json.dumps(text, ensure_ascii=False)

    def cut(self) -> str:
        return self._waiting

    def _escape_controls(self, text: str) -> str:
        out = []
        for character in text:
            if self._in_string and character < " ":
                out.append(json.dumps(character)[1:-1])
            else:
                out.append(character)
            if self._escaped:
                self._escaped = False
            elif character == '"':
                self._in_string = not self._in_string
            elif character == "\\":
                self._escaped = self._in_string
        return "".join(out)


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
