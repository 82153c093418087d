"""Says how far a long prompt has been read: the time to the first token can be minutes, and nothing else shows."""

from __future__ import annotations

import logging

LOG = logging.getLogger("monotape.server")
EVERY_S = 5.0


class PrefillLog:
    """The lines about one prompt, from the start of its job to its first token. Short prompts have none."""

    def __init__(self, prompt_tokens: int, cached: int, now: float) -> None:
        self._prompt, self._cached = prompt_tokens, cached
        self._began = self._last = now

    def look(self, now: float, filled: int) -> None:
        """`filled` counts the tokens whose KV is there, cached ones included."""
        if now - self._last < EVERY_S:
            return
        self._last = now
        took = now - self._began
        if filled <= self._cached:
            LOG.info(
                "Prompt: %d tokens (%d cached) are being read, for %.0f s so far.",
                self._prompt, self._cached, took,
            )  # fmt: skip
            return
        LOG.info(
            "Prompt: %d of %d tokens read (%d cached), %.0f %% after %.0f s, %.0f tok/s.",
            filled, self._prompt, self._cached, 100 * filled / self._prompt, took, (filled - self._cached) / took,
        )  # fmt: skip
