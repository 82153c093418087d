"""The model inside the package, and which model answers when the user names none."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

import embedded_examples
from monotape.cli.main import main
from monotape.engine import asked
from monotape.errors import CheckpointError
from monotape.models.registry import spec_from_config
from monotape.plan.formats import Format
from monotape.weights import default, embedded, hub, network
from monotape.weights.open import open_checkpoint

#: What `monotape` runs with every way to another machine closed: a connection or a fetch ends the process.
ALONE = """
import os, socket, subprocess, sys
from pathlib import Path
def refuse(*arguments, **named):
    print("a connection was tried:", arguments, file=sys.stderr)
    os._exit(99)
socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = socket.create_connection = refuse
from monotape.weights import hub, network, wheel
hub._cached = lambda name: None  # nothing was ever fetched
wheel.fetch = refuse
network._ROUTES, network._ROUTES_6 = map(Path, sys.argv[1:3])
from monotape.cli.main import main
sys.exit(main(sys.argv[3:]))
"""
IPV4 = "Iface\tDestination\tGateway\tFlags\n"


def routes(folder: Path, lines: str = "", lines_6: str = "") -> tuple[Path, Path]:
    """Files like those of a system with these routes."""
    (folder / "route").write_text(IPV4 + lines)
    (folder / "ipv6_route").write_text(lines_6)
    return folder / "route", folder / "ipv6_route"


def test_a_chat_with_it_says_first_that_it_does_not_chat(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    assert main(["chat", "--model", "embedded", "--max-tokens", "2", "--backend", "cpu"]) == 0
    captured = capsys.readouterr()
    assert captured.err.count("does not chat") == 1 and "--model smollm2" in captured.err
    assert captured.out.strip()  # it answers all the same


def test_inspect_says_in_how_many_bits_it_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "embedded", "--backend", "cpu"]) == 0
    assert "bf16 100.0 %, unpacked from 22.7 MB in 4 and 8 bits\n" in capsys.readouterr().out


def test_the_readme_asks_it_for_something_that_it_can_do(capsys: pytest.CaptureFixture[str]) -> None:
    """`def add(a, b):` alone, and drawn at random, gave a comment for a linter."""
    prompt, arguments = "def add(a, b):\n    return", ["--temperature", "0", "--backend", "cpu"]
    shown = f"monotape run --model embedded ${prompt!r} --stop $'\\n' --temperature 0   # a + b, "
    assert shown in embedded_examples.README.read_text(encoding="utf-8")
    assert main(["run", "--model", "embedded", prompt, "--stop", "\n", *arguments]) == 0
    assert capsys.readouterr().out == " a + b\n"


@pytest.mark.slow
def test_without_a_network_no_connection_is_tried_and_the_embedded_model_answers(tmp_path: Path) -> None:
    files = [str(path) for path in routes(tmp_path)]
    arguments = [
        "run",
        "--example",
        "--temperature",
        "0",
        "--max-tokens",
        "90",
        "--backend",
        "cpu",
        "--stats",
    ]
    done = subprocess.run(
        [sys.executable, "-c", ALONE, *files, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{embedded.EXAMPLE}        self.x = x\n        self.y = y\n")
    assert embedded.EXAMPLE_END not in done.stdout.rstrip("\n")
    assert "this machine has no network" in done.stderr
    assert "the embedded model answers: it completes Python and does not chat" in done.stderr


def test_the_readme_shows_what_the_model_writes() -> None:
    texts = embedded_examples.completions()
    _, _, rest = embedded_examples.README.read_text().partition(embedded_examples.BEGIN)
    assert rest.partition(embedded_examples.END)[0] == embedded_examples.section(texts)
    assert len(texts) == 5


def test_its_card_lists_licences_and_says_what_it_was_trained_on() -> None:
    card = (embedded.PACKED.parent / "MODEL_CARD.md").read_text()
    run = json.loads((embedded_examples.README.parent / "reports" / "embedded" / "run.json").read_text())
    assert f"{run['validation']['bits_per_byte']:.4f} bits per byte" in card
    assert card == (embedded.folder() / "README.md").read_text()
    assert card.count("\n- ") > 400 and "Apache-2.0" in card


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_an_unpacked_copy_that_a_power_cut_left_short_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Nothing else would mend it: the model is a part of the package, so it cannot be fetched or removed."""
    monkeypatch.setenv("MONOTAPE_CACHE", str(tmp_path))
    file = embedded.folder() / name
    whole = file.read_bytes()
    for damage in (whole[:-1], b""):
        file.write_bytes(damage)
        assert embedded.folder() == file.parent and file.read_bytes() == whole
    file.unlink()
    assert embedded.folder() == file.parent and file.read_bytes() == whole
    assert list(file.parent.parent.iterdir()) == [file.parent]


