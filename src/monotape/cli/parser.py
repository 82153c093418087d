"""The parser of every command: raises one sentence and a hint, and knows how the user wrote a setting."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from monotape.errors import MonotapeError, UsageError, near


class Parser(argparse.ArgumentParser):
    """Raises UsageError instead of printing the whole usage."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message[0].upper()}{message[1:]}.", f"See `{self.prog} --help`.")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return super()._get_value(action, arg_string)
        except UsageError as error:
            if not action.option_strings:
                raise
            raise UsageError(f"{action.option_strings[0]}: {error.message}", error.hint) from None

    def _check_value(self, action: argparse.Action, value: object) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            meant = near(str(value), known)
            hint = f"Did you mean '{meant}'? " if meant else ""
            flag = f"{action.option_strings[-1]} of " if action.option_strings else ""
            message = f"{flag}{self.prog} does not understand '{value}'."
            raise UsageError(message, f"{hint}There are: {', '.join(known)}.")

    def check_flags(self, unknown: Sequence[str]) -> None:
        if unknown:
            flags = [flag for action in self._actions for flag in action.option_strings]
            given = unknown[0].split("=")[0]
            hint = "Quote text with spaces, and name a model with --model."
            if given.startswith("-"):
                names = {flag.lstrip("-"): flag for flag in flags}  # all have dashes in common
                meant = near(given.lstrip("-"), names)
                hint = f"Did you mean '{names[meant]}'?" if meant else f"See `{self.prog} --help`."
            elif "--model" not in flags:
                hint = "Quote text with spaces."
            raise UsageError(f"{self.prog} does not understand '{given}'.", hint)

    def in_flags(self, error: MonotapeError) -> MonotapeError:
        """The same error, with flags in the place of the engine's names for them. A message names a setting first, if
        it names one; words that follow may come from files.
        """
        flags = {action.dest: action.option_strings[0] for action in self._actions if action.option_strings}
        name, verb, rest = error.message.partition(" is ")
        if verb and name in flags:
            error.message = f"{flags[name]}{verb}{rest}"
        for name, flag in flags.items():
            if "_" in name:  # the others are words, too
                error.hint = re.sub(rf"\b{name}\b", flag, error.hint)
        return error

    @property
    def settings(self) -> dict[str, argparse.Action]:
        """Everything that can be set, by its name; not what only prints."""
        printing = ("help", "version")
        return {action.dest: action for action in self._actions if action.dest not in printing}
