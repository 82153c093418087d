"""What a report is bound to: code without comments, so that prose can be edited freely."""

from __future__ import annotations

from pathlib import Path

import pytest

from bare_code import bare_code

CODE = '''"""A file."""

import math  # for pi


class Some:
    """A class
    of several lines."""

    size = "# no comment"  # a comment

    def area(self) -> float:
        """Ärea."""
        return math.pi  # µ
'''
BARE = """import math
class Some:
size = "# no comment"
def area(self) -> float:
return math.pi"""


def of(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text, "utf-8")
    return bare_code(folder / name)


def test_python_without_comments_and_docstrings(tmp_path: Path) -> None:
    assert of(tmp_path, "a.py", CODE) == BARE


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [
        ("# for pi", "# a circle's", True), ("of several lines", "of more lines,\n    three", True),
        ("Ärea.", "Area", True), ('"# no comment"', '"# a comment"', False), ("math.pi", "math.e", False),
    ],
)  # fmt: skip
def test_an_edit_of_prose_changes_nothing(tmp_path: Path, before: str, after: str, same: bool) -> None:
    changed = CODE.replace(before, after)
    assert changed != CODE
    assert (of(tmp_path, "a.py", changed) == BARE) is same


def test_a_string_that_is_no_docstring_stays(tmp_path: Path) -> None:
    assert of(tmp_path, "a.py", 'x = 1\n"""text"""\n') == 'x = 1\n"""text"""'


def test_cpp_without_comments(tmp_path: Path) -> None:
    assert (
        of(tmp_path, "a.h", 'int a;  // one\n/* two\nlines */\nauto b = "// three";\n')
        == 'int a;\nauto b = "// three";'
    )
