"""`monotape doctor`: what it keeps of a measurement, and which packages it misses."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from monotape.backends.cpu import bandwidth
from monotape.backends.cpu.bandwidth import Bandwidth, known_bandwidth, remember_bandwidth
from monotape.cli import doctor
from monotape.cli.main import main
from monotape.errors import BackendUnavailable

Captured = pytest.CaptureFixture[str]


def measuring(monkeypatch: pytest.MonkeyPatch, gigabytes: float, date: str = "2026-11-16") -> None:
    """A machine that reads this fast now."""

    def measure(threads: int | None = None) -> Bandwidth:
        return Bandwidth(gigabytes * 1e9, threads or bandwidth.available_cpus(), "any", date)

    monkeypatch.setattr(bandwidth, "measure_bandwidth", measure)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MONOTAPE_CACHE", str(tmp_path))
    return tmp_path


def test_a_busy_machine_does_not_overwrite_the_best_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """37.6 GB/s became 17.7, and every share after that was wrong."""
    measuring(monkeypatch, 37.6, "2026-11-10")
    assert doctor._bandwidth().found.startswith("37.6 GB/s read with ")
    measuring(monkeypatch, 17.7)
    finding = doctor._bandwidth()
    assert known_bandwidth().bytes_per_second == 37.6e9
    assert "37.6 GB/s" in finding.found
    assert "measured on 2026-11-10; only 17.7 GB/s now" in finding.found
    assert finding.value == {"best": 37.6e9, "date": "2026-11-10", "today": 17.7e9}


def test_a_better_figure_replaces_the_kept_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for gigabytes in (17.7, 37.6, 36.9):
        measuring(monkeypatch, gigabytes)
        finding = doctor._bandwidth()
    assert known_bandwidth().bytes_per_second == 37.6e9
    assert "only" not in finding.found  # as good as the same


def test_a_machine_that_changed_may_forget(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    measuring(monkeypatch, 37.6)
    known_bandwidth()
    measuring(monkeypatch, 17.7)
    assert main(["doctor", "--forget"]) == 0
    assert "17.7 GB/s read" in capsys.readouterr().out
    assert known_bandwidth().bytes_per_second == 17.7e9


@pytest.mark.parametrize("text", ["", "{", "[]", '{"bytes_per_second": 5}', '{"odd": 1}'])
def test_a_spoilt_file_is_measured_again(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    measuring(monkeypatch, 20.0)
    bandwidth._path(bandwidth.available_cpus()).write_text(text)
    assert known_bandwidth().bytes_per_second == 20e9


def test_a_figure_of_an_earlier_version_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = bandwidth.available_cpus()
    bandwidth._path(threads).write_text(
        f'{{"bytes_per_second": 37.6e9, "threads": {threads}, "machine": "aarch64"}}'
    )
    measuring(monkeypatch, 17.7)
    assert "37.6 GB/s" in (found := doctor._bandwidth().found)
    assert "measured earlier" in found


def test_a_cache_that_cannot_be_written_is_no_reason_to_fail(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MONOTAPE_CACHE", str(tmp_path / "file" / "below"))
    found = Bandwidth(1e9, 2, "any", "")
    assert remember_bandwidth(found) is found


def test_a_cache_that_cannot_be_made_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """/proc/x was "ok", because its parent is said to be writable, and so was a folder below a file."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("MONOTAPE_CACHE", str(tmp_path / "file" / "below"))
    finding = doctor._cache()
    assert not finding.good and "cannot be written: Not a directory" in finding.found
    assert "MONOTAPE_CACHE" in finding.fix


def test_missing_serve_packages_are_found(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    measuring(monkeypatch, 20.0)
    version = importlib.metadata.version

    def without(name: str) -> str:
        if name == "llguidance":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", without)
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "MISS  serve packages   not installed: llguidance" in out
    assert "fix: pip install 'monotape[serve]'" in out


def test_the_packages_that_are_looked_for_are_those_of_the_project() -> None:
    import re
    import tomllib

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]

    def names(requirements: list[str]) -> set[str]:
        return {re.split(r"[\[<>=]", text)[0] for text in requirements}

    assert set(doctor.NEEDED) == names(project["dependencies"])
    assert set(doctor.SERVE) == names(project["optional-dependencies"]["serve"])


@pytest.mark.parametrize("gpu", [None, "AMD Instinct MI300X"])
def test_amds_gpu_and_what_is_known_of_its_backend(monkeypatch: pytest.MonkeyPatch, gpu: str | None) -> None:
    monkeypatch.setattr("monotape.backends.hip.runtime.find_gpu", lambda: gpu)
    finding = doctor._amd()
    assert finding.value == gpu and finding.found.startswith(gpu or "none found")
    assert "compiled and simulated, never run on hardware" in finding.found


def test_a_gpu_of_amd_without_a_compiler_gets_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise BackendUnavailable("There is no clang here that compiles for gfx942.", "Install clang 19.")

    monkeypatch.setattr("monotape.backends.hip.runtime.find_gpu", lambda: "AMD Instinct MI300X")
    monkeypatch.setattr("monotape.backends.hip.compilation.find_compiler", none)
    finding = doctor._amd()
    assert not finding.good and finding.fix == "Install clang 19."
    monkeypatch.setattr("monotape.backends.hip.runtime.find_gpu", lambda: None)
    assert doctor._amd().found.endswith("; there is no clang here that compiles for gfx942")
    assert doctor._amd().good  # without such a GPU there is nothing to fix
