"""AMD's HIP runtime, loaded when it is first needed: nothing of ROCm is imported, compiled or installed for it.

Only calls whose arguments are numbers and pointers are used, so no structure of a particular version of ROCm matters.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from functools import cache
from typing import Any, NoReturn

from monotape.config import rocm_path
from monotape.errors import BackendUnavailable

NAMES = ("libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6")
NOT_READY, OUT_OF_MEMORY, PEER_ACCESS_ALREADY_ENABLED = 600, 2, 704  # hipError_t
_SIZE = c_size_t
#: The arguments of every call; all of them return a hipError_t.
CALLS: dict[str, tuple[Any, ...]] = {
    "hipInit": (c_uint,),
    "hipGetDeviceCount": (POINTER(c_int),),
    "hipSetDevice": (c_int,),
    "hipDeviceGetName": (c_void_p, c_int, c_int),
    "hipDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "hipDeviceSynchronize": (),
    "hipDeviceCanAccessPeer": (POINTER(c_int), c_int, c_int),
    "hipDeviceEnablePeerAccess": (c_int, c_uint),
    "hipMemGetInfo": (POINTER(_SIZE), POINTER(_SIZE)),
    "hipMalloc": (POINTER(c_void_p), _SIZE),
    "hipExtMallocWithFlags": (POINTER(c_void_p), _SIZE, c_uint),
    "hipFree": (c_void_p,),
    "hipHostMalloc": (POINTER(c_void_p), _SIZE, c_uint),
    "hipHostFree": (c_void_p,),
    "hipMemcpyAsync": (c_void_p, c_void_p, _SIZE, c_int, c_void_p),
    "hipMemcpy2DAsync": (c_void_p, _SIZE, c_void_p, _SIZE, _SIZE, _SIZE, c_int, c_void_p),
    "hipMemsetAsync": (c_void_p, c_int, _SIZE, c_void_p),
    "hipStreamCreateWithFlags": (POINTER(c_void_p), c_uint),
    "hipStreamSynchronize": (c_void_p,),
    "hipEventCreateWithFlags": (POINTER(c_void_p), c_uint),
    "hipEventRecord": (c_void_p, c_void_p),
    "hipEventSynchronize": (c_void_p,),
    "hipEventQuery": (c_void_p,),
    "hipModuleLoadData": (POINTER(c_void_p), c_void_p),
    "hipModuleGetFunction": (POINTER(c_void_p), c_void_p, c_char_p),
    "hipModuleGetGlobal": (POINTER(c_void_p), POINTER(_SIZE), c_void_p, c_char_p),
    "hipModuleLaunchCooperativeKernel": (c_void_p, *(c_uint,) * 7, c_void_p, c_void_p),
}


class HipError(Exception):
    """A call that failed, under HIP's own name for the error."""

    def __init__(self, code: int, name: str, call: str) -> None:
        room = ", OUT_OF_MEMORY" if code == OUT_OF_MEMORY else ""  # as CUDA's errors say it
        super().__init__(f"{name}: {call}{room}")
        self.code = code


def typed_calls(library: Any, calls: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Functions of a library that return a code, by name, with the types of their arguments."""
    found = {}
    for name, arguments in calls.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, c_int
        found[name] = function
    return found


class HipLibrary:
    """The runtime's calls, each of which raises HipError unless it succeeds."""

    def __init__(self, library: Any) -> None:
        self._calls = typed_calls(library, CALLS)
        self._name_of = library.hipGetErrorName
        self._name_of.argtypes, self._name_of.restype = (c_int,), c_char_p

    def call(self, name: str, *arguments: Any) -> None:
        if code := self.status(name, *arguments):
            self.fail(code, name)

    def fail(self, code: int, name: str) -> NoReturn:
        raise HipError(code, self._name_of(code).decode(errors="replace"), name)

    def status(self, name: str, *arguments: Any) -> int:
        """The call's hipError_t, for those of which an error is an answer."""
        code: int = self._calls[name](*arguments)
        return code

    def new(self, name: str, *arguments: Any) -> int:
        """A handle or an address that the call returns through its first argument."""
        made = c_void_p()
        self.call(name, byref(made), *arguments)
        return made.value or 0

    def number(self, name: str, *arguments: Any) -> int:
        """Likewise, a number."""
        found = c_int()
        self.call(name, byref(found), *arguments)
        return found.value


@cache
def hip_library() -> HipLibrary:
    """The runtime of this machine; BackendUnavailable where there is none."""
    for name in NAMES:
        for path in (name, str(rocm_path() / "lib" / name)):
            try:
                library = HipLibrary(ctypes.CDLL(path))
                library.call("hipInit", 0)
            except (OSError, AttributeError):
                continue
            except HipError as error:
                raise BackendUnavailable(
                    f"AMD's HIP runtime does not start: {error}.", "Is the amdgpu driver loaded?"
                ) from error
            return library
    raise BackendUnavailable(
        "AMD's HIP runtime is not installed (libamdhip64.so).",
        "Install ROCm 6 or later, or use --backend cpu.",
    )
