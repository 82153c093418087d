"""The process that compiles a model's second kernel while requests run."""

from __future__ import annotations

from pathlib import Path

import pytest

from monotape.backends.cuda import drafting
from monotape.backends.cuda.drafting import Compiling
from waiting import until

BROKEN = "#error this is no plan\n"


def test_it_says_why_it_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code of the current folder does not take the place of ours."""
    (tmp_path / "monotape").mkdir()
    (tmp_path / "monotape" / "__init__.py").write_text("raise SystemExit('the wrong package')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MONOTAPE_CACHE", str(tmp_path / "cache"))
    compiling = Compiling(BROKEN)
    until(lambda: compiling.failure is not None, "the reason")
    assert compiling.code() is None
    assert compiling.failure is not None
    assert "The kernel does not compile" in compiling.failure and "this is no plan" in compiling.failure
    compiling.close()


def test_it_says_where_its_code_could_not_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    cache.write_text("a file")
    monkeypatch.setenv("MONOTAPE_CACHE", str(cache))
    at_once = "from monotape.backends.cuda import compilation\ncompilation._compile = lambda *_: b'code'\n"
    monkeypatch.setattr(drafting, "_COMPILE", drafting._COMPILE.replace("try:", f"{at_once}try:"))
    compiling = Compiling("")
    until(lambda: compiling.failure is not None, "the reason")
    assert compiling.failure is not None
    assert f"cannot be kept in {cache / 'cubin'} (" in compiling.failure
    compiling.close()
