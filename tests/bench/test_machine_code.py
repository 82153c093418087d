"""Reports of a GPU are bound to machine code: comments and other shapes may change, instructions may not."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import machine_code
from bare_code import without_comments
from machine_code import Standing, evidence, finding
from monotape.backends.cuda import compilation
from monotape.backends.cuda.compilation import compile_kernel, compiler_of
from monotape.backends.cuda.compilation import machine_code as code_of
from monotape.compiler.gpu import drafting_plan, gpu_plan
from monotape.models.lanes import delayed
from monotape.models.registry import spec_from_config
from monotape.planner.reports import load_reports
from recipes import BANDWIDTH, Recipe, header_text, recipe_of, recipes_of
from report import REPORTS
from shapes import SHAPES

BODY = """#include "plan.h"
extern "C" __global__ void f(int* x) { *x = kOne + 2; }
"""


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder with a kernel of its own, which every recipe makes, and an empty cache."""
    folder = tmp_path / "kernels"
    folder.mkdir()
    for name in ("monotape.cu", "bandwidth.cu"):
        (folder / name).write_text(BODY)
    monkeypatch.setattr(compilation, "KERNELS", folder)
    monkeypatch.setattr(machine_code, "KERNELS", folder)
    monkeypatch.setattr(Recipe, "header", lambda self: f"constexpr int kOne = {self.workers + 1};")
    monkeypatch.setenv("MONOTAPE_CACHE", str(tmp_path / "cache"))
    return folder


def compiled(text: str, folder: Path) -> bytes:
    (folder / "monotape.cu").write_text(text)
    return compile_kernel("constexpr int kOne = 1;")


def test_names_and_comments_are_no_machine_code(kernels: Path) -> None:
    first = compiled(BODY, kernels)
    assert code_of(first) == code_of(compiled(BODY.replace("void f", "void another_name"), kernels))
    assert code_of(first) == code_of(compiled("// a word\n" + BODY, kernels))
    assert code_of(first) != code_of(compiled(BODY.replace("+ 2", "+ 3"), kernels))


@pytest.mark.parametrize("memory", ["__constant__", "__device__", "__device__ const"])
def test_tables_are_machine_code(kernels: Path, memory: str) -> None:
    text = memory + ' int table[3] = {1, 2, 3};\nextern "C" __global__ void f(int* x) { *x = table[*x]; }\n'
    assert code_of(compiled(text, kernels)) != code_of(compiled(text.replace("2, 3", "2, 4"), kernels))
    assert code_of(compiled(text, kernels)) == code_of(compiled(text.replace("table", "list"), kernels))


def test_a_constant_counts_where_it_is_used(kernels: Path) -> None:
    unused = "constexpr int kAnother = 7;\n" + BODY
    assert code_of(compiled(BODY, kernels)) == code_of(compiled(unused, kernels))
    used = unused.replace("+ 2", "+ kAnother")
    assert code_of(compiled(unused, kernels)) != code_of(compiled(used, kernels))


def test_the_cubin_names_its_compiler(kernels: Path) -> None:
    cubin = compiled(BODY, kernels)
    major, minor = compilation._compiler_version()
    assert compiler_of(cubin).startswith(f"{major}.{minor}.")
    assert compiler_of(cubin.replace(b"Cuda compilation", b"Some compilation")) == "unknown"


def run(*recipes: Recipe) -> dict[str, Any]:
    """A report, as it comes back from its file, of a run that compiled these kernels."""
    for recipe in recipes:
        compile_kernel(recipe.header(), recipe.source)
    report: dict[str, Any] = json.loads(json.dumps({"gpu": "h200", **evidence(recipes)}))
    return report


ONE, OTHER = Recipe(shape="some", workers=1), Recipe(shape="some", workers=2)


def test_a_report_names_the_machine_code_of_every_kernel(kernels: Path) -> None:
    report = run(ONE, OTHER, BANDWIDTH)
    assert list(report["kernels"]) == ["some bf16, 1 workers", "some bf16, 2 workers", "bandwidth.cu"]
    assert len({kernel["machine_code"] for kernel in report["kernels"].values()}) == 3
    assert report["compiler"] == machine_code.compiler_here()
    assert finding(report, compiling=True).standing is Standing.TODAY


def test_a_kernel_that_did_not_run_here_is_no_evidence(kernels: Path) -> None:
    with pytest.raises(AssertionError, match="some bf16, 1 workers has not been compiled here"):
        evidence([ONE])


