"""Loads a model and answers with one token, and says when each phase ended. Run by bench/startup.py, once a process."""

from __future__ import annotations

import json
import sys
import time


def main() -> None:
    folder, backend, context, started_ns = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    model = sys.argv[5]
    phases: list[tuple[str, float]] = []

    def phase(name: str) -> None:
        phases.append((name, (time.time_ns() - started_ns) / 1e9))

    phase("interpreter")
    from monotape.engine.config import EngineConfig
    from monotape.engine.wake import wake

    config = EngineConfig(model=folder, backend=backend, max_model_len=context, progress=False)
    wake(config)  # as the command line does, before it imports the rest
    from monotape.engine.llm import LLM
    from monotape.engine.sampling_params import SamplingParams
    from monotape.engine.startup import load

    phase("imports")
    loaded = load(config, phase)
    llm = LLM.from_parts(loaded.backend, context=loaded.context, config=config)
    phase("engine")
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    stream = llm.stream({"prompt_token_ids": [1, 2, 3, 4, 5, 6, 7, 8]}, params)
    next(iter(stream))
    phase("first token")
    stream.close()
    from pathlib import Path

    from measuring import kernel_facts
    from shapes import SHAPES

    facts = kernel_facts(llm.backend, model, None if model in SHAPES else Path(folder), ceiling=False)
    llm.close()
    print(json.dumps({"phases": phases, "kernels": facts}))


main()
