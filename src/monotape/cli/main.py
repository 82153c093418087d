"""The command line: parses, dispatches, and turns every expected failure into one sentence, a hint and exit code 2."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NoReturn

from monotape import __version__
from monotape.cli.interrupts import INTERRUPTED, INTERRUPTS
from monotape.cli.parser import Parser
from monotape.errors import MonotapeError, UsageError, near

COMMANDS = (
    "run", "chat", "serve", "deploy", "connect", "bench", "inspect", "plan", "trace", "doctor", "pull", "list", "rm",
    "completion",
)  # fmt: skip
_DELETING = ("rm",)  # suggested only where nothing else is near
#: What other tools call them.
_ELSEWHERE = {
    "ls": "list", "models": "list", "remove": "rm", "delete": "rm", "download": "pull", "fetch": "pull",
    "generate": "run", "ask": "run", "show": "inspect", "help": "--help", "version": "--version",
}  # fmt: skip


def build_parser(wanted: Sequence[str] = COMMANDS) -> tuple[Parser, dict[str, Parser]]:
    """The parser of the given commands alone: importing all of them takes as long as importing the engine."""
    parser = Parser(
        prog="monotape",
        description="Answers one LLM request as fast as the machine's memory allows.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"monotape {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    known = {}
    for name in wanted:
        module = import_module(f"monotape.cli.{name}")  # here, where an interrupt is answered already
        summary = (module.__doc__ or "").split("\n")[0]
        sub = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        module.add_arguments(sub)
        sub.set_defaults(handler=module.main, in_flags=sub.in_flags)
        known[name] = sub
    return parser, known


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; the return value is the process's exit code."""
    try:
        code = _run(arguments)
        sys.stdout.flush()  # here, where what cannot be written gets a sentence; Python would only complain at its exit
        return code
    except MonotapeError as error:
        print(f"monotape: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"  hint: {error.hint}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        INTERRUPTS.answered()
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output is gone; do not complain about that either
        return 0
    except OSError as error:
        print(f"monotape: {error.strerror or error}.", file=sys.stderr)
        print("  hint: Check the disk, the file and where the output goes.", file=sys.stderr)
        return 2


def _run(arguments: Sequence[str] | None) -> int:
    try:
        given = sys.argv[1:] if arguments is None else arguments
        if given and given[0] not in COMMANDS and not given[0].startswith("-"):
            raise _unknown_command(given[0])
        parser, commands = build_parser(given[:1] if given and given[0] in COMMANDS else COMMANDS)
        options, unknown = parser.parse_known_args(given)
        if options.command is None:
            parser.check_flags(unknown)
            parser.print_help()
            return 0
        commands[options.command].check_flags(unknown)
        options.arguments = given[1:]
        handler: Callable[[argparse.Namespace], int] = options.handler
        try:
            return handler(options)
        except MonotapeError as error:
            commands[options.command].in_flags(error)
            raise
    except BaseException:
        # What ends a command that was to end is the interrupt, whatever it has become on its way: Python itself makes
        # a RuntimeError of one in __set_name__, and a package that was half imported fails in ways of its own.
        if INTERRUPTS.waiting:
            raise KeyboardInterrupt from None
        raise


def _unknown_command(given: str) -> UsageError:
    shown = given if len(given) <= 80 else f"{given[:77]}..."
    harmless = (name for name in COMMANDS if name not in _DELETING)
    meant = _ELSEWHERE.get(given.lower()) or near(given, harmless) or near(given, _DELETING)
    hint = f"Did you mean `monotape {meant}`? " if meant else ""
    if not meant and (" " in given or "\n" in given):
        hint = "A prompt goes after `monotape run`. "
    return UsageError(f"monotape has no command '{shown}'.", f"{hint}There are: {', '.join(COMMANDS)}.")


def entry() -> NoReturn:
    _open_what_is_closed()
    try:
        INTERRUPTS.install()
        code = main()
        INTERRUPTS.uninstall()
    except KeyboardInterrupt:  # just before there was a command, or just after
        INTERRUPTS.uninstall()
        code = INTERRUPTED
    _let_go_of_output()
    sys.exit(code)


def _open_what_is_closed() -> None:
    """A shell's `>&-` leaves Python no stream at all. Each missing one becomes /dev/null: no input, no output.

    In their order: each gets its own number, the lowest that is free, and so child processes have it as well.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDONLY if mode == "r" else os.O_WRONLY)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, mode, encoding="utf-8"))


def _let_go_of_output() -> None:
    """Output that could not be written stays in the buffer: Python would try again at its exit, and complain itself."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
