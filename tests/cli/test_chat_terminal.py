"""`monotape chat` as a person types: a real pseudo-terminal, its screen, and what the server was told."""

from __future__ import annotations

import os
import shlex
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pyte
import pytest

from server.fake_openai import Script, running
from waiting import PATIENCE_S, until

#: Python 3.12 warns of every fork beside a thread; the child starts another program at once.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
SECONDS = PATIENCE_S  # after which what should be on the screen counts as missing
PASTE = "\x1b[200~{}\x1b[201~"  # how a terminal says that text was pasted
UP, LEFT, CTRL_C, CTRL_D, ALT_ENTER = "\x1b[A", "\x1b[D", "\x03", "\x04", "\x1b\r"


class Terminal:
    """A chat, its screen, and its keyboard."""

    def __init__(
        self, url: str, cache: Path, *arguments: str, term: str = "xterm-256color", into: Path | None = None
    ) -> None:
        self.screen = pyte.Screen(100, 40)
        self._stream = pyte.ByteStream(self.screen)
        environment = {
            **os.environ, "PYTHONPATH": "src", "TERM": term, "MONOTAPE_CACHE": str(cache),
        }  # fmt: skip
        command = [sys.executable, "-m", "monotape", "chat", "--url", url, "--max-tokens", "4", *arguments]
        line = f"exec {shlex.join(command)}" + (f" > {shlex.quote(str(into))}" if into else "")
        self.process = pexpect.spawn("sh", ["-c", line], env=environment, dimensions=(40, 100), timeout=1)

    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.screen.display).rstrip()

    def type(self, keys: str) -> None:
        self.process.send(keys.encode())

    def until(self, wanted: str) -> None:
        """Waits until the screen shows it."""
        deadline = time.monotonic() + SECONDS
        while wanted not in self.text():
            assert time.monotonic() < deadline, f"{wanted!r} is not on the screen:\n{self.text()}"
            try:
                self._stream.feed(self.process.read_nonblocking(65536, timeout=1))
            except pexpect.TIMEOUT:
                continue
            except pexpect.EOF:
                assert wanted in self.text(), self.text()

    def say(self, message: str, answers: int) -> None:
        """Sends a message and waits for the prompt after its answer, which is the given one on the screen."""
        self.type(message + "\r")
        self.until_answers(answers)

    def until_answers(self, count: int) -> None:
        deadline = time.monotonic() + SECONDS
        while self.text().count("A tape recorder keeps") < count or not self.text().endswith("\n>"):
            assert time.monotonic() < deadline, self.text()
            try:
                self._stream.feed(self.process.read_nonblocking(65536, timeout=1))
            except pexpect.TIMEOUT:
                continue

    def end(self) -> int:
        self.type(CTRL_D)
        self.process.expect(pexpect.EOF, timeout=SECONDS)
        self.process.close()
        return int(self.process.exitstatus)


@pytest.fixture
def script() -> Script:
    return Script(tokens_per_second=3000)


@pytest.fixture
def url(script: Script) -> Iterator[str]:
    with running(script) as address:
        yield address


@pytest.fixture
def terminal(url: str, tmp_path: Path) -> Iterator[Terminal]:
    shown = Terminal(url, tmp_path)
    shown.until("begins a new line.\n>")
    yield shown
    shown.process.close(force=True)


def told(script: Script) -> list[str]:
    """The last message of every request."""
    return [request["messages"][-1]["content"] for request in script.requests]


def test_a_line_can_be_edited(terminal: Terminal, script: Script) -> None:
    terminal.say(f"helXo{LEFT}\x7fl", 1)
    assert told(script) == ["hello"]
    assert terminal.end() == 0


def test_pasted_lines_are_one_message(terminal: Terminal, script: Script) -> None:
    """Each of them was a message of its own, and the first answer came before the paste was whole."""
    terminal.type(PASTE.format("first\nsecond\nthird"))
    terminal.until("third")
    assert script.requests == []
    terminal.type("\r")
    terminal.until_answers(1)
    assert told(script) == ["first\nsecond\nthird"]


def test_alt_enter_begins_a_new_line(terminal: Terminal, script: Script) -> None:
    terminal.say(f"first{ALT_ENTER}second", 1)
    assert told(script) == ["first\nsecond"]


def test_an_interrupt_at_the_prompt_clears_the_line(terminal: Terminal, script: Script) -> None:
    """It ended the chat, and the conversation with it."""
    terminal.type("a mistake")
    terminal.until("a mistake")
    terminal.type(CTRL_C)
    terminal.until("a mistake\n>")
    terminal.say("as meant", 1)
    assert told(script) == ["as meant"]
    terminal.type(CTRL_C)
    terminal.until("(/exit or Ctrl-D ends)\n>")
    terminal.say("still here", 2)
    assert len(script.requests[-1]["messages"]) == 3
    assert terminal.end() == 0


def test_what_was_typed_comes_back_in_this_chat_and_the_next(
    terminal: Terminal, script: Script, url: str, tmp_path: Path
) -> None:
    terminal.say("one", 1)
    terminal.say("two", 2)
    terminal.type(UP + UP + "\r")
    terminal.until_answers(3)
    assert terminal.end() == 0
    history = tmp_path / "chat-history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    later = Terminal(url, tmp_path)
    later.until("begins a new line.\n>")
    later.type(UP + UP)
    later.until("> two")
    later.say("!", 1)
    assert told(script) == ["one", "two", "one", "two!"]
    assert later.end() == 0


def test_a_chat_may_leave_no_trace(url: str, tmp_path: Path) -> None:
    terminal = Terminal(url, tmp_path, "--no-history")
    terminal.until("begins a new line.\n>")
    terminal.say("a secret", 1)
    assert terminal.end() == 0
    assert not (tmp_path / "chat-history").exists()


def test_a_history_that_cannot_be_written_is_no_reason_to_fail(url: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    terminal = Terminal(url, tmp_path / "file")
    terminal.until("begins a new line.\n>")
    terminal.say("hello", 1)
    assert terminal.end() == 0


def test_a_command_that_is_nearly_right_and_a_path(terminal: Terminal, script: Script) -> None:
    terminal.type("/claer\r")
    terminal.until("Did you mean /clear?")
    terminal.say("/etc/hosts is what?", 1)
    assert told(script) == ["/etc/hosts is what?"]


def test_a_terminal_that_can_do_little(url: str, script: Script, tmp_path: Path) -> None:
    terminal = Terminal(url, tmp_path, term="dumb")
    terminal.until("begins a new line.\n>")
    terminal.say("hello", 1)
    assert told(script) == ["hello"]
    assert terminal.end() == 0


def test_an_answer_may_go_into_a_file(url: str, script: Script, tmp_path: Path) -> None:
    """The prompt stays on the terminal."""
    terminal = Terminal(url, tmp_path, into=tmp_path / "answers")
    terminal.until("begins a new line.\n>")
    terminal.type("hello\r")
    until(lambda: script.finished)
    assert terminal.end() == 0
    assert (tmp_path / "answers").read_text() == "A tape recorder keeps\n"
