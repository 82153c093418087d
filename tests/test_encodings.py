"""Files of text are read and written as UTF-8, whatever the locale: they travel between machines."""

from __future__ import annotations

import ast
from pathlib import Path

import monotape

TEXT = {"read_text": 0, "write_text": 1}  # the place of the encoding among the arguments


def test_every_file_of_text_names_its_encoding() -> None:
    files = sorted(Path(monotape.__file__).parent.rglob("*.py"))
    calls = [(file, node) for file in files for node in ast.walk(ast.parse(file.read_text("utf-8")))]
    text = [(file, node) for file, node in calls if isinstance(node, ast.Call) and is_text(node)]
    assert len(text) > 40
    assert [f"{file.name}:{node.lineno}" for file, node in text if not names_encoding(node)] == []


def is_text(call: ast.Call) -> bool:
    """Without a mode a file is opened as text; `os.open` and archives are given a name where a path has the mode."""
    modes = [argument.value if isinstance(argument, ast.Constant) else None for argument in call.args]
    if isinstance(call.func, ast.Name):
        return call.func.id == "open" and "b" not in str(modes[1:])
    opens = name_of(call) == "open" and None not in modes and "b" not in str(modes)
    return opens or name_of(call) in TEXT


def name_of(call: ast.Call) -> str:
    """The method's name; none for a function."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def names_encoding(call: ast.Call) -> bool:
    place = TEXT.get(name_of(call))
    return any(word.arg == "encoding" for word in call.keywords) or (
        place is not None and len(call.args) > place
    )
