"""The CUDA backend on a fake GPU whose kernel is the real one, compiled for the host and run by host_kernel/machine.h.

Everything that reads the machine's order of events follows from the options' seed, so a failure can be repeated.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from ctypes import c_char_p, c_int32, c_int64, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from backends.fake_cuda import FakeCuda, Stream, fake_gpu
from monotape.backends.cpu.build import find_compiler
from monotape.backends.cuda import backend as module
from monotape.backends.cuda.compilation import KERNELS
from monotape.backends.cuda.drafting import DraftingBackend
from monotape.config import cache_dir
from monotape.plan.gpu_machines import CDNA3, HOPPER, GpuMachine

SOURCES = Path(__file__).parent / "host_kernel"
LIBRARIES = cache_dir() / "host-kernels"  # kept from run to run
UNUSED_S = 86_400  # a library that no test has loaded for so long is removed
#: Headers in machine/ that hold instructions; those of SOURCES take their place.
ONLY_HARDWARE = ("hopper", "hopper_memory", "hopper_products", "cdna3", "cdna3_types")
FLAGS = (
    "-std=c++17", "-fPIC", "-shared", "-Wall", "-Wno-unknown-pragmas", "-Wno-sign-compare",
    "-ffp-contract=off", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE",  # checked jumps do not know of other stacks
)  # fmt: skip


def machine_flags(gpu: GpuMachine) -> tuple[str, ...]:
    """The host's machine in the place of this one."""
    return (
        '-DMONOTAPE_MACHINE="host.h"',
        f'-DMONOTAPE_HOST_PRODUCTS="{gpu.header}_products.h"',
        f'-DMONOTAPE_HOST_MEMORY="{gpu.header}_memory_on_host.h"',
        f"-DMONOTAPE_DIES={gpu.dies}",
        f"-DMONOTAPE_LANES={gpu.lanes}",
    )


class OptionsStruct(ctypes.Structure):
    """host_kernel/machine.h: Options"""

    _fields_ = (
        ("seed", c_uint64), ("cancel_at", c_int64), ("most_steps", c_int64),
        *((name, c_int32) for name in ("stalls_per_million", "stall_steps", "delay_steps", "copy_steps")),
        *((name, c_int32) for name in ("favour_steps", "dies", "line_steps", "spare")),
    )  # fmt: skip


class RegionStruct(ctypes.Structure):
    """host_kernel/dies.h: Region"""

    _fields_ = (("start", c_uint64), ("bytes", c_uint64))


@dataclass(frozen=True, slots=True)
class Schedule:
    """How the machine behaves; see machine.h."""

    seed: int = 0
    cancel_at: int = -1
    most_steps: int = 200_000_000
    stalls_per_million: int = 0
    stall_steps: int = 0
    delay_steps: int = 100
    copy_steps: int = 1000
    favour_steps: int = 0
    dies: int = 8  # of a GPU that has several
    line_steps: int = 300


def give_way(_: int) -> None:
    """Lets other threads give masks: the machine's time would otherwise pass much faster than theirs."""
    time.sleep(20e-6)


Visit = ctypes.CFUNCTYPE(None, c_int64)


class MachineFault(AssertionError):
    """The kernel did what no GPU would let it do, or never ended."""


class HostKernel:
    """Takes the place of driver.Kernel. Launched kernels run, all ranks at once, when a result is requested.

    That is to their end, unless other threads give masks: then they run beside the thread that requests results.
    """

    schedule = Schedule()  # of the launches to come, of all kernels
    optimised = "-O1"  # of the libraries to come: the compiler's flag
    steps = 0  # of the latest launch
    crossings = 0  # likewise: words that were loaded from where all dies see them
    beside: ClassVar[Future[None] | None] = None
    visit: ClassVar[Callable[[int], None]] = (
        give_way  # what the host does beside a kernel that waits for masks
    )
    waiting: ClassVar[list[tuple[str, int, ctypes.Structure]]] = []  # library, blocks and parameters of each

    def __init__(self, library: bytes, name: str, shared_bytes: int, told: str) -> None:
        self._library = library.decode()
        self.stream, self.launches = Stream(), 0

    def load_now(self) -> None:
        pass

    def launch(self, blocks: int, threads: int, parameters: ctypes.Structure) -> None:
        self.stream.sync()
        self.launches += 1
        HostKernel.waiting.append((self._library, blocks, parameters))

    def finished(self) -> bool:
        started, HostKernel.waiting = HostKernel.waiting, []
        if started:
            library, blocks, _ = started[0]
            assert all(other[:2] == (library, blocks) for other in started), "ranks that are built alike"
            told = [parameters for _, _, parameters in started]
            if not (told[0].sampling.masks and HostKernel.visit is give_way):
                run_on_host(library, blocks, told)
                return True
            pool = ThreadPoolExecutor(1, "kernel")
            HostKernel.beside = pool.submit(run_on_host, library, blocks, told)
            pool.shutdown(wait=False)
        if (beside := HostKernel.beside) is not None:
            if not beside.done():
                return False
            HostKernel.beside = None
            beside.result()
        return True


