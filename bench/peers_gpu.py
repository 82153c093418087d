"""The same shapes through what others run: Hugging Face, hand-written PyTorch, vLLM. Decode speeds, one a request."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from measuring import prompt_of
from monotape.models.registry import spec_from_config
from monotape.models.spec import ModelSpec
from shapes import SHAPES
from torch_model import TorchDecoder


@dataclass(frozen=True, slots=True)
class Task:
    """What every engine is asked to do: so many tokens after a prompt, so often."""

    shape: str
    context: int
    tokens: int
    requests: int
    device: str

    @property
    def spec(self) -> ModelSpec:
        return spec_from_config(SHAPES[self.shape])

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16


def _finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _free() -> None:
    gc.collect()
    torch.compiler.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@torch.no_grad()
def torch_speeds(task: Task, compiled: bool, sdpa: bool = False) -> list[float]:
    """One step after another; under torch.compile with CUDA graphs ("reduce-overhead") when `compiled`."""
    inductor: Any = importlib.import_module("torch._inductor.config")
    inductor.coordinate_descent_tuning = True  # finds better kernels for products with a single row
    model = TorchDecoder(task.spec, task.context + task.tokens, task.dtype, task.device, sdpa=sdpa)
    step: Any = torch.compile(model, mode="reduce-overhead", fullgraph=True) if compiled else model
    speeds = []
    for _ in range(task.requests + 2):  # two to compile and to capture the graph
        token = torch.tensor([5], device=task.device)
        position = torch.tensor([task.context], device=task.device)
        _finish(task.device)
        start = time.perf_counter()
        for _ in range(task.tokens):
            token = step(token, position).clone()
            position += 1
        _finish(task.device)
        speeds.append(task.tokens / (time.perf_counter() - start))
    return speeds[2:]


@torch.no_grad()
def transformers_speeds(task: Task, cache: str | None) -> list[float]:
    """`generate`, with its own default cache or the one named; prefill is taken out by a request of one token."""
    import transformers

    library: Any = transformers
    library.utils.logging.set_verbosity_error()
    with torch.device(task.device):
        model = library.AutoModelForCausalLM.from_config(_config(task.shape), dtype=task.dtype).eval()
    prompt = torch.tensor([prompt_of(task.context, task.spec.vocab)], device=task.device)

    def seconds(tokens: int) -> float:
        settings: dict[str, Any] = {"cache_implementation": cache} if cache else {}
        _finish(task.device)
        start = time.perf_counter()
        model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, min_new_tokens=tokens,
            do_sample=False, pad_token_id=0, eos_token_id=None, **settings,
        )  # fmt: skip
        _finish(task.device)
        return time.perf_counter() - start

    for _ in range(2):  # warms up, and compiles where the cache makes it
        seconds(min(32, task.tokens))
    speeds = [(task.tokens - 1) / (seconds(task.tokens) - seconds(1)) for _ in range(task.requests)]
    return speeds


def vllm_speeds(task: Task) -> list[float]:
    """vLLM with dummy weights of the shape; prefill is taken out by a request of one token."""
    library: Any = importlib.import_module("vllm")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(_config(task.shape).to_dict()))
        engine = library.LLM(
            model=folder, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16",
            max_model_len=task.context + task.tokens + 16, max_num_seqs=1, gpu_memory_utilization=0.5,
            enable_prefix_caching=True,
        )  # fmt: skip
    prompt = {"prompt_token_ids": list(prompt_of(task.context, task.spec.vocab))}

    def seconds(tokens: int) -> float:
        params = library.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        engine.generate(prompt, params, use_tqdm=False)
        return time.perf_counter() - start

    for _ in range(2):
        seconds(task.tokens)
    speeds = [(task.tokens - 1) / (seconds(task.tokens) - seconds(1)) for _ in range(task.requests)]
    return speeds


def _config(shape: str) -> Any:
    """The shape as transformers describes it. Its positions are plain ones: their scaling costs no time."""
    from transformers import AutoConfig

    fields = {
        name: value
        for name, value in SHAPES[shape].items()
        if name not in ("architectures", "rope_scaling", "rope_theta", "torch_dtype")
    }
    family = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3"}[SHAPES[shape]["architectures"][0]]
    rope = {"rope_type": "default", "rope_theta": SHAPES[shape]["rope_theta"]}
    config = AutoConfig.for_model(family, **fields, rope_parameters=rope, dtype="bfloat16")
    config.architectures = SHAPES[shape]["architectures"]
    return config


PEERS: dict[str, Callable[[Task], list[float]]] = {
    "torch-compile": lambda task: torch_speeds(task, compiled=True),
    "torch-compile-sdpa": lambda task: torch_speeds(task, compiled=True, sdpa=True),
    "torch-eager": lambda task: torch_speeds(task, compiled=False),
    "transformers": lambda task: transformers_speeds(task, None),
    "transformers-static": lambda task: transformers_speeds(task, "static"),
    "vllm": vllm_speeds,
}


def speeds_of(name: str, task: Task) -> list[float]:
    """Runs one peer, and gives its memory back."""
    speeds = PEERS[name](task)
    _free()
    return speeds


def available() -> list[str]:
    return [name for name in PEERS if name != "vllm" or importlib.util.find_spec("vllm") is not None]
