"""hipRTC, ROCm's compiler as a library: loaded where it is installed, never required. Tested against a fake library."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_void_p
from functools import cache
from typing import Any

from monotape.backends.hip.library import typed_calls
from monotape.config import rocm_path

NAMES = ("libhiprtc.so", "libhiprtc.so.7", "libhiprtc.so.6")
#: The arguments of every call; all of them return a hiprtcResult.
CALLS: dict[str, tuple[Any, ...]] = {
    "hiprtcVersion": (POINTER(c_int), POINTER(c_int)),
    "hiprtcCreateProgram": (
        POINTER(c_void_p), c_char_p, c_char_p, c_int, POINTER(c_char_p), POINTER(c_char_p),
    ),
    "hiprtcCompileProgram": (c_void_p, c_int, POINTER(c_char_p)),
    "hiprtcGetCodeSize": (c_void_p, POINTER(c_size_t)),
    "hiprtcGetCode": (c_void_p, c_void_p),
    "hiprtcGetProgramLogSize": (c_void_p, POINTER(c_size_t)),
    "hiprtcGetProgramLog": (c_void_p, c_void_p),
    "hiprtcDestroyProgram": (POINTER(c_void_p),),
}  # fmt: skip


class RtcError(Exception):
    """A call that failed; of a compilation, with what the compiler said."""


class Rtc:
    """The library's calls, each of which raises RtcError unless it succeeds."""

    def __init__(self, library: Any) -> None:
        self._calls = typed_calls(library, CALLS)

    def _call(self, name: str, *arguments: Any) -> None:
        if code := self._calls[name](*arguments):
            raise RtcError(f"{name} returned {code}")

    @property
    def version(self) -> str:
        major, minor = c_int(), c_int()
        self._call("hiprtcVersion", byref(major), byref(minor))
        return f"hipRTC {major.value}.{minor.value}"

    def compile(self, source: str, headers: Mapping[str, str], options: Sequence[str]) -> bytes:
        """The code object of a source that includes these headers, by the names that it includes them by."""
        program = c_void_p()
        texts, names = _strings(list(headers.values())), _strings(list(headers))
        self._call(
            "hiprtcCreateProgram", byref(program), source.encode(), b"kernel.cu", len(headers), texts, names
        )
        try:
            if self._calls["hiprtcCompileProgram"](program, len(options), _strings(options)):
                raise RtcError(self._bytes("hiprtcGetProgramLog", program).decode(errors="replace"))
            return self._bytes("hiprtcGetCode", program)
        finally:
            self._call("hiprtcDestroyProgram", byref(program))

    def _bytes(self, name: str, program: c_void_p) -> bytes:
        size = c_size_t()
        self._call(f"{name}Size", program, byref(size))
        text = ctypes.create_string_buffer(size.value)
        self._call(name, program, text)
        return text.raw


def _strings(values: Sequence[str]) -> Any:
    return (c_char_p * len(values))(*(value.encode() for value in values))


@cache
def hip_rtc() -> Rtc | None:
    """This machine's; None where ROCm is not installed."""
    for name in NAMES:
        for path in (name, str(rocm_path() / "lib" / name)):
            try:
                return Rtc(ctypes.CDLL(path))
            except (OSError, AttributeError):
                continue
    return None
