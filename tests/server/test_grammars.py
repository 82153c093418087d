"""Grammars in processes of their own: what they allow, what ends them, and that nothing else ends with them."""

from __future__ import annotations

import errno
import os
import re
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import monotape
from monotape.backends.cpu.model import DEADLINE_US
from monotape.backends.cuda.backend import DEADLINE_NS
from monotape.engine.constraint import Constraint, Mask, unpacked
from monotape.errors import RequestError, ResourceError
from monotape.server.config import ServerConfig
from monotape.server.grammar import definition as grammar
from monotape.server.grammar.constraints import Grammars
from monotape.server.grammar.definition import Grammar
from monotape.server.grammar.followers import _END_S, ForkServer
from monotape.server.grammar.wire import GrammarLimits
from server.scripted import _tokenizer
from waiting import PATIENCE_S

TOKENIZER = _tokenizer()
END = TOKENIZER.size - 1
WIDE = {"type": "object", "properties": {f"p{index}": {"type": "string"} for index in range(16_400)}}


@pytest.fixture(scope="module")
def paths() -> Iterator[None]:
    """The process that forks imports the scripted model too."""
    folders = [str(os.path.join(os.path.dirname(__file__), "..", *rest)) for rest in ((), ("..", "bench"))]
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([*folders, before])
    yield
    os.environ["PYTHONPATH"] = before


@pytest.fixture(scope="module")
def grammars(paths: None) -> Iterator[Grammars]:
    made = Grammars("server.scripted", {"model": "scripted"}, GrammarLimits(compile_s=1.0, burst_s=0.5))
    made.prepare(TOKENIZER.size, [END])
    yield made
    made.close()


def allowed_by(constraint: Constraint) -> Mask:
    return unpacked(constraint.allowed(), TOKENIZER.size)


def follow(grammars: Grammars, asked: Grammar, text: str) -> str:
    """How much of a text the grammar allows; a "$" where it is complete and may end."""
    followed = ""
    with grammars.constraint(1, asked) as constraint:
        for character in text:
            (token_id,) = TOKENIZER.encode(character, add_special=False)
            if not allowed_by(constraint)[token_id]:
                return followed
            constraint.accept(token_id)
            followed += character
        mask = allowed_by(constraint)
        return followed + ("$" if mask[END] or not mask.any() else "")


def ramble(grammars: Grammars, asked: Grammar, count: int) -> None:
    """Takes the first token that is allowed, again and again."""
    with grammars.constraint(1, asked) as constraint:
        for _ in range(count):
            constraint.accept(int(np.flatnonzero(allowed_by(constraint))[0]))


def processes(grammars: Grammars) -> list[int]:
    """Those that follow grammars; zombies are not counted."""
    children = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as stat:
                    state, parent = stat.read().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            if int(parent) == grammars._forks._process.pid and state != "Z":
                children.append(int(name))
    return children


@pytest.mark.parametrize(
    ("asked", "said", "followed"),
    [
        (grammar.from_choice(["red", "green"]), "green", "green$"),
        (grammar.from_choice(["red", "green"]), "blue", ""),
        (grammar.from_choice(['say "hi"\n', "é"]), 'say "hi"\n', 'say "hi"\n$'),
        (grammar.from_regex("[0-9]{2}-x"), "12-x", "12-x$"),
        (grammar.from_regex("[0-9]{2}-x"), "12x", "12"),
        (grammar.from_json_schema({"type": "integer"}), "17", "17$"),
        (grammar.from_lark('start: "a" b\nb: /[0-9]/'), "a7", "a7$"),
        (grammar.from_lark('start: "a" | "::="'), "::=", "::=$"),
        (grammar.from_lark('root ::= "a" ws num ("," num)*\nnum ::= [0-9]+\nws ::= | " "'), "a 1,23", "a 1,23$"),
        (grammar.from_lark('root ::= "a" [0-9]'), "ab", "a"),
        (grammar.from_lark(r'root ::= "\u0041\x42\[" [\u0061-\u007a\u00e9] "\\u" "\U0001F600"'), "AB[é\\u", "AB[é\\u"),
        (grammar.from_tool("<c>", "name", "arguments", "</c>", {"f": None, "g": {"type": "object"}}),
         '<c>{"name": "g", "arguments": {}}</c>', '<c>{"name": "g", "arguments": {}}</c>$'),
    ],
)  # fmt: skip
def test_what_a_grammar_allows(grammars: Grammars, asked: Grammar, said: str, followed: str) -> None:
    assert follow(grammars, asked, said) == followed
    assert follow(grammars, asked, said) == followed  # by the process that was kept


