"""The process that renders chat templates: a script, fed through a socket, killed when it takes too long.

A template comes with the model file and is a program. minijinja gives it no way to Python, and fuel ends its
loops, but a filter that builds one huge string costs no fuel and Rust aborts when memory runs out. So it
runs here, where the worst it can do is to end a process that holds nothing. Nothing of Monotape is imported.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import marshal
import re
import signal
import struct
import sys
from typing import Any, BinaryIO

import minijinja

#: Marks which tokens the assistant wrote, for training. Here it only groups.
_GENERATION = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")


_AT_ONCE = 1 << 18  # bytes that are read at once: more than a socket holds
_STEP = 4096  # characters that are compared at a time
_MOST_COMPILED = 8
_COMPILED: list[str] = []  # names of templates, the oldest first


class _RaisedError(Exception):
    """What the template itself objected to."""


def _raise_exception(message: str) -> None:
    raise _RaisedError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: list[str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as Hugging Face's templates expect it: as Python writes it, without HTML escapes."""
    pair = None if separators is None else (separators[0], separators[1])
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=pair, sort_keys=sort_keys)


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    """Jinja's filter: unlike minijinja's it keeps a line end at the end of the text."""
    prefix = width if isinstance(width, str) else " " * width
    opening, *lines = f"{text}\n".splitlines()
    indented = [f"{prefix}{line}" if line or blank else line for line in lines]
    return "\n".join([f"{prefix}{opening}" if first else opening, *indented])


def environment(fuel: int) -> minijinja.Environment:
    """A template engine set up like the one that chat templates are written for."""
    made = minijinja.Environment(
        trim_blocks=True, lstrip_blocks=True, fuel=fuel, auto_escape_callback=lambda _: False, pycompat=True
    )
    made.add_global("raise_exception", _raise_exception)
    made.add_global("strftime_now", _strftime_now)
    made.add_filter("tojson", _tojson)
    made.add_filter("indent", _indent)
    return made


def _as_group(match: re.Match[str]) -> str:
    return f"{{%{match[1]} {'endif' if match[2] else 'if true'} {match[3]}%}}"


def _rendered(engine: minijinja.Environment, source: str, context: dict[str, Any]) -> str:
    """A template is compiled once: most servers have only one."""
    name = f"chat template {hash(source):x}"
    if name not in _COMPILED:
        for other in _COMPILED[: len(_COMPILED) - _MOST_COMPILED + 1]:
            engine.remove_template(other)
            _COMPILED.remove(other)
        engine.add_template(name, _GENERATION.sub(_as_group, source))
        _COMPILED.append(name)
    return str(engine.render_template(name, **context))


def answer(engine: minijinja.Environment, request: dict[str, Any], max_characters: int) -> dict[str, Any]:
    """Renders one request: {"text"} or {"error", "kind"}."""
    try:
        text = _rendered(engine, request["template"], request["context"])
    except _RaisedError as error:
        return {"kind": "raised", "error": str(error)}
    except minijinja.TemplateError as error:
        if isinstance(error.__cause__, _RaisedError):
            return {"kind": "raised", "error": str(error.__cause__)}
        kind = "fuel" if error.kind == "OutOfFuel" else "template"
        return {"kind": kind, "error": error.message}
    except Exception as error:
        return {"kind": "template", "error": f"{type(error).__name__}: {error}"}
    if len(text) > max_characters:
        return {"kind": "size", "error": f"{len(text)} characters"}
    return {"text": text}


def _limit_memory(max_bytes: int) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(ValueError, OSError):  # macOS knows the limit but does not take it
        resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))


class _Memory:
    """The messages of the latest request and the text of the latest answer: only what is new comes and goes."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.text = ""

    def request(self, body: bytes) -> dict[str, Any]:
        """The request with all its messages."""
        rest, kept, new = marshal.loads(body)
        self.messages = self.messages[:kept] + [marshal.loads(message) for message in new]
        request: dict[str, Any] = marshal.loads(rest)
        request["context"]["messages"] = self.messages
        return request

    def reply(self, answered: dict[str, Any]) -> bytes:
        """A text goes as it is, since writing and reading it as JSON takes longer than rendering it."""
        if "text" not in answered:
            return b"J" + json.dumps(answered).encode()
        text: str = answered["text"]
        kept = _common_beginning(self.text, text)
        self.text = text
        return b"T" + struct.pack(">I", kept) + text[kept:].encode()


def _common_beginning(old: str, new: str) -> int:
    """How many characters two texts begin with, in whole steps: the rest of a step is sent in less time than found."""
    at, most = 0, min(len(old), len(new)) - _STEP
    while at <= most and old[at : at + _STEP] == new[at : at + _STEP]:
        at += _STEP
    return at


def serve(requests: BinaryIO, answers: BinaryIO, *, fuel: int, max_characters: int, seconds: float) -> None:
    """Answers length-prefixed requests until the other end closes, with T and a text or J and JSON.

    The other end kills a process that takes longer than `seconds`. If it is gone, SIGALRM does, which needs nothing
    of Python: a template that runs holds the interpreter's lock.
    """
    engine, memory = environment(fuel), _Memory()
    while header := requests.read(4):
        signal.setitimer(signal.ITIMER_REAL, 2 * seconds)
        request = memory.request(requests.read(struct.unpack(">I", header)[0]))
        reply = memory.reply(answer(engine, request, max_characters))
        answers.write(struct.pack(">I", len(reply)) + reply)
        answers.flush()
        signal.setitimer(signal.ITIMER_REAL, 0)


if __name__ == "__main__":
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # whatever this process inherited
    _limit_memory(int(sys.argv[3]))
    with open(0, "rb", _AT_ONCE, closefd=False) as requests:  # most requests are one read
        serve(
            requests, sys.stdout.buffer,
            fuel=int(sys.argv[1]), max_characters=int(sys.argv[2]), seconds=float(sys.argv[4]),
        )  # fmt: skip
