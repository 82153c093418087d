"""A TOML file with the settings of `monotape serve`: every flag by its name, checked as strictly as the flags are."""

from __future__ import annotations

import argparse
import math
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from monotape.cli.options import integer, names, real
from monotape.config import api_key
from monotape.errors import MonotapeError, UsageError, near

_OTHERS_MAY_READ = 0o044
_SWITCHES = (argparse._StoreTrueAction, argparse.BooleanOptionalAction)


def read_settings(path: str, settings: Iterable[argparse.Action]) -> dict[str, Any]:
    """The file's settings by the name that the parser has for them. `settings` are those that may be in it."""
    known = {name: action for action in settings for name in _spellings(action)}
    found: dict[str, Any] = {}
    for key, value in _table(path).items():
        name = key.replace("-", "_")
        if name not in known:
            raise _unknown(path, key, value, known)
        action = known[name]
        if action.dest in found:
            raise UsageError(f"{path} sets {key} twice, in two spellings.", "Remove one of them.")
        try:
            found[action.dest] = _checked(action, value)
        except MonotapeError as error:
            raise UsageError(f"{path}: {key}: {error.message}", error.hint) from None
    if "api_key" in found:
        _warn_of_readers(path)
        if api_key() is not None:  # a secret that the environment brings is newer than one in a file
            del found["api_key"]
    return found


def _spellings(action: argparse.Action) -> list[str]:
    """How the flag may be written in a file; what switches something off is `false` there."""
    long = [flag for flag in action.option_strings if flag.startswith("--") and not flag.startswith("--no-")]
    return [flag.removeprefix("--").replace("-", "_") for flag in long]


def _table(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).expanduser().read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}.", "Check --config.") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text (byte {error.start}).", "Save it as UTF-8.") from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(
            f"{path} is not TOML: {error}.", 'Lines look like port = 8000 or host = "::1".'
        ) from None


def _unknown(path: str, key: str, value: Any, known: Iterable[str]) -> UsageError:
    meant = near(key.replace("-", "_"), known)
    hint = f"Did you mean '{meant.replace('_', '-')}'?" if meant else "See `monotape serve --help`."
    if isinstance(value, dict):
        hint = "Write settings without a [section] above them."
    return UsageError(f"{path} sets '{key}', which is no setting of the server.", hint)


def _checked(action: argparse.Action, value: Any) -> Any:
    """A value of the kind that the flag takes."""
    if isinstance(action, _SWITCHES):
        _expect(type(value) is bool, value, "true or false")
    elif action.type is integer:
        _expect(type(value) is int, value, "a whole number")
    elif action.type is real:
        _expect(type(value) in (int, float) and math.isfinite(value), value, "a number")
    elif action.type is names:
        listed = value if isinstance(value, list) else [value]
        _expect(all(type(item) is str for item in listed), value, "text, or a list of texts")
        return tuple(name for item in listed for name in names(item))
    elif action.type in (None, str):
        _expect(type(value) is str, value, "text in quotes")
    if action.choices is not None:
        _expect(value in action.choices, value, f"one of {', '.join(map(str, action.choices))}")
    return value


def _expect(holds: bool, value: Any, wanted: str) -> None:
    if not holds:
        shown = str(value).lower() if isinstance(value, bool) else repr(value)
        raise UsageError(f"{shown} is not {wanted}.", f"Write {wanted}.")


def _warn_of_readers(path: str) -> None:
    if Path(path).expanduser().stat().st_mode & _OTHERS_MAY_READ:
        print(
            f"monotape: {path} holds the key, and other users may read it: chmod 600, or use MONOTAPE_API_KEY.",
            file=sys.stderr,
        )