def test_forced_tokens_come_at_once_and_the_mask_after_them(grammars: Grammars) -> None:
    with grammars.constraint(1, grammar.from_lark('start: "hello" /[ab]/')) as constraint:
        forced = constraint.forced()
        assert TOKENIZER.decode(forced) == "hello"[: len(TOKENIZER.decode(forced))]
        while forced:
            for token_id in forced:
                constraint.accept(token_id)
            forced = constraint.forced()
        allowed = np.flatnonzero(allowed_by(constraint))
        assert {TOKENIZER.decode([int(token_id)]) for token_id in allowed} == {"a", "b"}


def test_as_many_choices_as_are_documented(grammars: Grammars) -> None:
    choices = [f"choice number {index} of many" for index in range(grammar.MAX_CHOICES)]
    assert follow(grammars, grammar.from_choice(choices), choices[-1]) == choices[-1] + "$"
    with pytest.raises(RequestError, match=r"has 10001 entries. At most 10000"):
        grammar.from_choice([*choices, "one more"])


def test_an_object_with_hundreds_of_optional_properties(grammars: Grammars) -> None:
    schema = {"type": "object", "properties": {f"p{index}": {"type": "integer"} for index in range(600)}}
    text = '{"p7": 1, "p599": 2}'
    assert follow(grammars, grammar.from_json_schema(schema), text) == text + "$"


