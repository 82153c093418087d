"""List the models that are on this machine, with their sizes."""

from __future__ import annotations

import argparse
import json
import sys
import time


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--json", action="store_true", help="print one list of objects")
    shown.add_argument("--names", action="store_true", help="print names alone, one a line")


def main(options: argparse.Namespace) -> int:
    from monotape.weights.cache import cached_models
    from monotape.weights.summary import stored_summary

    models = cached_models()
    if options.json:
        rows = [
            {
                "name": model.name, "bytes": model.bytes, "fetched": int(model.fetched),
                "path": str(model.path), "complete": model.complete,
                "stored_as": stored_summary(model.path) if model.complete else "",
            }
            for model in models
        ]  # fmt: skip
        print(json.dumps(rows))
        return 0
    if options.names:
        print("".join(f"{model.name}\n" for model in models if model.complete), end="")
        return 0
    if not models:
        print(
            "Only `embedded` is here, which completes Python; `monotape pull smollm2` fetches a small one that chats.",
            file=sys.stderr,
        )
        return 0
    width = max(len(model.name) for model in models)
    print(f"{'model':<{width}}  {'size':>10}  {'fetched':<10}  stored as")
    for model in models:
        date = time.strftime("%Y-%m-%d", time.localtime(model.fetched))
        note = f"  {stored_summary(model.path)}"
        note += f"  {model.path.name}" if model.path.is_file() else ""
        note = note if model.complete else "  not whole: `monotape pull` fetches the rest"
        print(f"{model.name:<{width}}  {size(model.bytes):>10}  {date}{note}".rstrip())
    print(f"{'in all':<{width}}  {size(sum(model.bytes for model in models)):>10}")
    return 0


def size(count: int) -> str:
    """Decimal units, as disks are sold."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} B"
