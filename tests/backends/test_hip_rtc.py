"""Compilation by hipRTC where ROCm is, against a fake library, and with the names that hipRTC declares itself."""

from __future__ import annotations

import ctypes
import os
import subprocess
from ctypes import CFUNCTYPE, c_int
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from monotape.backends.cuda.header import plan_header
from monotape.backends.hip import compilation, rtc
from monotape.backends.hip.compilation import cached_path, compile_kernel
from monotape.backends.hip.rtc import CALLS, Rtc
from monotape.compiler.gpu import gpu_plan
from monotape.errors import BackendError, BackendUnavailable
from monotape.models.registry import spec_from_config
from shapes import SHAPES


class FakeRtc:
    """`log`: what it says of a source that it does not compile."""

    def __init__(self, version: tuple[int, int] = (6, 3), log: str = "") -> None:
        self.version, self.log = version, log.encode()
        self.programs: dict[int, tuple[str, dict[str, str]]] = {}
        self.options: list[str] = []
        self.compiled = 0

    def library(self) -> Rtc:
        kinds = {name: CFUNCTYPE(c_int, *arguments) for name, arguments in CALLS.items()}
        return Rtc(SimpleNamespace(**{name: kind(getattr(self, f"_{name}")) for name, kind in kinds.items()}))

    def _hiprtcVersion(self, major: Any, minor: Any) -> int:  # noqa: N802
        major[0], minor[0] = self.version
        return 0

    def _hiprtcCreateProgram(  # noqa: N802
        self, out: Any, source: bytes, name: bytes, count: int, texts: Any, names: Any
    ) -> int:
        out[0] = 5
        self.programs[5] = source.decode(), {names[i].decode(): texts[i].decode() for i in range(count)}
        return 0

    def _hiprtcCompileProgram(self, program: int, count: int, options: Any) -> int:  # noqa: N802
        self.options, self.compiled = [options[i].decode() for i in range(count)], self.compiled + 1
        return 6 if self.log else 0

    @property
    def _code(self) -> bytes:
        return b"\x7fELF" + b"\0" * 60 + self.programs[5][1]["plan.h"].encode()

    def _hiprtcGetCodeSize(self, program: int, out: Any) -> int:  # noqa: N802
        out[0] = len(self._code)
        return 0

    def _hiprtcGetCode(self, program: int, out: int) -> int:  # noqa: N802
        ctypes.memmove(out, self._code, len(self._code))
        return 0

    def _hiprtcGetProgramLogSize(self, program: int, out: Any) -> int:  # noqa: N802
        out[0] = len(self.log)
        return 0

    def _hiprtcGetProgramLog(self, program: int, out: int) -> int:  # noqa: N802
        ctypes.memmove(out, self.log, len(self.log))
        return 0

    def _hiprtcDestroyProgram(self, program: Any) -> int:  # noqa: N802
        return 0


@pytest.fixture
def header() -> str:
    return plan_header(gpu_plan(spec_from_config(SHAPES["laneformer-32m"]), 8, 64, backend="hip"))


def use(fake: FakeRtc, patch: pytest.MonkeyPatch, cache: Path) -> None:
    library = fake.library()
    patch.setattr(compilation, "hip_rtc", lambda: library)
    patch.setenv("MONOTAPE_CACHE", str(cache))


def test_it_gets_all_headers_and_its_code_is_kept_by_content(
    header: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = FakeRtc()
    use(fake, monkeypatch, tmp_path)
    code = compile_kernel(header)
    source, texts = fake.programs[5]
    assert "monotape_request" in source and texts["plan.h"] == header
    assert {"machine/cdna3.h", "exchange/dies.h", "token/model.h"} <= set(texts)
    assert not any("hopper" in name for name in texts)
    assert "--offload-arch=gfx942" in fake.options and "-nogpuinc" not in fake.options
    assert compile_kernel(header) == code and fake.compiled == 1
    compile_kernel(header + "\n")
    assert fake.compiled == 2
    before = cached_path(header)
    use(FakeRtc(version=(7, 0)), monkeypatch, tmp_path)
    assert cached_path(header) != before, "another compiler's code is another file"


def test_what_it_does_not_compile_clang_does(
    header: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use(FakeRtc(log="kernel.cu:3: error: no such builtin"), monkeypatch, tmp_path)
    monkeypatch.setattr(compilation, "_compile_with_clang", lambda header, source: b"by clang")
    assert compile_kernel(header) == b"by clang"


def test_without_clang_its_first_error_is_the_sentence(
    header: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def missing() -> str:
        raise BackendUnavailable("There is no clang here.")

    use(FakeRtc(log="In file\nkernel.cu:3: error: no such builtin"), monkeypatch, tmp_path)
    monkeypatch.setattr(compilation, "find_compiler", missing)
    with pytest.raises(
        BackendError, match=r"does not compile for gfx942: kernel\.cu:3: error: no such builtin"
    ):
        compile_kernel(header)


def test_where_rocm_is_not_there_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ROCM_PATH", str(tmp_path))
    monkeypatch.setattr(rtc, "NAMES", ("libhiprtc-that-is-not-here.so",))
    rtc.hip_rtc.cache_clear()
    assert rtc.hip_rtc() is None
    rtc.hip_rtc.cache_clear()


@pytest.mark.long
def test_names_that_hiprtc_declares_before_the_source_are_no_obstacle(header: str, tmp_path: Path) -> None:
    """Those of its types and functions that the kernel has too, with other contents."""
    try:
        compiler = compilation.find_compiler()
    except BackendUnavailable as error:
        if os.environ.get("MONOTAPE_REQUIRE_CLANG", "") not in ("", "0"):
            raise
        pytest.skip(str(error))
    (tmp_path / "plan.h").write_text(header)
    (tmp_path / "before.h").write_text(
        "#define __device__ __attribute__((device))\n#define __launch_bounds__(...)\n"
        "struct uint4 { unsigned w; };\nstruct float4 { double x[4]; };\nstruct uint2 { char c; };\n"
        "__device__ int make_uint4(int);\n__device__ double exp(double);\n__device__ float fmaxf(float, float);\n"
        "__device__ unsigned __float_as_uint(float);\n"
    )
    made = tmp_path / "made.o"
    source = str(compilation.KERNELS / compilation.KERNEL_FILE)
    found = [f"-I{tmp_path}", f"-I{compilation.KERNELS}", "-D__HIPCC_RTC__", "-include", "before.h"]
    subprocess.run([compiler, *compilation.OPTIONS, *found, source, "-o", str(made)], check=True)
    assert compilation.code_usage(made.read_bytes()).scratch_bytes == 0