def doubled(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string"}}}
    for _ in range(levels):
        schema = {"allOf": [schema, schema]}
    return schema


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: grammar.from_json_schema(WIDE), "The JSON schema went beyond its limits of time"),
        (lambda: grammar.from_json_schema(doubled(15)), "The JSON schema "),  # gigabytes, if it is let
        (
            lambda: grammar.from_regex("[a-"),
            "The regular expression cannot be used: unclosed character class",
        ),
        (lambda: grammar.from_regex("(" * 50_000 + ")" * 50_000), "The regular expression "),
        (lambda: grammar.from_lark("start: nowhere"), "The grammar cannot be used"),
        (
            lambda: grammar.from_lark("root ::= nowhere"),
            "The grammar cannot be used: Rule 'nowhere' not found",
        ),
        (lambda: grammar.from_lark("root ::= " + "(" * 50_000), "The grammar "),
        (lambda: grammar.from_json_schema({"type": "nonsense"}), "The JSON schema cannot be used"),
        (lambda: grammar.from_json_schema(False), "The JSON schema cannot be used"),
        (lambda: grammar.from_choice([]), "The list of choices is empty"),
        (lambda: grammar.from_choice(["a", ""]), "One of the choices is empty"),
        (lambda: grammar.from_regex("a" * (grammar.MAX_GRAMMAR_CHARACTERS + 1)), "1048577 characters long"),
        (lambda: grammar.from_regex("\ud800"), "half of a surrogate pair"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_sentence(
    grammars: Grammars, make: Callable[[], Grammar], words: str
) -> None:
    with pytest.raises(RequestError) as refused:
        grammars.compile(1, make())
    said = str(refused.value)
    assert words in said
    assert len(said) < 400 and "\n" not in said and "panic" not in said and "backtrace" not in said
    assert follow(grammars, grammar.from_regex("a"), "a") == "a$"  # the next one does not suffer


def test_a_grammar_that_nobody_waits_for_is_killed(grammars: Grammars) -> None:
    with Grammars("server.scripted", {"model": "scripted"}, GrammarLimits(compile_s=300.0)) as patient:
        patient.prepare(TOKENIZER.size, [END])
        failed: list[Exception] = []

        def compile_it() -> None:
            try:
                patient.compile(7, grammar.from_json_schema(WIDE))
            except RequestError as error:
                failed.append(error)

        thread = threading.Thread(target=compile_it)
        thread.start()
        while not processes(patient) or 7 not in patient._working:
            time.sleep(0.01)
        patient.stop(8)  # not this one
        patient.stop(7)
        thread.join(PATIENCE_S)
        assert not thread.is_alive() and failed
        while processes(patient):
            time.sleep(0.01)
        assert follow(patient, grammar.from_regex("a"), "a") == "a$"


def test_a_token_that_takes_too_long_ends_its_grammar_only(paths: None) -> None:
    """Every token costs more than it earns, so what was saved up is spent at last."""
    limits = GrammarLimits(burst_s=0.05, token_s=0.000_001)
    with Grammars("server.scripted", {"model": "scripted"}, limits) as strict:
        strict.prepare(TOKENIZER.size, [END])
        with pytest.raises(RequestError, match="The grammar went beyond its limits"):
            ramble(strict, grammar.from_lark("start: a{0,1000}\na: b{0,1000}\nb: /[xy]/"), 20_000)
        assert follow(strict, grammar.from_regex("a"), "a") == "a$"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_follower_that_is_killed_from_outside_is_not_the_grammars_fault(
    grammars: Grammars, number: signal.Signals
) -> None:
    with grammars.constraint(1, grammar.from_regex("[a-z]{30}")) as constraint:
        assert allowed_by(constraint).sum() >= 26
        constraint.accept(int(np.flatnonzero(allowed_by(constraint))[0]))
        os.kill(constraint._follower._pid, number)
        with pytest.raises(ResourceError, match=rf"killed from outside \({number.name}\). Try again"):
            constraint.allowed()
    assert follow(grammars, grammar.from_regex("a"), "a") == "a$"


@pytest.mark.parametrize("number", [signal.SIGPROF, signal.SIGABRT, signal.SIGSEGV])
def test_a_follower_that_ends_of_its_own_work_is_the_grammars_fault(
    grammars: Grammars, number: signal.Signals
) -> None:
    """The signals of its limit of time, of memory that cannot be had, and of a stack that is too small."""
    with grammars.constraint(1, grammar.from_regex("[a-z]{30}")) as constraint:
        allowed_by(constraint)
        os.kill(constraint._follower._pid, number)
        with pytest.raises(RequestError, match="regular expression went beyond its limits"):
            constraint.allowed()


def test_followers_that_end_with_the_process_that_forks_are_not_the_grammars_fault(paths: None) -> None:
    with Grammars("server.scripted", {"model": "scripted"}) as mortal:
        mortal.prepare(TOKENIZER.size, [END])
        with mortal.constraint(1, grammar.from_regex("[a-z]{30}")) as constraint:
            allowed_by(constraint)
            mortal._forks._process.kill()
            mortal._forks._process.wait()
            with pytest.raises(ResourceError, match="killed from outside"):
                constraint.allowed()
        assert follow(mortal, grammar.from_regex("a"), "a") == "a$"


def test_a_follower_that_hangs_is_given_up(grammars: Grammars) -> None:
    with grammars.constraint(1, grammar.from_regex("[a-z]{30}")) as constraint:
        allowed_by(constraint)
        follower = constraint._follower
        assert follower._connection.gettimeout() == GrammarLimits().wall_s
        follower._connection.settimeout(0.2)  # seconds, which it would be stopped for in any case
        os.kill(follower._pid, signal.SIGSTOP)
        with pytest.raises(RequestError, match="went beyond its limits"):
            constraint.allowed()
    assert follow(grammars, grammar.from_regex("a"), "a") == "a$"


@pytest.mark.parametrize("compile_s", [1.0, 3.0, 3600.0])
def test_a_mask_that_never_comes_is_given_up_before_its_backend_gives_up(compile_s: float) -> None:
    """However long a grammar may compile. Forced tokens and the mask after them are two waits."""
    limits = GrammarLimits(compile_s=compile_s)
    header = (Path(monotape.__file__).parent / "kernels/sampling/mask.h").read_text()
    deadlines = re.search(r"kHostDeadlines = (\d+);", header)
    assert deadlines is not None
    of_the_gpu_s = int(deadlines[1]) * DEADLINE_NS / 1e9
    of_a_cpu_s = 0.75 * DEADLINE_US / 1e6  # buffers.cpp
    assert 2 * limits.wall_s + _END_S < min(of_the_gpu_s, of_a_cpu_s, ServerConfig().engine_timeout)
    assert limits.compile_wall_s >= 10 * compile_s


def test_a_process_that_cannot_be_started_is_an_error_of_that_request_only(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as files:
        files.setattr("monotape.server.grammar.followers.socket.socketpair", full)
        with pytest.raises(
            ResourceError, match=r"No process could be started .*Too many open files.* Try again"
        ):
            grammars.compile(1, grammar.from_regex("no[0-9]room"))
    assert not grammars._working and not grammars._starting
    assert follow(grammars, grammar.from_regex("no[0-9]room"), "no1") == "no1"


def test_a_process_that_forks_without_files_to_open_refuses_and_lives(grammars: Grammars) -> None:
    pid = grammars._forks._process.pid
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        with pytest.raises(ResourceError, match="No process could be started"):
            grammars.compile(1, grammar.from_regex("never[0-9]"))
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
    assert follow(grammars, grammar.from_regex("never[0-9]"), "never1") == "never1$"
    assert grammars._forks._process.pid == pid


def test_killing_a_follower_does_not_wait_for_a_vocabulary_to_load(
    paths: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that kills one may hold a lock that the engine's sign of life needs."""
    with Grammars("server.scripted", {"model": "scripted"}) as mortal:
        mortal.prepare(TOKENIZER.size, [END])
        loading, loaded = threading.Event(), threading.Event()
        finish = ForkServer._finish_start

        def slowly(forks: ForkServer) -> None:
            loading.set()
            assert loaded.wait(PATIENCE_S)
            finish(forks)

        monkeypatch.setattr(ForkServer, "_finish_start", slowly)
        mortal._forks._process.kill()
        mortal._forks._process.wait()
        compiling = threading.Thread(target=mortal.compile, args=(1, grammar.from_regex("a")))
        compiling.start()
        assert loading.wait(PATIENCE_S)
        killing = threading.Thread(target=mortal._forks.kill, args=(1,), daemon=True)
        killing.start()
        killing.join(PATIENCE_S)
        waited = killing.is_alive()
        loaded.set()
        compiling.join(PATIENCE_S)
        assert not waited and not compiling.is_alive()
        assert follow(mortal, grammar.from_regex("a"), "a") == "a$"


def test_what_was_killed_while_it_was_kept_is_made_again(grammars: Grammars) -> None:
    asked = grammar.from_regex("kept[0-9]")
    assert follow(grammars, asked, "kept1") == "kept1$"
    for pid in processes(grammars):
        os.kill(pid, signal.SIGKILL)
    while processes(grammars):
        time.sleep(0.01)
    assert follow(grammars, asked, "kept2") == "kept2$"


def test_the_process_that_forks_is_started_again(paths: None) -> None:
    with Grammars("server.scripted", {"model": "scripted"}) as mortal:
        mortal.prepare(TOKENIZER.size, [END])
        mortal._forks._process.kill()
        mortal._forks._process.wait()
        assert follow(mortal, grammar.from_regex("a"), "a") == "a$"


def test_no_more_processes_are_kept_than_allowed(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monotape.server.grammar.constraints.MAX_KEPT", 3)
    for letter in "abcdefg":
        grammars.compile(1, grammar.from_regex(letter))
    while len(processes(grammars)) > 3:  # those that were let go end when they look
        time.sleep(0.01)
    assert len(processes(grammars)) == 3


def test_no_more_memory_is_kept_than_allowed(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    schema = {"type": "object", "properties": {f"p{index}": {"type": "string"} for index in range(700)}}
    grammars.compile(1, grammar.from_json_schema(schema))
    assert grammars._kept_bytes > 0
    monkeypatch.setattr("monotape.server.grammar.constraints.MAX_KEPT_BYTES", 0)
    grammars.compile(1, grammar.from_regex("small"))
    assert grammars._kept_bytes == 0


def test_its_processes_end_with_it(paths: None) -> None:
    made = Grammars("server.scripted", {"model": "scripted"})
    made.prepare(TOKENIZER.size, [END])
    follow(made, grammar.from_regex("a"), "a")
    kept = processes(made)
    made.close()
    while any(os.path.exists(f"/proc/{pid}") for pid in kept):
        time.sleep(0.01)
