"""Stop strings in streamed text: found across pieces, never let through."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Lets text through up to the first stop string, holding back what might become one.

    The first is the one that is complete first, of equals the longest: cuts make no difference.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(filter(None, stops))
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that can go out; nothing any more once :attr:`matched` is set."""
        if self.matched is not None:
            return ""
        self._held += text
        found = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            at, self.matched = min(found, key=lambda one: (one[0] + len(one[1]), one[0]))
            out, self._held = self._held[:at], ""
            return out
        keep = self._beginning_length()
        out, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return out

    def flush(self) -> str:
        """What was held back, once no more text follows."""
        out, self._held = self._held, ""
        return out

    def _beginning_length(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            end = self._held[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
