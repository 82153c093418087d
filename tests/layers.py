"""The imports between parts of a package, read off its sources; tests/test_layers.py has the rules."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path


@dataclass(frozen=True)
class Package:
    """The package whose folder is `root`. Its modules go by their full names, a folder's `__init__.py` by its own."""

    root: Path

    @cached_property
    def modules(self) -> dict[str, Path]:
        found = {}
        for path in sorted(self.root.rglob("*.py")):
            parts = path.relative_to(self.root.parent).with_suffix("").parts
            found[".".join(parts[:-1] if path.stem == "__init__" else parts)] = path
        return found

    @cached_property
    def imports(self) -> dict[str, frozenset[str]]:
        """The modules of the package that each names in an import: on top, for type checkers, or in a function."""
        return {name: frozenset(self._imported(name, path)) - {name} for name, path in self.modules.items()}

    def part(self, module: str, folder: str = "") -> str:
        """Where in a folder of the package a module belongs: a file or folder there, "__init__" for the folder's own.

        "" for a module that is not in the folder.
        """
        inside = module.removeprefix(".".join(filter(None, (self.root.name, *folder.split("/")))))
        if inside == "":
            return "__init__"
        return inside[1:].partition(".")[0] if inside.startswith(".") else ""

    def parts(self, folder: str = "") -> set[str]:
        return {self.part(module, folder) for module in self.modules} - {""}

    def breaches(self, rules: Mapping[str, set[str]], folder: str = "") -> Iterator[str]:
        """Imports between the parts of a folder that no rule allows, and parts that no rule speaks of."""
        for module, imported in self.imports.items():
            part = self.part(module, folder)
            if part and part not in rules:
                yield f"{module} has no rule"
                continue
            for other in sorted(imported):
                wanted = self.part(other, folder)
                if part and wanted and wanted != part and wanted not in rules[part]:
                    yield f"{module} imports {other}"

    def cycle(self) -> list[str]:
        """Modules that import each other in a circle; none is the good answer."""
        try:
            TopologicalSorter(self.imports).prepare()
        except CycleError as error:
            found: list[str] = error.args[1]
            return found
        return []

    def _imported(self, name: str, path: Path) -> Iterator[str]:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield from self._known(alias.name)
            elif isinstance(node, ast.ImportFrom):
                source = self._absolute(name, path, node)
                for alias in node.names:
                    inner = f"{source}.{alias.name}"
                    yield from self._known(inner if inner in self.modules else source)

    def _known(self, name: str) -> Iterator[str]:
        if name in self.modules:
            yield name

    def _absolute(self, name: str, path: Path, node: ast.ImportFrom) -> str:
        if node.level == 0:
            return node.module or ""
        folder = name.split(".") if path.stem == "__init__" else name.split(".")[:-1]
        return ".".join(filter(None, (*folder[: len(folder) - node.level + 1], node.module)))