def run_on_host(library: str, blocks: int, parameters: list[ctypes.Structure]) -> None:
    """Runs the kernels of all ranks to their end, in the order of events that `HostKernel.schedule` says."""
    run = ctypes.CDLL(library).run_on_host
    run.restype = c_char_p
    schedule, counts, memory = HostKernel.schedule, (c_int64 * 2)(), FakeCuda.device_memory
    options = OptionsStruct(**{name: getattr(schedule, name) for name in Schedule.__slots__})
    pointers = (c_void_p * len(parameters))(*map(ctypes.addressof, parameters))
    regions = (RegionStruct * len(memory))(*((address, held.size) for address, held in memory.items()))
    size = c_int64(ctypes.sizeof(parameters[0]))
    visit = Visit(HostKernel.visit) if parameters[0].sampling.masks else Visit()
    fault = run(
        pointers, len(parameters), size, blocks, ctypes.byref(options), regions, len(memory), counts, visit
    )  # fmt: skip
    HostKernel.steps, HostKernel.crossings = counts
    if fault is not None:
        raise MachineFault(f"{schedule}: {fault.decode()}")


def build(header: str, kernel: str = "monotape.cu") -> bytes:
    """The path of the library for this plan.h and kernel. Sources are copied, the machine's header aside.

    A library is built once for all tests, processes and runs that need it: compiling is most of what many tests do.
    """
    compiler = find_compiler()
    assert compiler, "tests of the kernel need a C++ compiler"
    paths = (*KERNELS.rglob("*.h"), KERNELS / "monotape.cu")
    files = {str(path.relative_to(KERNELS)): path.read_text() for path in paths}
    gpu = CDNA3 if CDNA3.name in header.partition("\n")[0] else HOPPER
    for name in ONLY_HARDWARE:
        del files[f"machine/{name}.h"]
    # A flag that is polled must let others run: see Watched.
    files = {name: re.sub(r"\bvolatile int\b", "host::Watched", text) for name, text in files.items()}
    assert not any("volatile" in text for text in files.values())
    files |= {path.name: path.read_text() for path in SOURCES.iterdir()} | {"plan.h": header}
    flags = (HostKernel.optimised, *FLAGS, *machine_flags(gpu), f'-DMONOTAPE_KERNEL="{kernel}"')
    key = hashlib.sha256(repr((sorted(files.items()), flags, compiler)).encode()).hexdigest()[:24]
    library = LIBRARIES / f"{key}.so"
    LIBRARIES.mkdir(parents=True, exist_ok=True)
    with library.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be building it
        if not library.exists():
            _compile([*compiler, *flags], files, library)
            _remove_unused()
    os.utime(library)
    return str(library).encode()


def _compile(command: list[str], files: dict[str, str], library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=LIBRARIES) as place:
        for name, text in files.items():
            Path(place, name).parent.mkdir(exist_ok=True)
            Path(place, name).write_text(text)
        made = Path(place, "made.so")
        subprocess.run([*command, f"-I{place}", str(Path(place, "run.cpp")), "-o", str(made)], check=True)
        os.replace(made, library)


def _remove_unused() -> None:
    """Each edit of the kernel makes a hundred libraries useless."""
    for path in (*LIBRARIES.glob("*.so"), *LIBRARIES.glob("*.lock")):
        with suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > UNUSED_S:
                path.unlink()


class NeverCompiled:
    """A model's second kernel, which only the tests of drafts need."""

    failure: str | None = None

    def __init__(self, header: str) -> None:
        pass

    def code(self) -> bytes | None:
        return None

    def close(self) -> None:
        pass


@contextmanager
def host_gpu(kernel: str = "monotape.cu") -> Iterator[FakeCuda]:
    """Within, CudaBackend runs on the host."""
    with pytest.MonkeyPatch.context() as patch, fake_gpu(FakeCuda()) as gpu:
        patch.setattr(module, "Kernel", HostKernel)
        patch.setattr(module, "compile_kernel", lambda text: build(text, kernel))
        patch.setattr(DraftingBackend, "compiling", NeverCompiled)
        patch.setattr(HostKernel, "schedule", Schedule())
        patch.setattr(HostKernel, "waiting", [])
        patch.setattr(HostKernel, "visit", give_way)
        yield gpu
