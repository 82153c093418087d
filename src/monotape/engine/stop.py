"""Stop strings on a stream: text goes out as soon as it cannot be the beginning of one."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Holds back the longest end of the text that could still become a stop string.

    The first stop string to be complete ends the text, however the text is cut into pieces. Of two that end
    at the same character the longer one counts, so that nothing of it is left in the text.
    """

    __slots__ = ("_held", "_include", "_longest", "_stops", "matched")

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, *, check: bool = True) -> str:
        """The text that may go out now. With `check` off, stop strings do not count yet."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        text, self._held = self._held + text, ""
        if not check:
            return text
        if (found := self._first_match(text)) is not None:
            start, self.matched = found
            return text[: start + len(self.matched)] if self._include else text[:start]
        kept = len(text) - self._possible_start(text)
        self._held = text[kept:]
        return text[:kept]

    def flush(self) -> str:
        """What was held back, once no more text can come."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        found = [(start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        return min(found, key=lambda match: (match[0] + len(match[1]), match[0]), default=None)

    def _possible_start(self, text: str) -> int:
        """The length of the longest end of `text` that is a beginning of a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
