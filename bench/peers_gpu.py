"""The same shapes through what PyTorch offers: hand-written and compiled, and Hugging Face. One process each."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from measuring import prompt_of
from monotape.models.registry import spec_from_config
from peer_task import Answer, Stopwatch, Task
from shapes import SHAPES, config_json
from torch_model import TorchDecoder

DTYPE = torch.bfloat16


def _finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _tune(on: bool) -> None:
    inductor: Any = importlib.import_module("torch._inductor.config")
    inductor.coordinate_descent_tuning = on


class Captured:
    """A step of a model as one CUDA graph, which takes a token and a position as the step does."""

    def __init__(self, step: Callable[..., torch.Tensor], device: str) -> None:
        self._token, self._position = (torch.zeros(1, dtype=torch.long, device=device) for _ in range(2))
        aside: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):  # compiles, and warms up what must not be captured
                step(self._token, self._position)
        torch.cuda.current_stream().wait_stream(aside)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._next = step(self._token, self._position)

    def __call__(self, token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        self._token.copy_(token)
        self._position.copy_(position)
        self._graph.replay()
        return self._next


class Torch:
    """The decoder of torch_model.py. `compiled`: each step under torch.compile with CUDA graphs ("reduce-overhead"),
    compiled anew for every context; and the prompt, compiled once for all lengths. `layers`: not the whole step is
    compiled but a layer, once for all of them, which takes a fraction of the time; the graph is captured here.
    """

    def __init__(self, task: Task, compiled: bool, sdpa: bool = False, layers: bool = False) -> None:
        self._task, self._compiled, self._layers = task, compiled, layers
        self._spec = spec_from_config(SHAPES[task.shape])
        self._model = TorchDecoder(self._spec, 1, DTYPE, task.device, sdpa=sdpa)
        self._prefill: Any = None

    def _step(self) -> Any:
        if not self._compiled:
            return self._model
        torch.compiler.reset()
        _tune(True)  # finds better kernels for products with a single row
        if self._layers:
            self._model.run_layer = torch.compile(self._model.layer, fullgraph=True)
            return Captured(self._model, self._task.device) if self._task.device == "cuda" else self._model
        return torch.compile(self._model, mode="reduce-overhead", fullgraph=True)

    def _prompt(self) -> Any:
        """Its products are cuBLAS's either way, and a graph for each length would replace few launches beside them."""
        if not self._compiled:
            return self._model.prefill
        if self._prefill is None:
            torch.compiler.reset()
            _tune(False)
            if self._layers:
                self._model.run_rows = torch.compile(self._model.layer_rows, dynamic=True)
            self._prefill = (
                self._model.prefill if self._layers else torch.compile(self._model.prefill, dynamic=True)
            )
        return self._prefill

    @torch.no_grad()
    def decode(self, context: int) -> list[float]:
        """Tokens per second of each request, one step after another."""
        task, speeds = self._task, []
        self._model.set_length(context + task.tokens)
        step = self._step()
        for _ in range(task.requests + 2):  # two to compile and to capture the graph
            token = torch.tensor([5], device=task.device)
            position = torch.tensor([context], device=task.device)
            _finish(task.device)
            watch = Stopwatch()
            for _ in range(task.tokens):
                token = step(token, position).clone()
                position += 1
            _finish(task.device)
            speeds.append(task.tokens / watch.seconds())
        return speeds[2:]

    @torch.no_grad()
    def first_token(self, length: int) -> list[float]:
        """Seconds from ids on the host to the first token on the host."""
        task, times = self._task, []
        self._model.set_length(max(task.prompts))
        prefill = self._prompt()
        for run in range(task.requests + 3):
            ids = prompt_of(length, self._spec.vocab, run)
            _finish(task.device)
            watch = Stopwatch()
            tokens = torch.tensor(ids, device=task.device)
            int(prefill(tokens))
            times.append(watch.seconds())
        return times[3:]


