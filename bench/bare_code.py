"""Code without its comments: an edit of prose changes nothing that a report measured."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

#: A string, which is kept, or a comment, which is not.
_STRING_OR_COMMENT = re.compile(r'("(?:\\.|[^"\\\n])*")|//[^\n]*|/\*.*?\*/', re.DOTALL)
_Place = tuple[int, int]  # line from 1, and character of the line


def bare_code(path: Path) -> str:
    """The code of a Python or C++ file, without comments, docstrings and blank lines: the same with every Python."""
    text = path.read_text("utf-8")
    return _bare_python(text) if path.suffix == ".py" else without_comments(text)


def without_comments(code: str) -> str:
    """C++ without comments and blank lines."""
    return _dense(_STRING_OR_COMMENT.sub(lambda match: match[1] or " ", code))


def _dense(code: str) -> str:
    return "\n".join(" ".join(line.split()) for line in code.splitlines() if line.strip())


@cache  # kinds of reports share folders
def _bare_python(code: str) -> str:
    """Indentation goes too: a report need not tell apart programs that differ in nothing else."""
    lines = code.splitlines(keepends=True)
    for (first, begin), (last, end) in sorted({*_docstrings(code), *_comments(code)}, reverse=True):
        rest = lines[last - 1][end:]
        lines[first - 1 : last] = [lines[first - 1][:begin] + rest]
    return _dense("".join(lines))


def _comments(code: str) -> Iterator[tuple[_Place, _Place]]:
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type == tokenize.COMMENT:
            yield token.start, token.end


def _docstrings(code: str) -> Iterator[tuple[_Place, _Place]]:
    lines = code.splitlines(keepends=True)

    def place(line: int, byte: int) -> _Place:
        """ast counts bytes, and tokens count characters."""
        return line, len(lines[line - 1].encode()[:byte].decode())

    for node in ast.walk(ast.parse(code)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            text = node.body[0]
            assert text.end_lineno is not None and text.end_col_offset is not None
            yield place(text.lineno, text.col_offset), place(text.end_lineno, text.end_col_offset)
