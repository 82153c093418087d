"""Measure what a client sees of a server: `monotape bench serve --url URL`.

Any server with OpenAI's chat API will do: Monotape, vLLM, llama.cpp. One request at a time, greedy, streamed. Where
the server reports the engine's own speed, the share of it that reaches the client is printed too.
"""

from __future__ import annotations

import argparse
import json
import sys

from monotape.cli.bench_serve import Settings, measure, summary, table
from monotape.cli.connect import DEFAULT_URL
from monotape.cli.endpoint import Endpoint
from monotape.cli.options import integer
from monotape.config import api_key
from monotape.errors import UsageError

BOUNDS = {"requests": (1, 10_000), "max_tokens": (2, 1_000_000), "prompt_words": (1, 1_000_000)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", choices=("serve",), metavar="serve", help="what is measured: a server")
    parser.add_argument("--url", default=DEFAULT_URL, help=f"where the server is (default: {DEFAULT_URL})")
    parser.add_argument(
        "--model", "-m", metavar="NAME", help="the model's name (default: the server's first)"
    )
    parser.add_argument("--api-key", metavar="KEY", help="the server's key (default: MONOTAPE_API_KEY)")
    parser.add_argument(
        "--requests", type=integer, default=5, metavar="N", help="how many are counted, after one that is not"
    )
    parser.add_argument("--max-tokens", type=integer, default=128, metavar="N", help="length of each answer")
    parser.add_argument(
        "--prompt-words", type=integer, default=64, metavar="N",
        help="length of each prompt in words; each begins differently, so that no cache answers it",
    )  # fmt: skip
    parser.add_argument(
        "--same-prompt", action="store_true", help="repeat one prompt, to measure prefix caches"
    )
    parser.add_argument("--json", action="store_true", help="print one object with every request")


def main(options: argparse.Namespace) -> int:
    for name, (low, high) in BOUNDS.items():
        if not low <= getattr(options, name) <= high:
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{flag} is {getattr(options, name)}.", f"It must be from {low} to {high}.")
    endpoint = Endpoint(options.url, options.api_key or api_key())
    model = endpoint.model(options.model)
    settings = Settings(options.max_tokens, options.prompt_words, fresh=not options.same_prompt)
    measured = []
    for number in range(options.requests + 1):
        run = measure(endpoint, model.id, settings, number)
        if number > 0:  # the first one wakes everything up
            measured.append(run)
        if sys.stderr.isatty():
            print(f"\r{number}/{options.requests}", end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print("\r", end="", file=sys.stderr)
    found = summary(endpoint.url, model.id, settings, measured)
    print(json.dumps(found) if options.json else table(found))
    return 0
