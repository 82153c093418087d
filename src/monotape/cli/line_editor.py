"""Asks for the messages of a chat: with an editor at a terminal, line by line from anything else.

The editor is prompt_toolkit's. Python's own readline module is GNU's on one system and libedit on another: only the
first takes a paste of several lines as one, neither edits such a message once it is there, and an interrupt at its
prompt loses what was typed before on the same line. One editor everywhere is worth a dependency without compiled code.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from monotape.cli.interrupts import INTERRUPTS
from monotape.config import cache_dir

if TYPE_CHECKING:
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

Ask = Callable[[], str | None]  # the next message; None: there are no more
PROMPT = "> "
LEAVE = "(/exit or Ctrl-D ends)"


def is_interactive() -> bool:
    """Whether a person types: on a terminal, and with one to see what is typed."""
    return sys.stdin.isatty() and (sys.stdout.isatty() or sys.stderr.isatty())


def asker(*, keep_history: bool = True) -> Ask:
    """What asks for messages here."""
    return _editor(keep_history) if is_interactive() else _next_line


def _next_line() -> str | None:
    try:
        return input()
    except EOFError:
        return None
    except KeyboardInterrupt:
        INTERRUPTS.answered()
        return None


def _editor(keep_history: bool) -> Ask:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.output import create_output

    output = create_output(always_prefer_tty=True)  # an answer may be redirected into a file
    output.enable_cpr = False  # type: ignore[attr-defined]  # no menus: the terminal need not say where the cursor is
    history = _history(cache_dir() / "chat-history") if keep_history else None
    session: PromptSession[str] = PromptSession(
        PROMPT, multiline=True, prompt_continuation="  ", history=history, key_bindings=_keys(), output=output
    )

    def ask() -> str | None:
        while True:
            try:
                return session.prompt()
            except EOFError:
                return None
            except KeyboardInterrupt:  # the line is gone; a second one on an empty line wants to leave
                INTERRUPTS.answered()
                if not session.default_buffer.text:
                    print(LEAVE, file=sys.stderr)

    return ask


def _keys() -> KeyBindings:
    """Enter sends; Alt-Enter begins a new line. A paste is one message, however many lines it has."""
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("enter")
    def _send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _break(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def _history(path: Path) -> History:
    """What was typed before, in a file that only this user may read; in memory where no file can be written."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class Kept(FileHistory):
        def store_string(self, string: str) -> None:
            try:
                super().store_string(string)
            except OSError:  # a full disk must not end a conversation
                return

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600))
    except OSError:
        return InMemoryHistory()
    return Kept(str(path))
