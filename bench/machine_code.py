"""What a report of a GPU is bound to: the machine code of the kernels that ran, and the compiler that made it.

`evidence` takes both from the cubins of a run. `finding` makes a kernel again from its recipe and says whether the code
is still the same; that takes the compiler alone, no GPU. Where neither plan.h nor any line of the kernels' code has
changed (comments aside), the compiler would be given the same input, and is not asked.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from enum import Enum
from typing import Any

from bare_code import without_comments
from monotape.backends.cuda.compilation import (
    ARCHITECTURE,
    KERNELS,
    STANDARD,
    cached_path,
    compile_kernel,
    compiler_of,
    headers,
    machine_code,
)
from monotape.errors import MonotapeError
from recipes import BANDWIDTH, Recipe, recipe_of


class Standing(Enum):
    """What is known of the code that a report measured."""

    TODAY = "as it is today"
    EARLIER = "an earlier one"
    UNKNOWN = "cannot tell"


@dataclass(frozen=True, slots=True)
class Finding:
    """Whether a kernel, or a whole report, is of today's code, and why that is unknown where it is."""

    standing: Standing
    why: str = ""


def evidence(recipes: Iterable[Recipe]) -> dict[str, Any]:
    """The entries of a report: machine code and recipe of each kernel that ran here, and the compiler."""
    kernels, compilers = {}, set()
    for recipe in recipes:
        header = recipe.header()
        assert cached_path(header, recipe.source).exists(), f"{recipe.label} has not been compiled here"
        cubin = compile_kernel(header, recipe.source)
        compilers.add(compiler_of(cubin))
        hashes = {"machine_code": machine_code(cubin), "input": input_hash(recipe, header)}
        kernels[recipe.label] = {**hashes, **recipe.facts()}
    assert len(compilers) == 1, f"kernels of several compilers: {sorted(compilers)}"
    return {"compiler": compilers.pop(), "kernels": kernels}


def input_hash(recipe: Recipe, header: str | None = None) -> str:
    """The hash of the compiler's input without comments and blank lines. `header`: plan.h, if it is made already."""
    files = [KERNELS / recipe.source, *headers()]
    texts = [
        header or recipe.header(),
        *(f"{file.relative_to(KERNELS)}\n{file.read_text()}" for file in files),
    ]
    key = repr(([without_comments(text) for text in texts], ARCHITECTURE, STANDARD))
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def compiler_here() -> str:
    """The version of the compiler that is installed, by the smallest kernel there is."""
    return compiler_of(compile_kernel(BANDWIDTH.header(), BANDWIDTH.source))


def finding(report: Mapping[str, Any], *, compiling: bool) -> Finding:
    """Whether a report's kernels are those of today. Without `compiling`, by cubins that are in the cache already."""
    kernels = report.get("kernels")
    if not kernels:
        return Finding(Standing.EARLIER)
    unknown = None
    for facts in kernels.values():
        found = _finding(facts, report.get("compiler", ""), compiling)
        if found.standing is Standing.EARLIER:
            return found  # whatever the others are
        unknown = found if found.standing is Standing.UNKNOWN else unknown
    return unknown or Finding(Standing.TODAY)


def _finding(facts: Mapping[str, Any], compiler: str, compiling: bool) -> Finding:
    recipe = recipe_of(facts)
    try:
        header = recipe.header()  # compiles a plan, the slowest step here
        if input_hash(recipe, header) == facts["input"]:
            return Finding(Standing.TODAY)
    except (MonotapeError, OSError):  # a shape that is refused today, a file that is gone
        return Finding(Standing.EARLIER)
    if compiler_here() != compiler:
        return Finding(
            Standing.UNKNOWN, f"the report's compiler is NVRTC {compiler}, and {compiler_here()} is installed"
        )
    if not compiling and not cached_path(header, recipe.source).exists():
        return Finding(Standing.UNKNOWN, f"{recipe.label} has not been compiled here")
    same = machine_code(compile_kernel(header, recipe.source)) == facts["machine_code"]
    return Finding(Standing.TODAY if same else Standing.EARLIER)


def compile_ahead(reports: Iterable[Mapping[str, Any]]) -> int:
    """Fills the cache, on all cores, with the kernels that `finding` would compile one after another.

    One of each report first: where it has changed, the others of that report tell nothing new.
    """
    edited = [_edited(report) for report in reports]
    count = _compile_missing(kernels[0] for kernels in edited if kernels)
    alike = [kernels for kernels in edited if kernels and not _changed(*kernels[0])]
    return count + _compile_missing(kernel for kernels in alike for kernel in kernels[1:])


def _edited(report: Mapping[str, Any]) -> list[tuple[Recipe, str]]:
    """The kernels of a report of which only the compiler knows, and the machine code that they had."""
    found = []
    for facts in report.get("kernels", {}).values():
        recipe = recipe_of(facts)
        try:
            if input_hash(recipe) != facts["input"] and report.get("compiler") == compiler_here():
                found.append((recipe, str(facts["machine_code"])))
        except (MonotapeError, OSError):
            return []  # a shape that is refused today: the report is of an earlier kernel
    return found


def _changed(recipe: Recipe, code: str) -> bool:
    return machine_code(compile_kernel(recipe.header(), recipe.source)) != code


def _compile_missing(kernels: Iterable[tuple[Recipe, str]]) -> int:
    wanted = sorted({(recipe.header(), recipe.source) for recipe, _ in kernels})
    missing = [each for each in wanted if not cached_path(*each).exists()]
    if missing:
        with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
            list(pool.map(compile_kernel, *zip(*missing, strict=True)))
    return len(missing)
