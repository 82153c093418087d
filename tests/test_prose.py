"""Comments name the thing: no pronoun for a worker, a buffer or a stage. CONTRIBUTING.md has the rules of prose."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("src/monotape", "bench", "tests")
VENDORED = ROOT / "src" / "monotape" / "server" / "playground" / "vendor"
#: Pronouns that stand for a part of the machine in nearly every comment in which they occur.
PRONOUN = re.compile(r"\b(whoever|whomever|nobody|everybody|somebody|anybody)\b", re.IGNORECASE)
_CPP_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|(//[^\n]*|/\*.*?\*/)', re.DOTALL)


def comments(path: Path) -> Iterator[str]:
    """Comments and docstrings of a file; other strings are what users read."""
    text = path.read_text("utf-8")
    if path.suffix != ".py":
        yield from (match[1] for match in _CPP_COMMENT.finditer(text) if match[1])
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT or token.string.startswith('"""'):
            yield token.string


def sources(suffixes: tuple[str, ...]) -> list[Path]:
    found = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*"))]
    return [path for path in found if path.suffix in suffixes and VENDORED not in path.parents]


def test_comments_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text('"""Doc of\nnobody."""\nx = "nobody"  # everybody\n')
    (tmp_path / "a.h").write_text('auto a = "nobody // b";  // whoever\n/* any\nbody */\n')
    assert list(comments(tmp_path / "a.py")) == ['"""Doc of\nnobody."""', "# everybody"]
    assert list(comments(tmp_path / "a.h")) == ["// whoever", "/* any\nbody */"]


@pytest.mark.parametrize("suffixes", [(".py",), (".h", ".cpp", ".cu")], ids=["Python", "C++"])
def test_comments_name_the_thing(suffixes: tuple[str, ...]) -> None:
    paths = sources(suffixes)
    assert len(paths) > 50
    found = [
        f"{path.relative_to(ROOT)}: {match.group()}: {' '.join(text.split())[:100]}"
        for path in paths
        for text in comments(path)
        if (match := PRONOUN.search(text)) is not None
    ]
    assert found == []