def test_int4_is_read_as_it_was_rounded() -> None:
    """One lane's columns are those of the whole matrix. As q8 they would cost the bytes and keep the error."""
    opened = open_checkpoint(embedded.folder())
    _, chosen = asked.formats_for("cpu", asked.Asked("int4"), spec_from_config(opened.config), opened)
    layers = dict.fromkeys(("qkv", "output", "gate_up", "down"), Format.INT4_G128)
    assert chosen.of_stages == {**layers, "head": Format.BF16}
    assert not chosen.notes


def test_it_is_small_enough_for_the_wheel() -> None:
    assert embedded.PACKED.stat().st_size <= 24_000_000


@pytest.mark.parametrize(
    ("lines", "lines_6", "missing"),
    [
        ("", "", True),
        ("lo\t0000007F\t00000000\t0001\n", f"{'0' * 31}1 80 {'0' * 32} 00 {'0' * 32} 0 1 0 80200001 lo\n", True),
        ("", f"fe80{'0' * 28} 40 {'0' * 32} 00 {'0' * 32} 100 1 0 00000001 eth0\n", True),  # reaches the next plug
        ("eth0\t00000000\t0102A8C0\t0003\n", "", False),
        ("eth0\t00000000\t0102A8C0\t0002\n", "", True),  # a route that is down
        ("", f"{'0' * 32} 00 {'0' * 32} 00 fd{'0' * 29}1 400 1 0 00000003 eth0\n", False),
    ],
)  # fmt: skip
def test_a_network_is_known_by_its_routes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str, lines_6: str, missing: bool
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    files = routes(tmp_path, lines, lines_6)
    monkeypatch.setattr(network, "_ROUTES", files[0])
    monkeypatch.setattr(network, "_ROUTES_6", files[1])
    assert network.missing_network() == ("this machine has no network" if missing else None)


@pytest.mark.parametrize("text", [None, "Iface\neth0\tx\n"])
def test_a_system_that_does_not_say_counts_as_connected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    if text is not None:
        (tmp_path / "route").write_text(text)
    monkeypatch.setattr(network, "_ROUTES", tmp_path / "route")
    monkeypatch.setattr(network, "_ROUTES_6", tmp_path / "none")
    assert network.missing_network() is None
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert network.missing_network() == "HF_HUB_OFFLINE is set"


class Asked:
    """In the place of the hub: what was asked of it."""

    def __init__(self, cached: bool, error: Exception | None = None) -> None:
        self.cached, self.error, self.fetched = cached, error, 0

    def is_cached(self, model: str) -> bool:
        return self.cached

    def resolve(self, model: str, progress: bool) -> Path:
        self.fetched += 1
        if self.error:
            raise self.error
        return Path(model)


@pytest.mark.parametrize(
    ("asked", "no_network", "model", "fetched"),
    [
        (Asked(cached=True), "off", "smollm2", 0),
        (Asked(cached=False), None, "smollm2", 1),
        (Asked(cached=False), "off", "embedded", 0),
        (Asked(False, CheckpointError("The hub is behind a wall.", "")), None, "embedded", 1),
    ],
)
def test_who_answers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, asked: Asked, no_network: str | None,
    model: str, fetched: int,
) -> None:  # fmt: skip
    monkeypatch.setattr(hub, "is_cached", asked.is_cached)
    monkeypatch.setattr(hub, "resolve", asked.resolve)
    monkeypatch.setattr(default, "missing_network", lambda: no_network)
    assert (default.default_model(), asked.fetched) == (model, fetched)
    told = "The hub is behind a wall" if asked.error else "off"
    assert (f"SmolLM2 is not here ({told})" in caplog.text) == (model == "embedded")


def test_a_model_that_was_named_is_never_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> Path:
        raise CheckpointError("There is no way to it.", "")

    monkeypatch.setattr(hub, "_cached", lambda name: None)
    monkeypatch.setattr(hub, "_fetch", failing)
    with pytest.raises(CheckpointError, match="There is no way to it"):
        hub.resolve("smollm2", False)
    assert hub.resolve("embedded", False) == hub.pull("embedded", False) == embedded.folder()


def test_a_folder_of_a_similar_name_is_not_taken_for_it(tmp_path: Path) -> None:
    own = embedded.folder()
    assert embedded.is_embedded(str(own)) and "embedded" in hub.described(str(own))
    other = str(tmp_path / own.name)
    assert not embedded.is_embedded(other) and not embedded.is_embedded(None)
    assert hub.described(other) == other


def test_an_example_can_be_read_by_a_program(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "run",
        "--example",
        "--model",
        "embedded",
        "--backend",
        "cpu",
        "--temperature",
        "0",
        "--json",
    ]
    assert main(arguments) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["text"].startswith("        self.x = x\n") and answer["finish_reason"] == "stop"
