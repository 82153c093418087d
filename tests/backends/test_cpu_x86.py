"""The kernels for x86: compiled for such a machine, and run by an emulator where this machine is another."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from backends.code_cases import CODES, Matrix, activations, random_matrix
from monotape.backends.cpu.bridge import FORMAT_CODES
from monotape.backends.cpu.build import COMMON_FLAGS, KERNEL_FLAGS, SOURCES
from monotape.plan.formats import TILE_ROWS

ROWS, K = 5, 300
NATIVE = platform.machine() == "x86_64"
COMPILER = "c++" if NATIVE else "x86_64-linux-gnu-g++"
#: Here the objects are those of this machine's library (see compile_once.py); for an emulator they are not worth much.
FLAGS = COMMON_FLAGS if NATIVE else (*COMMON_FLAGS, "-O1")
EMULATOR = [] if NATIVE else ["qemu-x86_64", "-cpu", "max"]
_FILES = (
    *(source.name for source in sorted(SOURCES.glob("kernels*.cpp"))),
    "features_x86.cpp",
    "products.cpp",
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not shutil.which(COMPILER) or not all(shutil.which(name) for name in EMULATOR[:1]),
        reason=f"needs {COMPILER}" + ("" if NATIVE else " and qemu-x86_64"),
    ),
]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("x86")
    objects = []
    for source in (*(SOURCES / name for name in _FILES), Path(__file__).parent / "products_on_x86.cpp"):
        objects.append(folder / f"{source.stem}.o")
        flags = (*FLAGS, *KERNEL_FLAGS["x86_64"].get(source.name, ()), f"-I{SOURCES}")
        subprocess.run([COMPILER, *flags, "-c", source, "-o", objects[-1]], check=True)
    found = folder / "products"
    subprocess.run([COMPILER, "-static-libstdc++", "-static-libgcc", *objects, "-o", found], check=True)
    return found


def emulator() -> list[str]:
    """The command before the program's: an emulator that finds the libraries of the other machine."""
    if NATIVE:
        return []
    libc = subprocess.check_output([COMPILER, "-print-file-name=libc.so.6"], text=True).strip()
    return [*EMULATOR, "-L", str(Path(libc).resolve().parents[1])]


def run(program: Path, isa: str, matrices: list[Matrix]) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Of each matrix: products one by one, products together, and its rows."""
    x = activations(ROWS, K)
    given = b"".join(
        np.array([FORMAT_CODES[matrix.format], len(matrix.tiles), K, ROWS], np.int32).tobytes()
        + matrix.tiles.tobytes()
        + x.tobytes()
        for matrix in matrices
    )
    done = subprocess.run([*emulator(), program, isa], input=given, capture_output=True, check=True)
    left, results = np.frombuffer(done.stdout, np.float32), []
    for matrix in matrices:
        width = len(matrix.tiles) * TILE_ROWS
        ends = np.cumsum([ROWS * width, ROWS * width, width * K])
        alone, together, rows, left = np.split(left, ends)
        results.append((alone.reshape(ROWS, width), together.reshape(ROWS, width), rows.reshape(width, K)))
    assert left.size == 0
    return results


def test_avx2_agrees_with_plain_cpp_and_with_this_machine(program: Path) -> None:
    matrices = [random_matrix(fmt, 16, K) for fmt in CODES]
    x = activations(ROWS, K)
    fast, plain = run(program, "avx2", matrices), run(program, "portable", matrices)
    for matrix, (alone, together, rows), (expected, _, plain_rows) in zip(matrices, fast, plain, strict=True):
        name = matrix.format.value
        assert np.array_equal(alone, together), name
        assert np.array_equal(rows, matrix.unpacked("portable")), name
        assert np.array_equal(plain_rows, rows), name
        assert np.array_equal(expected, matrix.products(x, "portable")), name
        terms = np.abs(x.astype(np.float64)) @ np.abs(matrix.exact).T
        assert np.all(np.abs(alone - expected.astype(np.float64)) <= 1e-5 * terms), name
        if not NATIVE:  # the same integers, and fused multiply-adds in the same order
            assert np.array_equal(alone, matrix.products(x, "")), name