def torch_measure(
    compiled: bool, sdpa: bool = False, layers: bool = False
) -> Callable[[Task, Answer, Path], None]:
    def measure(task: Task, answer: Answer, path: Path) -> None:
        watch = Stopwatch()
        engine = Torch(task, compiled, sdpa, layers)
        answer.version, answer.start_s = f"torch {torch.__version__}", watch.seconds()
        graphs = (
            "a layer at a time, one CUDA graph a step" if layers else "steps by reduce-overhead (CUDA graphs)"
        )
        answer.settings = f"torch.compile: {graphs}, prompts with dynamic lengths" if compiled else "eager"
        run_all(engine.decode, engine.first_token, task, answer, path)

    return measure


def run_all(
    decode: Callable[[int], list[float]], first_token: Callable[[int], list[float]],
    task: Task, answer: Answer, path: Path,
) -> None:  # fmt: skip
    """Every length, and what was found is kept after each."""
    for context in task.contexts:
        answer.tokens_per_second[context] = decode(context)
        answer.keep(path)
    for prompt in task.prompts:
        answer.first_token_s[prompt] = first_token(prompt)
        answer.keep(path)


class Transformers:
    """`generate`, with its own default cache or the one named."""

    def __init__(self, task: Task, cache: str | None) -> None:
        import transformers

        self._library: Any = transformers
        self._library.utils.logging.set_verbosity_error()
        self.version = f"transformers {transformers.__version__}, torch {torch.__version__}"
        self._task, self._settings = task, {"cache_implementation": cache} if cache else {}
        with torch.device(task.device):
            self._model = self._library.AutoModelForCausalLM.from_config(
                _config(self._library, task.shape), dtype=DTYPE
            ).eval()

    @torch.no_grad()
    def _seconds(self, length: int, tokens: int, seed: int = 0) -> float:
        task = self._task
        ids = [prompt_of(length, SHAPES[task.shape]["vocab_size"], seed)]
        _finish(task.device)
        watch = Stopwatch()
        prompt = torch.tensor(ids, device=task.device)
        self._model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, min_new_tokens=tokens,
            do_sample=False, pad_token_id=0, eos_token_id=None, **self._settings,
        )  # fmt: skip
        _finish(task.device)
        return watch.seconds()

    def decode(self, context: int) -> list[float]:
        """Prefill is taken out by a request of one token."""
        task = self._task
        for _ in range(2):  # warms up, and compiles where the cache makes it
            self._seconds(context, min(32, task.tokens))
        return [
            (task.tokens - 1) / (self._seconds(context, task.tokens) - self._seconds(context, 1))
            for _ in range(task.requests)
        ]

    def first_token(self, length: int) -> list[float]:
        for _ in range(2):
            self._seconds(length, 1)
        return [self._seconds(length, 1, 1 + run) for run in range(self._task.requests)]


def _config(library: Any, shape: str) -> Any:
    """The shape as transformers describes it since its fifth version."""
    fields = config_json(shape)
    kept = {
        key: value
        for key, value in fields.items()
        if key not in ("architectures", "rope_theta", "torch_dtype")
    }
    rope = {"rope_type": "default", "rope_theta": fields["rope_theta"]}
    return library.AutoConfig.for_model(**kept, rope_parameters=rope, dtype="bfloat16")


def transformers_measure(cache: str | None) -> Callable[[Task, Answer, Path], None]:
    def measure(task: Task, answer: Answer, path: Path) -> None:
        watch = Stopwatch()
        engine = Transformers(task, cache)
        answer.version, answer.start_s = engine.version, watch.seconds()
        answer.settings = f"generate, {cache or 'default'} cache"
        run_all(engine.decode, engine.first_token, task, answer, path)

    return measure


PEERS: dict[str, Callable[[Task, Answer, Path], None]] = {
    "torch-compile": torch_measure(compiled=True),
    "torch-compile-layer": torch_measure(compiled=True, layers=True),
    "torch-compile-sdpa": torch_measure(compiled=True, sdpa=True),
    "torch-eager": torch_measure(compiled=False),
    "transformers": transformers_measure(None),
    "transformers-static": transformers_measure("static"),
}
