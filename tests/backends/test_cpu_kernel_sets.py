"""The kernel sets for x86 beside each other: which of them is chosen, and that the bits are those of AVX2."""

from __future__ import annotations

import ctypes
import platform
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from backends.code_cases import CODES, activations, random_matrix
from backends.cpu_cases import PROMPT, cpu
from monotape.backends.cpu.bridge import isa_name, library
from monotape.backends.cpu.build import COMMON_FLAGS, KERNEL_FLAGS, SOURCES, build, find_compiler, link_order
from monotape.plan.formats import Format

Checkpoint = Callable[[str], Path]
#: What a processor must say that it has, the best set first.
SETS = {
    "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx2", "fma", "f16c"},
    "avxvnni": {"avx_vnni", "avx2", "fma", "f16c"},
    "avx2": {"avx2", "fma", "f16c"},
}
DOTS_OF_BYTES = ("avx512", "avxvnni")

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="kernels for x86")


def features() -> set[str]:
    """What Linux says of the first processor."""
    information = Path("/proc/cpuinfo")
    if not information.exists():
        pytest.skip("needs /proc/cpuinfo")
    lines = information.read_text().splitlines()
    return set(next(line for line in lines if line.startswith("flags")).split(":")[1].split())


def need(isa: str) -> None:
    if not SETS[isa] <= features():
        pytest.skip(f"this processor has no {isa}")
    assert library().monotape_isa(isa.encode()) == isa.encode(), (
        "the processor has it, and the build lacks it"
    )


def test_the_best_set_that_the_processor_has_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MONOTAPE_ISA", raising=False)
    there = [isa for isa, needed in SETS.items() if needed <= features()]
    assert isa_name() == [*there, "portable"][0]
    assert [isa for isa in SETS if library().monotape_isa(isa.encode())] == there


@pytest.mark.parametrize("isa", DOTS_OF_BYTES)
@pytest.mark.parametrize("fmt", CODES)
def test_dot_products_of_bytes_have_the_bits_of_those_of_words(fmt: Format, isa: str) -> None:
    need(isa)
    for k, rows in ((300, 1), (300, 3), (4100, 4), (4100, 9)):
        matrix, x = random_matrix(fmt, 24, k), activations(rows, k)
        words = matrix.products(x, "avx2")
        assert np.array_equal(matrix.products(x, isa), words)
        assert np.array_equal(matrix.products(x, isa, together=True), words)
        assert np.array_equal(matrix.products(x, "avx2", together=True), words)
    assert np.array_equal(matrix.unpacked(isa), matrix.unpacked("avx2"))


@pytest.mark.parametrize("isa", DOTS_OF_BYTES)
@pytest.mark.parametrize("code", [0, 255])
def test_the_largest_products_do_not_saturate(code: int, isa: str) -> None:
    """Pairs of such products are no 16-bit integers, where other instructions for bytes keep their sums."""
    need(isa)
    matrix = random_matrix(Format.Q8, 8, 64)
    matrix.tiles.reshape(-1, 16 + 256)[:, 16:] = np.uint8(code ^ 0x80)
    largest = np.float32(32639 / 32768)  # both halves of the integer are 127
    for x in (np.full((4, 64), largest), np.full((4, 64), -largest), np.full((4, 64), np.float32(-0.5))):
        words = matrix.products(x, "avx2")
        assert np.array_equal(matrix.products(x, isa), words)
        assert np.array_equal(matrix.products(x, isa, together=True), words)
        assert np.all(np.abs(words) > 0)


@pytest.mark.parametrize("isa", DOTS_OF_BYTES)
@pytest.mark.parametrize("dtype", ["f32", "q8"])
def test_a_whole_model_has_the_same_bits(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, dtype: str, isa: str
) -> None:
    need(isa)
    logits = {}
    for name in ("avx2", isa):
        monkeypatch.setenv("MONOTAPE_ISA", name)
        with cpu(checkpoint("qwen3"), dtype) as backend:
            assert backend.isa == name
            logits[name] = backend.logits(PROMPT, backend.new_sequence())
    assert np.array_equal(logits[isa], logits["avx2"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "complaint",
    ["error: unrecognized option -mavxvnni", "x.s:7: Error: no such instruction: `{vex} vpdpbusd'"],
)
def test_a_compiler_that_does_not_know_an_instruction_set_builds_the_others(
    tmp_path: Path, complaint: str
) -> None:
    compiler = find_compiler()
    assert compiler and shutil.which(compiler[0])
    older = tmp_path / "older"
    older.write_text(
        "#!/bin/sh\n"
        f'case "$*" in *-mavxvnni*) cat {tmp_path / "complaint"} >&2; exit 1 ;; esac\n'
        f'exec {compiler[0]} "$@"\n'
    )
    (tmp_path / "complaint").write_text(complaint)
    older.chmod(older.stat().st_mode | stat.S_IXUSR)
    assert "-mavxvnni" in KERNEL_FLAGS["x86_64"]["kernels_avxvnni.cpp"] and "-mavxvnni" not in COMMON_FLAGS
    built = ctypes.CDLL(str(build(tmp_path / "built", [str(older)])))
    built.monotape_isa.restype, built.monotape_isa.argtypes = ctypes.c_char_p, [ctypes.c_char_p]
    assert built.monotape_isa(b"avxvnni") is None
    for isa, needed in SETS.items():
        if isa != "avxvnni" and needed <= features():
            assert built.monotape_isa(isa.encode()) == isa.encode()


@pytest.mark.parametrize("machine", list(KERNEL_FLAGS))
def test_objects_for_some_processors_are_linked_last(machine: str) -> None:
    """The linker keeps the first copy of an inline function, for all processors."""
    names = [file.name for file in link_order(sorted(SOURCES.glob("*.cpp"), reverse=True), machine)]
    special = KERNEL_FLAGS[machine].keys()
    assert special <= set(names) and set(names[-len(special) :]) == special
