"""Talk with a model; the KV of the conversation stays between turns."""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections.abc import Callable
from typing import Any

from monotape.cli.answer_printer import AnswerPrinter
from monotape.cli.interrupts import INTERRUPTS
from monotape.cli.line_editor import asker, is_interactive
from monotape.cli.options import (
    add_engine_arguments,
    add_sampling_arguments,
    engine_config,
    sampling_settings,
    utf8,
)
from monotape.cli.statistics import loaded, sampling_line, stats_line
from monotape.config import api_key
from monotape.engine.wake import wake
from monotape.errors import RequestError, UsageError, near
from monotape.weights.embedded import is_embedded

HELP = (
    "/clear forgets the conversation, /stats shows speed after each answer, /exit or Ctrl-D ends; Ctrl-C stops an"
    " answer or clears the line, Alt-Enter begins a new line"
)
DOES_NOT_CHAT = (
    "The embedded model completes Python and does not chat. See `monotape run --model embedded --example`, or chat"
    " with another model, for example --model smollm2."
)
COMMANDS = ("/clear", "/stats", "/exit", "/quit", "/help")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--system", type=utf8, metavar="TEXT", help="a system message before the conversation"
    )
    parser.add_argument("--stats", action="store_true", help="print speed after each answer")
    parser.add_argument(
        "--url", metavar="URL", help="talk with a running server (Monotape, vLLM, llama.cpp, ...) instead"
    )
    parser.add_argument("--api-key", metavar="KEY", help="the key of that server (default: MONOTAPE_API_KEY)")
    parser.add_argument(
        "--no-history",
        action="store_true",
        help="do not keep what is typed for the arrow keys of the next chat",
    )
    add_sampling_arguments(parser)
    add_engine_arguments(parser)


def main(options: argparse.Namespace) -> int:
    if options.url is not None:
        return _remote(options)
    if options.api_key is not None:
        raise UsageError("--api-key is for a server.", "Say where it is with --url.")
    config = engine_config(options)
    wake(config)
    from monotape.engine.llm import LLM

    with LLM.from_config(config) as llm:
        if is_embedded(llm.source):
            print(f"monotape: {DOES_NOT_CHAT}", file=sys.stderr)
        given = sampling_settings(options)
        params = dataclasses.replace(llm.default_sampling_params, **{"max_tokens": None, **given})
        conversation = Conversation(
            llm,
            params,
            options.system,
            stats=options.stats,
            describe=lambda stream: stats_line(stream.completion.stats, llm.backend),
        )
        chosen = sampling_line(params, given, llm.default_sampling.source)
        return _talk(
            conversation, options, f"{options.model} ({loaded(llm)}) on {llm.backend.name}, {chosen}"
        )


def _remote(options: argparse.Namespace) -> int:
    """The same with a server."""
    from monotape.cli.endpoint import Endpoint
    from monotape.cli.remote import RemoteChat, asked_model, check_engine_flags, remote_stats

    check_engine_flags(options)
    endpoint = Endpoint(options.url, options.api_key or api_key())
    model = endpoint.model(asked_model(options))
    chat = RemoteChat(endpoint, model)
    conversation = Conversation(
        chat, sampling_settings(options), options.system, stats=options.stats, describe=remote_stats
    )
    return _talk(conversation, options, f"{model.id} at {endpoint.url}")


def _talk(conversation: Conversation, options: argparse.Namespace, introduction: str) -> int:
    """Until there are no more messages. A refused one does not end the conversation: the next may be accepted."""
    if is_interactive():
        print(f"{introduction}.\n{HELP}.", file=sys.stderr)
    ask, refused = asker(keep_history=not options.no_history), False
    while (line := ask()) is not None:
        try:
            if not conversation.take(line.strip()):
                break
        except RequestError as refusal:
            refused, error = True, options.in_flags(refusal)
            print(f"monotape: {error.message}", file=sys.stderr)
            if error.hint:
                print(f"  hint: {error.hint}", file=sys.stderr)
    return 2 if refused and not sys.stdin.isatty() else 0


class Conversation:
    """The messages so far, and what a line of input does to them."""

    def __init__(
        self,
        llm: Any,
        params: Any,
        system: str | None,
        *,
        stats: bool,
        describe: Callable[[Any], str] = lambda stream: "",
    ) -> None:
        self._llm, self._params, self._stats, self._describe = llm, params, stats, describe
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
        elif re.fullmatch(r"/[a-z]*", line):  # a message may begin with a path
            meant = near(line, COMMANDS) if line not in COMMANDS else None
            print(f"Did you mean {meant}? {HELP}." if meant else f"{HELP}.", file=sys.stderr)
        elif line:
            self._answer(line)
        return True

    def _answer(self, line: str) -> None:
        asked = [*self.messages, {"role": "user", "content": line}]
        stream, printer = self._llm.stream_chat(asked, self._params), AnswerPrinter()
        try:
            for delta in stream:
                printer.show(delta)
        except KeyboardInterrupt:
            stream.close()
            INTERRUPTS.answered()
            if not stream.text:  # a turn without a word would teach the model to say nothing
                return
        finally:
            printer.end_thoughts()
            print()
        self.messages = [*asked, {"role": "assistant", "content": stream.text}]
        if self._stats:
            print(self._describe(stream), file=sys.stderr)