def test_edits_that_leave_the_code_alone_leave_the_report_alone(
    kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = run(ONE)
    (kernels / "monotape.cu").write_text("/* a word */\n\n" + BODY)
    monkeypatch.setattr(machine_code, "compile_kernel", lambda *_: pytest.fail("the compiler was asked"))
    assert finding(report, compiling=True).standing is Standing.TODAY
    monkeypatch.undo()


def test_code_of_other_shapes_may_change(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = run(ONE)
    (kernels / "monotape.cu").write_text("constexpr int kUnused = 3;\n" + BODY)
    assert finding(report, compiling=False).standing is Standing.UNKNOWN
    monkeypatch.setattr(machine_code, "ProcessPoolExecutor", lambda count, context: ThreadPoolExecutor(1))
    assert machine_code.compile_ahead([report]) == 1
    assert machine_code.compile_ahead([report]) == 0
    assert finding(report, compiling=False).standing is Standing.TODAY


def test_of_a_report_with_a_changed_kernel_no_other_is_compiled(
    kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_code, "ProcessPoolExecutor", lambda count, context: ThreadPoolExecutor(1))
    third = Recipe(shape="some", workers=3)
    changed, same = run(ONE, OTHER, third), run(OTHER, third)
    (kernels / "monotape.cu").write_text(BODY.replace("kOne + 2", "kOne + (kOne == 2 ? 3 : 2)"))
    assert machine_code.compile_ahead([changed]) == 1
    cubins = set((kernels.parent / "cache" / "cubin").iterdir())
    assert finding(changed, compiling=True).standing is Standing.EARLIER
    assert set((kernels.parent / "cache" / "cubin").iterdir()) == cubins
    assert machine_code.compile_ahead([changed, same]) == 2
    assert finding(changed, compiling=False).standing is Standing.EARLIER
    assert finding(same, compiling=False).standing is Standing.TODAY


def test_another_instruction_makes_an_earlier_kernel(kernels: Path) -> None:
    report = run(ONE, BANDWIDTH)
    (kernels / "monotape.cu").write_text(BODY.replace("+ 2", "+ 3"))
    assert finding(report, compiling=True).standing is Standing.EARLIER


def test_another_compiler_cannot_tell(kernels: Path) -> None:
    report = {**run(ONE), "compiler": "12.9.86"}
    assert finding(report, compiling=True).standing is Standing.TODAY  # its input is the same
    (kernels / "monotape.cu").write_text(BODY.replace("+ 2", "+ 3"))
    found = finding(report, compiling=True)
    assert found.standing is Standing.UNKNOWN
    assert "NVRTC 12.9.86" in found.why and machine_code.compiler_here() in found.why


def test_headers_in_folders_are_part_of_the_input(kernels: Path) -> None:
    before = machine_code.input_hash(ONE)
    (kernels / "room").mkdir()
    (kernels / "room" / "part.h").write_text("// nothing\n")
    made = machine_code.input_hash(ONE)
    (kernels / "room" / "part.h").write_text("constexpr int kPart = 1;\n")
    assert len({before, made, machine_code.input_hash(ONE)}) == 3


def test_a_header_of_another_machine_is_no_part_of_the_input(kernels: Path) -> None:
    before = machine_code.input_hash(ONE), compilation.cached_path("")
    (kernels / "machine").mkdir()
    (kernels / "machine" / "cdna3_memory.h").write_text("constexpr int kOther = 1;\n")
    assert (machine_code.input_hash(ONE), compilation.cached_path("")) == before
    (kernels / "machine" / "hopper_unit.h").write_text("constexpr int kOwn = 1;\n")
    assert machine_code.input_hash(ONE) != before[0] and compilation.cached_path("") != before[1]


def test_the_input_has_every_header_of_the_kernels() -> None:
    assert list(machine_code.KERNELS.rglob("*.h"))


def test_a_shape_that_cannot_be_made_is_an_earlier_one() -> None:
    facts = {"machine_code": "0", "input": "0", "shape": "gone", "workers": 132, "context": 64}
    report = {"gpu": "h200", "compiler": "13.0.88", "kernels": {"gone": facts}}
    assert finding(report, compiling=True).standing is Standing.EARLIER


@pytest.mark.parametrize(
    ("code", "bare"),
    [
        ("int a;  // b", "int a;"), ("a /* b\n c */ d", "a d"), ('f("// no", "/*");', 'f("// no", "/*");'),
        ('"\\"//" // x', '"\\"//"'), ("\n\n#define a \\\n  b\n", "#define a \\\nb"),
    ],
)  # fmt: skip
def test_comments_are_left_out(code: str, bare: str) -> None:
    assert without_comments(code) == bare


RECIPES = [
    BANDWIDTH,
    Recipe(source="collective.cu", ranks=4),
    Recipe(shape="llama-3.2-1b", workers=132, context=288),
    Recipe(shape="smollm2-135m", dtype="f16", workers=132, context=288, trace=True),
    Recipe(
        shape="dense-2b", config={"num_attention_heads": 24, "num_key_value_heads": 8}, workers=132, context=96,
        ranks=8, lanes=delayed(8, 2), link_delay=True,
    ),
]  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.label)
def test_a_recipe_in_a_report_makes_the_same_header(recipe: Recipe) -> None:
    again = recipe_of(json.loads(json.dumps(recipe.facts())))
    assert again == recipe
    assert again.header() == recipe.header()


def test_recipes_have_names_of_their_own() -> None:
    assert [recipe.label for recipe in RECIPES] == [
        "bandwidth.cu", "collective.cu, 4 ranks", "llama-3.2-1b bf16, 132 workers",
        "smollm2-135m f16, 132 workers, trace", "dense-2b bf16, 132 workers, rank 0 of 8, delay 2, slow links",
    ]  # fmt: skip


class Loaded:
    """As much of a backend as a recipe is made of."""

    name = "cuda"

    def __init__(self, config: dict[str, Any], ranks: int | None = None) -> None:
        self.spec = spec_from_config(config)
        self.gpu_plan = gpu_plan(self.spec, 66 if ranks else 132, 96, tp=ranks)


class LoadedForDrafts(Loaded):
    """With a second kernel."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        plan = drafting_plan(self.spec, self.gpu_plan)
        assert plan is not None
        self.drafting = SimpleNamespace(gpu_plan=plan)


def test_the_recipe_of_a_named_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    (recipe,) = recipes_of(Loaded(SHAPES["smollm2-135m"]), "smollm2-135m", {})  # type: ignore[arg-type]
    assert recipe == Recipe(shape="smollm2-135m", workers=132, context=96)
    other: Any = Loaded(SHAPES["qwen3-0.6b"])
    with pytest.raises(AssertionError, match="makes another kernel than the one that ran"):
        recipes_of(other, "smollm2-135m", {})


def test_the_recipe_of_a_kernel_that_checks_drafts() -> None:
    backend: Any = LoadedForDrafts(SHAPES["llama-3.2-1b"])
    alone, recipe = recipes_of(backend, "llama-3.2-1b", {})
    assert alone == Recipe(shape="llama-3.2-1b", workers=132, context=96)
    assert recipe == Recipe(shape="llama-3.2-1b", workers=132, context=96, drafts=True)
    assert recipe.label == "llama-3.2-1b bf16, 132 workers, drafts"
    assert recipe_of(recipe.facts()) == recipe
    assert alone.header() != recipe.header()


def test_ranks_with_different_kernels_have_a_recipe_each() -> None:
    backend: Any = Loaded(SHAPES["qwen3-0.6b"], 2)
    recipes = recipes_of(backend, "qwen3-0.6b", {})
    texts = {header_text(one, backend.gpu_plan) for one in recipes}
    assert len(texts) == len(recipes)


def test_the_recipe_of_a_checkpoint_holds_its_config() -> None:
    config = {**SHAPES["qwen3-0.6b"], "num_hidden_layers": 3}
    backend: Any = Loaded(config)
    (recipe,) = recipes_of(backend, "model.gguf", config)
    again = recipe_of(json.loads(json.dumps(recipe.facts())))
    assert again.header() == header_text(recipe, backend.gpu_plan)


#: Kernels that take seconds, and one that tests/backends/test_cuda_build.py has left in the cache.
CHEAP = ("bandwidth.cu", "collective.cu", "llama-3.2-1b bf16, 132 workers")
REPORTED = [
    pytest.param(report, facts, id=f"{name}: {label}")
    for name, report in load_reports(REPORTS).items()
    for label, facts in report.get("kernels", {}).items()
    if label.startswith(CHEAP[:2]) or label == CHEAP[2]
]


@pytest.mark.parametrize(("report", "facts"), REPORTED)
def test_a_kernel_that_did_not_change_gives_the_reported_machine_code(
    report: dict[str, Any], facts: dict[str, Any]
) -> None:
    """On any host: it is what makes the comparison of hashes mean something."""
    recipe = recipe_of(facts)
    if machine_code.input_hash(recipe) != facts["input"]:
        pytest.skip(
            "the kernel's sources were edited; whether its code changed is told on the page of reports"
        )
    cubin = compile_kernel(recipe.header(), recipe.source)
    if compiler_of(cubin) != report["compiler"]:
        pytest.skip(
            f"cannot tell: NVRTC {compiler_of(cubin)} is installed, and {report['compiler']} measured"
        )
    assert code_of(cubin) == facts["machine_code"]


def test_the_compiler_is_the_one_that_reports_name() -> None:
    """pyproject.toml pins it, so that CI compares like with like."""
    text = (REPORTS.parent / "pyproject.toml").read_text()
    named = {report["compiler"] for report in load_reports(REPORTS).values() if "compiler" in report}
    assert all(f'"nvidia-cuda-nvrtc=={version}"' in text for version in named)
