"""llama.cpp for bench/llamacpp.py, in the Python of an environment where llama-cpp-python was compiled for this CPU.

Loads a file. Then each line of standard input is a request, greedy; the answer is a line of JSON, when each token was
chosen. It calls the C interface, because the package's own class spends time in Python on every token.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def open_context(llama: Any, path: str, threads: int, context: int) -> Any:
    """Everything as llama.cpp chooses it, but threads and context."""
    llama.llama_backend_init()
    model = llama.llama_model_load_from_file(path.encode(), llama.llama_model_default_params())
    settings = llama.llama_context_default_params()
    settings.n_ctx, settings.n_threads, settings.n_threads_batch = context, threads, threads
    opened = llama.llama_init_from_model(model, settings)
    if not opened:
        sys.exit(f"llama.cpp cannot open {path}")
    return opened


def times_of(llama: Any, context: Any, sampler: Any, prompt: list[int], tokens: int) -> list[float]:
    """When each token of one request was chosen."""
    llama.llama_memory_clear(llama.llama_get_memory(context), True)
    ids = (llama.llama_token * len(prompt))(*prompt)
    times = []
    for _ in range(tokens):
        if llama.llama_decode(context, llama.llama_batch_get_one(ids, len(ids))) != 0:
            sys.exit("llama.cpp cannot decode")
        ids = (llama.llama_token * 1)(llama.llama_sampler_sample(sampler, context, -1))
        times.append(time.perf_counter())
    return times


def main() -> None:
    import llama_cpp  # type: ignore[import-not-found]  # not of our environment

    path, threads, tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    prompt = json.loads(sys.argv[4])
    context = open_context(llama_cpp, path, threads, len(prompt) + tokens + 16)
    sampler = llama_cpp.llama_sampler_init_greedy()
    facts = {
        "version": llama_cpp.__version__,
        "system": llama_cpp.llama_print_system_info().decode().strip(),
    }
    print(json.dumps(facts), flush=True)
    for _ in sys.stdin:
        print(json.dumps(times_of(llama_cpp, context, sampler, prompt, tokens)), flush=True)


if __name__ == "__main__":
    main()
