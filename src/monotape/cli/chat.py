"""Talk with a model; the KV of the conversation stays between turns."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import Any

from monotape.cli.options import (
    add_engine_arguments,
    add_sampling_arguments,
    engine_config,
    sampling_settings,
)
from monotape.cli.statistics import stats_line

HELP = "/clear forgets the conversation, /stats shows speed after each answer, /exit or Ctrl-D ends, Ctrl-C interrupts"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="a system message before the conversation")
    parser.add_argument("--stats", action="store_true", help="print speed after each answer")
    add_sampling_arguments(parser)
    add_engine_arguments(parser)


def main(options: argparse.Namespace) -> int:
    from monotape.engine.llm import LLM

    with LLM.from_config(engine_config(options)) as llm:
        params = dataclasses.replace(llm.default_sampling_params, max_tokens=None)
        params = dataclasses.replace(params, **sampling_settings(options))
        conversation = Conversation(llm, params, options.system, stats=options.stats)
        if sys.stdin.isatty():
            print(f"{options.model} on {llm.backend.name}. {HELP}.", file=sys.stderr)
        while (line := _ask()) is not None:
            if not conversation.take(line.strip()):
                break
    return 0


def _ask() -> str | None:
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None
    except KeyboardInterrupt:  # at the prompt there is nothing to interrupt: leave
        print(file=sys.stderr)
        return None


class Conversation:
    """The messages so far, and what a line of input does to them."""

    def __init__(self, llm: Any, params: Any, system: str | None, *, stats: bool) -> None:
        self._llm, self._params, self._stats = llm, params, stats
        self._beginning = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict[str, str]] = list(self._beginning)

    def take(self, line: str) -> bool:
        """Acts on a line. False: the user wants to leave."""
        if line in ("/exit", "/quit"):
            return False
        if line == "/clear":
            self.messages = list(self._beginning)
        elif line == "/stats":
            self._stats = not self._stats
        elif line.startswith("/"):
            print(HELP, file=sys.stderr)
        elif line:
            self._answer(line)
        return True

    def _answer(self, line: str) -> None:
        self.messages.append({"role": "user", "content": line})
        stream = self._llm.stream_chat(self.messages, self._params)
        try:
            for delta in stream:
                print(delta.text, end="", flush=True)
        except KeyboardInterrupt:
            stream.close()
        finally:
            print()
        self.messages.append({"role": "assistant", "content": stream.text})
        if self._stats:
            print(stats_line(stream.completion.stats, self._llm.backend), file=sys.stderr)
