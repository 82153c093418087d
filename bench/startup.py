"""From process start to the first token, in fresh processes: with no compiled kernel in the cache, and with one.

    python bench/startup.py --backend cuda --model llama-3.2-1b --save

A named shape is written as a checkpoint first, so its weights are in the page cache; other models are read once for
that. The ceiling of loading is the bytes of the weights at the measured speed of copying host memory to the GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from checkpoint_file import write_checkpoint
from measuring import add_model_arguments, short_name
from report import ROOT, publish, spread
from shapes import SHAPES

Phases = list[tuple[str, float]]
_COPY_BYTES = 256 << 20


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model_arguments(parser, "llama-3.2-1b")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--runs", type=int, default=5, help="with the compiled kernel in the cache")
    return parser.parse_args()


def start_once(options: argparse.Namespace, folder: Path, cache: Path) -> tuple[Phases, dict[str, Any]]:
    """The phases of one process: what ended when, in seconds since it was started. And the kernels it ran."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "bench"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "MONOTAPE_CACHE": str(cache), "PYTHONPATH": path}
    # An installed package has its bytecode. A checkout writes it in the first run, unless it is forbidden.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [
        sys.executable, str(ROOT / "bench" / "startup_child.py"), str(folder), options.backend,
        str(options.context), str(time.time_ns()), options.model,
    ]  # fmt: skip
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    told = json.loads(done.stdout.splitlines()[-1])
    return [(name, ended) for name, ended in told["phases"]], told["kernels"]


def durations(phases: Phases) -> dict[str, float]:
    ends = [0.0, *(ended for _, ended in phases)]
    return {name: ended - ends[index] for index, (name, ended) in enumerate(phases)}


def read_once(model: Path) -> int:
    """Brings the weights, a folder's or one file's, into the page cache; returns their bytes."""
    total = 0
    for file in [model] if model.is_file() else model.glob("*.safetensors"):
        with file.open("rb") as opened:
            while chunk := opened.read(1 << 24):
                total += len(chunk)
    return total


def copy_bandwidth() -> tuple[str, float]:
    """The GPU's name, and bytes per second from pinned memory to it: no loading can be faster."""
    from monotape.backends.cuda.driver import DeviceMemory, PinnedMemory, device_name, new_stream

    pinned, memory, stream = PinnedMemory(_COPY_BYTES), DeviceMemory(_COPY_BYTES), new_stream()
    best = 0.0
    for _ in range(5):
        start = time.perf_counter()
        memory.copy_in(pinned.pointer, _COPY_BYTES, 0, stream)
        stream.sync()
        best = max(best, _COPY_BYTES / (time.perf_counter() - start))
    return device_name(), best


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as cache:
        cold, kernels = start_once(options, folder, Path(cache))
        warm = [start_once(options, folder, Path(cache))[0] for _ in range(options.runs)]
    totals = [phases[-1][1] for phases in warm]
    phases = [durations(phases) for phases in warm]
    return {
        **kernels,
        "first_token_s": spread(totals),
        "cold_first_token_s": cold[-1][1],
        "compiling_s": max(0.0, cold[-1][1] - statistics.median(totals)),
        "phases": [{"phase": name, "seconds": spread([run[name] for run in phases])} for name in phases[0]],
    }


def print_table(found: dict[str, Any], weight_bytes: int, copy: float | None) -> None:
    if copy:
        print(
            f"copying to the GPU at {copy / 1e9:.1f} GB/s: the weights are there after {weight_bytes / copy:.3f} s"
        )
    for phase in found["phases"]:
        seconds = phase["seconds"]
        print(
            f"{phase['phase']:<26} {seconds['median']:>7.3f} s ({seconds['min']:.3f} to {seconds['max']:.3f})"
        )
    print(f"{'process start to first token':<26} {found['first_token_s']['median']:>5.3f} s")
    print(f"{'the same, nothing compiled':<26} {found['cold_first_token_s']:>7.3f} s")


def main() -> None:
    options = parse_arguments()
    with tempfile.TemporaryDirectory() as temporary:
        shape = options.model in SHAPES
        folder = write_checkpoint(options.model, Path(temporary)) if shape else Path(options.model)
        weight_bytes = read_once(folder)
        found = measure(options, folder)
    name, copy = copy_bandwidth() if options.backend == "cuda" else ("", None)
    print_table(found, weight_bytes, copy)
    facts = {"gpu": short_name(name)} if name else {}
    model = options.model if shape else folder.name.removesuffix(".gguf")
    publish(
        f"startup-{facts.get('gpu', options.backend)}-{model}".lower(),
        {
            **facts, "model": options.model if shape else folder.name, "backend": options.backend,
            "weight_bytes": weight_bytes, "copy_bandwidth": copy,
            "ceiling_s": weight_bytes / copy if copy else None, **found,
        },
        save=options.save,
    )  # fmt: skip


if __name__ == "__main__":
    main()
