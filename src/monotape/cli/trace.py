"""Record where a few tokens' time goes on the GPU: a trace for Perfetto, and a table of stages."""

from __future__ import annotations

import argparse
from pathlib import Path

from monotape.cli.options import integer
from monotape.errors import BackendUnavailable, UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a name, a Hugging Face id, a folder or a GGUF file")
    parser.add_argument(
        "--tokens", type=integer, default=4, metavar="N", help="tokens to record (default: 4)"
    )
    parser.add_argument(
        "--context",
        type=integer,
        default=32,
        metavar="N",
        help="length of the prompt before them (default: 32)",
    )
    parser.add_argument("--dtype", default="auto", metavar="TYPE", help="weights in memory, as in run")
    parser.add_argument(
        "--out", default="trace.json", metavar="FILE", help="opens in ui.perfetto.dev (default: trace.json)"
    )


def main(options: argparse.Namespace) -> int:
    if options.tokens < 1 or options.context < 1:
        raise UsageError(
            "A trace needs at least one token of prompt and one to record.", "Give positive numbers."
        )
    from monotape.backends.cuda.bandwidth import known_bandwidth
    from monotape.backends.cuda.trace import Traced, table, write_chrome
    from monotape.engine.config import EngineConfig
    from monotape.engine.startup import load

    length = options.context + options.tokens + 1
    config = EngineConfig(model=options.model, backend="cuda", dtype=options.dtype, max_model_len=length)
    try:
        backend = load(config).backend
    except BackendUnavailable as error:
        if "--backend" not in error.hint:  # what is missing can be installed
            raise
        raise BackendUnavailable(  # the hint is another backend, which is not recorded
            error.message,
            "Only a Hopper GPU's kernel is recorded; `monotape run --stats` tells any backend's speed.",
        ) from error
    assert isinstance(backend, Traced)
    vocab = backend.spec.vocab
    prompt = [1 + 7919 * number % (vocab - 1) for number in range(options.context)]
    trace = backend.trace(prompt, options.tokens)
    with Path(options.out).open("w", encoding="utf-8") as file:
        write_chrome(trace, file)
    bandwidth = known_bandwidth()
    print(table(trace, bandwidth))
    print(f"\n{options.tokens} tokens after {options.context}; the ceiling is {bandwidth / 1e9:,.0f} GB/s")
    print(f"{options.out}: open it at ui.perfetto.dev")
    backend.close()
    return 0
