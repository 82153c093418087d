"""Twenty code edits: the beginning of a file of Python's standard library, in which one function gets another name.

The files are those of the Python that runs this. They differ from one version to another, so a report holds the hash of
each text and the version.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from monotape.errors import UsageError

MOST_LINES = 150
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)

#: Module, function, and its new name.
EDITS = (
    ("heapq", "heappush", "push_item"),
    ("glob", "_iglob", "_walk_matches"),
    ("linecache", "clearcache", "forget_lines"),
    ("colorsys", "rgb_to_hls", "hls_from_rgb"),
    ("calendar", "isleap", "is_leap_year"),
    ("queue", "task_done", "mark_done"),
    ("pprint", "saferepr", "safe_text"),
    ("genericpath", "samestat", "same_status"),
    ("posixpath", "splitext", "split_extension"),
    ("base64", "b64decode", "decode_base64"),
    ("html", "unescape", "decode_entities"),
    ("fileinput", "nextfile", "skip_to_next_file"),
    ("filecmp", "clear_cache", "empty_cache"),
    ("json.decoder", "_decode_uXXXX", "_decode_escape"),
    ("tabnanny", "errprint", "print_error"),
    ("pyclbr", "readmodule_ex", "read_module_tree"),
    ("quopri", "needsquoting", "must_be_quoted"),
    ("zipapp", "_maybe_open", "_open_if_path"),
    ("graphlib", "get_ready", "take_ready"),
    ("tracemalloc", "_format_size", "_size_text"),
)


@dataclass(frozen=True, slots=True)
class Task:
    """One edit."""

    module: str
    function: str
    new_name: str
    text: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())

    @property
    def request(self) -> str:
        return (
            f"Rename the function `{self.function}` to `{self.new_name}` in this file, wherever it is named. "
            f"Answer with the whole file and nothing else.\n\n```python\n{self.text}```\n"
        )

    @property
    def edited(self) -> str:
        """The file as it should be."""
        return re.sub(rf"\b{re.escape(self.function)}\b", self.new_name, self.text)

    def is_done_by(self, answer: str) -> bool:
        """Whether an answer is the edited file, inside a code block or not; blank lines around it do not count."""
        block = re.search(r"```[a-z]*\n(.*?)(?:```|\Z)", answer, re.DOTALL)
        return (block[1] if block else answer).strip() == self.edited.strip()


def tasks() -> list[Task]:
    """All of them. The text ends with a definition."""
    return [task_of(*edit) for edit in EDITS]


def task_of(module: str, function: str, new_name: str) -> Task:
    text = beginning(source_of(module))
    if not re.search(rf"\bdef {re.escape(function)}\(", text):
        raise UsageError(
            f"{module} of this Python does not define {function} in its first {MOST_LINES} lines.",
            "Use another version of Python.",
        )
    return Task(module, function, new_name, text)


def source_of(module: str) -> str:
    """The text of a module. Not by its loader: some are frozen, and those do not say where their text is."""
    place = Path(sysconfig.get_paths()["stdlib"], *module.split("."))
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    return file.read_text("utf-8")


def beginning(text: str, most: int = MOST_LINES) -> str:
    """The longest beginning of at most so many lines that ends with a function, a class, or a method of a class."""
    body = ast.parse(text).body
    methods = [part for one in body if isinstance(one, ast.ClassDef) for part in one.body]
    ends = [one.end_lineno or 0 for one in [*body, *methods] if isinstance(one, _DEFINITIONS)]
    last = max((end for end in ends if end <= most), default=0)
    return "".join(text.splitlines(keepends=True)[:last])
