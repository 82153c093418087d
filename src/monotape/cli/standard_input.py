"""Text that comes through a pipe or from a file, with a word to the user when nothing comes."""

from __future__ import annotations

import os
import select
import stat
import sys

from monotape.errors import UsageError

PATIENCE_S = 2.0  # a program that writes at all has begun by then


def piped() -> bool:
    """Whether standard input is a pipe, a socket or a file; not a terminal, /dev/null or nothing at all."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):  # closed, or replaced by something that is no file
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)


def read_text() -> str:
    """All of it. After some time without input, as from a pipe that a parent left open, a note says what is awaited."""
    try:
        if piped() and not select.select([sys.stdin], [], [], PATIENCE_S)[0]:
            print(
                "monotape: waiting for text on standard input, until it ends; `< /dev/null` gives none.",
                file=sys.stderr,
            )
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise UsageError(
            f"Standard input is not UTF-8 text (byte {error.start}).", "Convert it, for example with iconv."
        ) from None
