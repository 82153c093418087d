"""`monotape completion`: the shells themselves say what they complete."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from monotape.cli.completion import SHELLS
from monotape.cli.main import COMMANDS, build_parser, main
from waiting import PATIENCE_S

Captured = pytest.CaptureFixture[str]


def needs(shell: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(shell) is None, reason=f"{shell} is not installed")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Where `monotape` is this package, with one model in its cache besides the built-in one."""
    program = tmp_path / "bin" / "monotape"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m monotape "$@"\n')
    program.chmod(0o755)
    snapshot = tmp_path / "hub" / "models--org--tiny" / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).write_text("{}")
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("c0ffee")
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "file.toml").touch()
    source = str(Path(__file__).parents[2] / "src")
    return {
        **os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}", "PYTHONPATH": source, "HOME": str(tmp_path),
        "HF_HUB_CACHE": str(tmp_path / "hub"), "MONOTAPE_CACHE": str(tmp_path / "cache"), "TERM": "dumb",
    }  # fmt: skip


def script(shell: str, capsys: Captured, tmp_path: Path) -> Path:
    assert main(["completion", shell]) == 0
    path = tmp_path / f"completion.{shell}"
    path.write_text(capsys.readouterr().out)
    return path


def output_of(arguments: list[str], environment: dict[str, str], tmp_path: Path) -> list[str]:
    done = subprocess.run(
        arguments, env=environment, cwd=tmp_path / "here", capture_output=True, text=True, check=True,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.stderr == ""
    return done.stdout.splitlines()


CASES = [
    ("monotape ru", "run"),
    ("monotape serve --max-mod", "--max-model-len"),
    ("monotape run --model smol", "smollm2"),
    ("monotape run --model org/", "org/tiny"),
    ("monotape inspect org/t", "org/tiny"),
    ("monotape completion z", "zsh"),
    ("monotape serve --log-level de", "debug"),
    ("monotape serve --config fi", "file.toml"),
]


@needs("bash")
@pytest.mark.parametrize(("line", "completed"), CASES)
def test_bash(
    line: str, completed: str, environment: dict[str, str], capsys: Captured, tmp_path: Path
) -> None:
    *before, word = line.split()
    words = " ".join([*before, word])
    asked = (
        f"source {script('bash', capsys, tmp_path)}; COMP_WORDS=({words}); COMP_CWORD={len(before)};"
        f"_monotape monotape {word} {before[-1]}; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    assert output_of(["bash", "--norc", "-c", asked], environment, tmp_path) == [completed]


@needs("fish")
@pytest.mark.parametrize(("line", "completed"), CASES)
def test_fish(
    line: str, completed: str, environment: dict[str, str], capsys: Captured, tmp_path: Path
) -> None:
    asked = f"source {script('fish', capsys, tmp_path)}; complete -C '{line}'"
    found = output_of(["fish", "--no-config", "-c", asked], environment, tmp_path)
    assert [row.partition("\t")[0] for row in found] == [completed]


@needs("zsh")
@pytest.mark.parametrize(("line", "completed"), CASES)
def test_zsh(
    line: str, completed: str, environment: dict[str, str], capsys: Captured, tmp_path: Path
) -> None:
    """Zsh completes only at a terminal: the tab is typed, and the line that results is run by echo."""
    pexpect = pytest.importorskip("pexpect")
    shell = pexpect.spawn(
        "zsh",
        ["-f"],
        env={**environment, "PS1": "ready>"},
        cwd=str(tmp_path / "here"),
        encoding="utf-8",
        timeout=PATIENCE_S,
    )
    shell.expect("ready>")
    shell.sendline(f"autoload -U compinit && compinit -u -D && source {script('zsh', capsys, tmp_path)}")
    shell.expect("ready>.*ready>|ready>")
    shell.sendline(
        'accept-line-echo() { print -r -- "[line=$BUFFER]"; BUFFER=; zle .accept-line }; '
        "zle -N accept-line-echo; bindkey '^X' accept-line-echo; print bound''now"
    )
    shell.expect("boundnow")
    shell.expect("ready>")
    shell.send(f"{line}\t\x18")
    shell.expect(r"\[line=([^\]]*)\]")
    assert shell.match[1].split()[-1].rstrip() == completed
    shell.close(force=True)


@pytest.mark.parametrize("shell", SHELLS)
def test_every_command_and_every_flag_is_in_the_script(shell: str, capsys: Captured, tmp_path: Path) -> None:
    text = script(shell, capsys, tmp_path).read_text()
    _, parsers = build_parser()
    assert set(parsers) == set(COMMANDS)
    for parser in parsers.values():
        for action in parser._actions:
            for spelling in action.option_strings:
                assert (spelling.removeprefix("--") if shell == "fish" else spelling) in text


def test_another_shell_is_refused(capsys: Captured) -> None:
    assert main(["completion", "tcsh"]) == 2
    assert "tcsh" in capsys.readouterr().err
