"""The command line: parses, dispatches, and turns every expected failure into one sentence, a hint and exit code 2."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NoReturn

from monotape import __version__
from monotape.cli.interrupts import INTERRUPTED, INTERRUPTS
from monotape.errors import MonotapeError, UsageError, nearest

COMMANDS = ("run", "chat", "serve", "connect", "bench", "inspect", "plan", "trace", "doctor", "pull")


class Parser(argparse.ArgumentParser):
    """Raises UsageError instead of printing the whole usage."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message[0].upper()}{message[1:]}.", f"See `{self.prog} --help`.")

    def check_flags(self, unknown: Sequence[str]) -> None:
        if unknown:
            flags = [flag for action in self._actions for flag in action.option_strings]
            given = unknown[0].split("=")[0]
            hint = "Quote text with spaces, and name a model with --model."
            if given.startswith("-"):
                hint = f"Did you mean '{nearest(given, flags)}'?"
            elif "--model" not in flags:
                hint = "Quote text with spaces."
            raise UsageError(f"{self.prog} does not understand '{given}'.", hint)


def build_parser(wanted: Sequence[str] = COMMANDS) -> tuple[Parser, dict[str, Parser]]:
    """Of the commands that are wanted: importing all of them takes as long as importing the engine."""
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
        sub.set_defaults(handler=module.main)
        known[name] = sub
    return parser, known


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; the return value is the process's exit code."""
    try:
        return _run(arguments)
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
        sys.stderr.close()  # nobody reads us any more; do not complain about that either
        return 0
    except OSError as error:
        print(f"monotape: {error.strerror or error}.", file=sys.stderr)
        print("  hint: Check the disk, the file and where the output goes.", file=sys.stderr)
        return 2


def _run(arguments: Sequence[str] | None) -> int:
    try:
        given = sys.argv[1:] if arguments is None else arguments
        parser, commands = build_parser(given[:1] if given and given[0] in COMMANDS else COMMANDS)
        options, unknown = parser.parse_known_args(given)
        if options.command is None:
            parser.check_flags(unknown)
            parser.print_help()
            return 0
        commands[options.command].check_flags(unknown)
        handler: Callable[[argparse.Namespace], int] = options.handler
        return handler(options)
    except BaseException:
        # What ends a command that was to end is the interrupt, whatever it has become on its way: Python itself makes
        # a RuntimeError of one in __set_name__, and a package that was half imported fails in ways of its own.
        if INTERRUPTS.waiting:
            raise KeyboardInterrupt from None
        raise


def entry() -> NoReturn:
    try:
        INTERRUPTS.install()
        code = main()
        INTERRUPTS.uninstall()
    except KeyboardInterrupt:  # just before there was a command, or just after
        INTERRUPTS.uninstall()
        code = INTERRUPTED
    sys.exit(code)
