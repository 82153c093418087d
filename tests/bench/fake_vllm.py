"""Stands in for the vllm package in a peer's process: what is called of its interface, with a log of the calls."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

__version__ = "9.9.9"
MODE = os.environ.get("FAKE_VLLM", "")


class SamplingParams:
    def __init__(self, **settings: Any) -> None:
        self.settings = settings


class LLM:
    def __init__(self, model: str, **settings: Any) -> None:
        if MODE == "no memory":
            raise RuntimeError("not enough memory for the KV cache")
        self._log({"config": json.loads(Path(model, "config.json").read_text()), "settings": settings})

    def generate(self, prompts: list[dict[str, Any]], params: SamplingParams, use_tqdm: bool) -> list[Any]:
        (prompt,) = prompts
        tokens = params.settings["max_tokens"]
        self._log({"prompt": prompt["prompt_token_ids"], **params.settings})
        if MODE == "dies in decode" and tokens > 1:
            print('File "/opt/some/where/worker.py": CUDA error', file=sys.stderr)
            os._exit(7)
        if MODE == "hangs in decode" and tokens > 1:
            time.sleep(3600)
        time.sleep(1e-4 * tokens)
        made = tokens - 1 if MODE == "stops early" else tokens
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[1] * made)])]

    def _log(self, entry: dict[str, Any]) -> None:
        with open(os.environ["FAKE_VLLM_LOG"], "a") as file:
            file.write(json.dumps(entry) + "\n")
