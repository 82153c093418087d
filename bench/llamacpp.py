"""The same model through llama.cpp, on the same machine in the same run.

`LlamaCpp` runs llama-cpp-python, compiled for this CPU (`make llamacpp`). `decode_speeds` runs the wheel of xllamacpp,
which is built for all CPUs of an architecture.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np


class LlamaCpp:
    """A process that decodes with llama.cpp when it is told to. `python`: of the environment that has it."""

    def __init__(self, python: Path, path: Path, prompt: Sequence[int], tokens: int, threads: int) -> None:
        child = Path(__file__).parent / "llamacpp_child.py"
        settings = map(str, (path, threads, tokens, json.dumps(list(prompt))))
        # Threads that wait passively between stages would slow it down.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
        self._process = subprocess.Popen(
            [python, child, *settings], env=environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        self.facts: dict[str, str] = self._answer()

    def speed(self) -> float:
        """Tokens per second of one request, from its first token to its last."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        times = self._answer()
        return float((len(times) - 1) / (times[-1] - times[0]))

    def close(self) -> None:
        self._process.communicate()  # the end of its input ends it

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.close()
            raise SystemExit(
                f"llama.cpp ended with status {self._process.returncode}: does its Python have llama-cpp-python?"
            )
        return json.loads(line)


def write_q8_0(source: Path, target: Path) -> Path:
    """A copy of a GGUF file with every matrix in Q8_0: the bytes per weight of our own 8-bit mode."""
    from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, dequantize, quantize

    reader = GGUFReader(source)
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    skipped = {
        "general.architecture",
        "general.file_type",
        "GGUF.version",
        "GGUF.tensor_count",
        "GGUF.kv_count",
    }
    for name, field in reader.fields.items():
        if name not in skipped:
            sub_type = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=sub_type)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).reshape(tensor.shape[::-1])
        if values.ndim == 2:
            kind = GGMLQuantizationType.Q8_0
            writer.add_tensor(tensor.name, quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def decode_speeds(model: Path, prompt: Sequence[int], tokens: int, runs: int, threads: int) -> list[float]:
    """Tokens per second of each run, by llama.cpp's own clock; greedy, all cores, flash attention as it chooses."""
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(model)
    parameters.n_ctx = len(prompt) + tokens + 64
    parameters.n_parallel = 1
    parameters.cpuparams.n_threads = threads
    parameters.cpuparams_batch.n_threads = threads
    parameters.verbosity = 0
    server = xllamacpp.Server(parameters)
    request: dict[str, Any] = {
        "prompt": list(prompt), "n_predict": tokens, "temperature": 0.0, "ignore_eos": True, "cache_prompt": False,
    }  # fmt: skip
    speeds = []
    for _ in range(runs + 1):  # the first run warms up
        answer = server.handle_completions(request)
        speeds.append(float(answer["timings"]["predicted_per_second"]))
    return speeds[1:]


def q8_0_decode_speeds(
    model: Path, prompt: Sequence[int], tokens: int, runs: int, threads: int
) -> list[float]:
    """decode_speeds() on a Q8_0 copy of the model."""
    with tempfile.TemporaryDirectory() as folder:
        copy = write_q8_0(model, Path(folder) / "q8_0.gguf")
        return decode_speeds(copy, prompt, tokens, runs, threads)
