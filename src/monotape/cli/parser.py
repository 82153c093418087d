"""The parser of every command: raises one sentence and a hint, and knows how the user wrote a setting."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

from monotape.errors import MonotapeError, UsageError, near


class Parser(argparse.ArgumentParser):
    """Raises UsageError instead of printing the whole usage."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message[0].upper()}{message[1:]}.", f"See `{self.prog} --help`.")

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
        """The same error with the flag that the user gave in the place of the engine's name for it."""
        for action in self._actions:
            if action.option_strings and error.message.startswith(f"{action.dest} is "):
                message = action.option_strings[0] + error.message.removeprefix(action.dest)
                return type(error)(message, error.hint)
        return error

    @property
    def settings(self) -> dict[str, argparse.Action]:
        """Everything that can be set, by its name; not what only prints."""
        printing = ("help", "version")
        return {action.dest: action for action in self._actions if action.dest not in printing}
