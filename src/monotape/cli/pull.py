"""Download a model, so that later runs need no network."""

from __future__ import annotations

import argparse
import json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="a name, or a Hugging Face id like org/name or org/name:file.gguf"
    )
    parser.add_argument("--json", action="store_true", help="print one object with the path")


def main(options: argparse.Namespace) -> int:
    from monotape.weights.hub import pull

    path = pull(options.model)
    print(json.dumps({"model": options.model, "path": str(path)}) if options.json else path)
    return 0
