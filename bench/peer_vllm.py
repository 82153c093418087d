"""vLLM, any version that can be imported: random weights of a shape, one request, no tokenizer, no network."""

from __future__ import annotations

import importlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from measuring import prompt_of
from peer_task import Answer, Stopwatch, Task
from shapes import config_json

#: The engine in this process, which spares it a socket; nothing is sent anywhere or compiled beyond what it must.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_LOGGING_LEVEL": "ERROR",
}  # fmt: skip
SETTINGS: dict[str, Any] = {
    "load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16", "max_num_seqs": 1,
    "gpu_memory_utilization": 0.85, "enable_prefix_caching": False, "enforce_eager": False,
    "disable_log_stats": True,
}  # fmt: skip
#: How each of our stored formats is asked for: fields of config.json, and settings.
QUANTISED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fp8-channel": ({}, {"quantization": "fp8"}),
    "int4-g128": (
        {
            "quantization_config": {
                "quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True,
                "modules_to_not_convert": ["lm_head"],
            }
        },
        {"dtype": "float16"},
    ),
}  # fmt: skip
SAID = "CUDA graphs, prefix caching off, one request, engine in the caller's process"


class Vllm:
    """An engine, and the seconds that a request takes."""

    def __init__(self, task: Task) -> None:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        self._library: Any = importlib.import_module("vllm")
        self.version = str(getattr(self._library, "__version__", "unknown"))
        self._vocab = config_json(task.shape)["vocab_size"]
        fields, settings = QUANTISED[task.stored] if task.stored else ({}, {})
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps({**config_json(task.shape), **fields}))
            length = task.most_positions + 16
            self._engine = self._library.LLM(model=folder, max_model_len=length, **{**SETTINGS, **settings})

    def seconds(self, length: int, tokens: int, seed: int) -> float:
        """From the call to the last of the tokens, after a prompt that differs with the seed."""
        params = self._library.SamplingParams(
            temperature=0.0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True, detokenize=False
        )
        prompt = {"prompt_token_ids": list(prompt_of(length, self._vocab, seed))}
        watch = Stopwatch()
        outputs = self._engine.generate([prompt], params, use_tqdm=False)
        taken = watch.seconds()
        made = len(outputs[0].outputs[0].token_ids)
        assert made == tokens, f"vLLM made {made} of {tokens} tokens"
        return taken


def measure(task: Task, answer: Answer, path: Path) -> None:
    watch = Stopwatch()
    engine = Vllm(task)
    answer.version, answer.settings, answer.start_s = engine.version, SAID, watch.seconds()
    answer.keep(path)
    for prompt in task.prompts:
        for warming in (-2, -1):
            engine.seconds(prompt, 1, warming)
        answer.first_token_s[prompt] = [engine.seconds(prompt, 1, run) for run in range(task.requests)]
        answer.keep(path)
    for context in task.contexts:
        for _ in range(2):
            engine.seconds(context, task.tokens, 0)
        answer.tokens_per_second[context] = [
            # The time to the first token is taken out by a request of one.
            (task.tokens - 1) / (engine.seconds(context, task.tokens, 0) - engine.seconds(context, 1, 0))
            for _ in range(task.requests)
        ]
        answer.keep(path)
