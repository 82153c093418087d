"""The same model through llama.cpp (package xllamacpp), on the same machine in the same run."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np


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
