"""Say what this machine has, and for what is missing the cause and the fix, a line each."""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from monotape.config import cache_dir, cxx_compiler
from monotape.errors import BackendUnavailable, MonotapeError

NEEDED = (
    "numpy", "safetensors", "tokenizers", "gguf", "huggingface_hub", "minijinja", "msgspec", "rich",
    "prompt_toolkit",
)  # fmt: skip
SERVE = ("starlette", "uvicorn", "uvloop", "llguidance", "prometheus-client")
DIFFERS = 0.1  # a figure this much below the kept one was disturbed, or the machine has changed


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. A finding that is not good names its cause and its fix."""

    name: str
    good: bool
    found: str
    fix: str = ""
    value: Any = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one object")
    parser.add_argument(
        "--forget",
        action="store_true",
        help="forget the best read bandwidth so far, because the machine has changed, and keep today's",
    )


def main(options: argparse.Namespace) -> int:
    if options.forget:
        from monotape.backends.cpu.bandwidth import forget_bandwidth

        forget_bandwidth()
    findings = []
    for finding in examine():
        findings.append(finding)
        if not options.json:
            print(f"{'ok  ' if finding.good else 'MISS'}  {finding.name:<16} {finding.found}", flush=True)
            if finding.fix:
                print(f"      {'':<16} fix: {finding.fix}")
    if options.json:
        print(json.dumps({finding.name: dataclasses.asdict(finding) for finding in findings}))
    return 0


def examine() -> Iterator[Finding]:
    """Every finding, as it is made; the bandwidth takes a second."""
    yield _system()
    yield _memory()
    yield _packages("packages", NEEDED, "pip install monotape")
    yield _packages(
        "serve packages", SERVE, "pip install 'monotape[serve]'; only `monotape serve` needs them"
    )
    yield _compiler()
    yield from _native()
    yield _cache()
    yield from _gpu()
    yield _amd()


def _system() -> Finding:
    from monotape.backends.cpu.bandwidth import available_cpus

    cpus = available_cpus()
    text = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}, {cpus} CPUs for this process"
    return Finding("machine", True, text, value=cpus)


def _memory() -> Finding:
    from monotape.engine.loading import available_memory

    available = available_memory()
    text = (
        f"{available / 1e9:.1f} GB available"
        if available
        else "this system does not say how much is available"
    )
    return Finding("memory", True, text, value=available)


def _packages(label: str, names: Sequence[str], fix: str) -> Finding:
    import importlib.metadata  # slow to import, and only wanted here

    versions, missing = {}, []
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        return Finding(label, False, f"not installed: {', '.join(missing)}", fix, versions)
    return Finding(label, True, ", ".join(f"{k} {v}" for k, v in versions.items()), value=versions)


def _compiler() -> Finding:
    from monotape.backends.cpu.build import find_compiler

    found = find_compiler(cxx_compiler())
    if found is None:
        fix = "install g++ or clang++; only needed where the package was not built with one"
        return Finding("compiler", False, "no c++, g++ or clang++ on the PATH", fix)
    return Finding("compiler", True, shutil.which(found[0]) or found[0])


def _native() -> Iterator[Finding]:
    from monotape.backends.cpu.bridge import isa_name

    try:
        yield Finding("cpu backend", True, f"{isa_name()} kernels", value=isa_name())
        yield _bandwidth()
    except BackendUnavailable as error:
        yield Finding("cpu backend", False, error.message, error.hint)


def _bandwidth() -> Finding:
    from monotape.backends.cpu.bandwidth import measure_bandwidth, remember_bandwidth

    today = measure_bandwidth()
    best = remember_bandwidth(today)
    text = f"{best.bytes_per_second / 1e9:.1f} GB/s read with {best.threads} threads"
    value = {"best": best.bytes_per_second, "date": best.date, "today": today.bytes_per_second}
    if best is not today:
        text += f", measured {f'on {best.date}' if best.date else 'earlier'}"
    if today.bytes_per_second >= (1 - DIFFERS) * best.bytes_per_second:
        return Finding("bandwidth", True, text, value=value)
    text += (
        f"; only {today.bytes_per_second / 1e9:.1f} GB/s now: the machine has other work to do, or it has changed"
        " (then --forget)"
    )
    return Finding("bandwidth", True, text, value=value)


def _cache() -> Finding:
    folder = cache_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            free = shutil.disk_usage(folder).free
    except OSError as error:
        found = f"{folder} cannot be written: {error.strerror}"
        return Finding("cache", False, found, "set MONOTAPE_CACHE to a folder that can")
    return Finding("cache", True, f"{folder}, {free / 1e9:.1f} GB free", value=free)


def _gpu() -> Iterator[Finding]:
    from monotape.backends.cuda.detection import find_gpu, missing_packages, why_not

    gpu, reason = find_gpu(), why_not()
    if gpu is None:
        yield Finding("gpu", True, "none found; models run on the CPU")
    elif reason:
        fix = "pip install 'monotape[cuda]'" if missing_packages() else ""
        yield Finding("gpu", not fix, f"{reason} Models run on the CPU.", fix, gpu.name)
    else:
        yield from _hopper()


def _amd() -> Finding:
    """AMD's GPUs. "auto" never takes them: their backend was compiled and simulated, never run on hardware."""
    from monotape.backends.hip.compilation import ARCHITECTURE, find_compiler
    from monotape.backends.hip.runtime import find_gpu
    from monotape.plan.gpu_machines import NEVER_RUN

    gpu = find_gpu()
    try:
        compiler, fix = f"{find_compiler()} compiles for {ARCHITECTURE}", ""
    except BackendUnavailable as error:
        compiler, fix = error.message[0].lower() + error.message[1:].rstrip("."), error.hint
    text = f"{gpu or 'none found'}; --backend hip is {NEVER_RUN}; {compiler}"
    return Finding("amd gpu", gpu is None or not fix, text, fix if gpu else "", gpu)


def _hopper() -> Iterator[Finding]:
    from monotape.backends.cuda.bandwidth import known_bandwidth, measure_bandwidth, remember_bandwidth
    from monotape.backends.cuda.driver import device_name, memory_free_and_total, processors

    try:
        free, total = memory_free_and_total()
        text = (
            f"{device_name()}, {processors()} multiprocessors, {free / 1e9:.1f} of {total / 1e9:.1f} GB free"
        )
        yield Finding("gpu", True, text, value=device_name())
        today = measure_bandwidth()
        best = max(today, known_bandwidth())
        text = f"{best / 1e9:,.0f} GB/s read"
        if today == best:
            remember_bandwidth(today)
        elif today < (1 - DIFFERS) * best:
            text += f"; only {today / 1e9:,.0f} GB/s now: another program uses the GPU"
        yield Finding("gpu bandwidth", True, text, value={"best": best, "today": today})
    except MonotapeError as error:
        yield Finding("gpu", False, error.message, error.hint)
