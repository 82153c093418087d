"""llama.cpp for bench/stored.py, in the Python of an environment where llama-cpp-python was compiled for this CPU.

Loads a file. Then each line of standard input is a request, greedy; the answer is a line of JSON, the seconds of each
token.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import pairwise


def main() -> None:
    import llama_cpp  # type: ignore[import-not-found]  # not of our environment

    path, threads, context, tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    prompt = json.loads(sys.argv[5])
    model = llama_cpp.Llama(
        path, n_ctx=context, n_threads=threads, n_threads_batch=threads, n_batch=512, verbose=False
    )
    facts = {
        "version": llama_cpp.__version__,
        "system": llama_cpp.llama_print_system_info().decode().strip(),
    }
    print(json.dumps(facts), flush=True)
    for _ in sys.stdin:
        model.reset()
        model.eval(prompt)
        times = []
        for _ in range(tokens):
            model.eval([model.sample(temp=0.0)])
            times.append(time.perf_counter())
        gaps = [later - earlier for earlier, later in pairwise(times)]
        print(json.dumps(gaps), flush=True)


if __name__ == "__main__":
    main()
