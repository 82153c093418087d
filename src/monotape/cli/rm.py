"""Remove models from this machine: from the hub's cache and from Monotape's own."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", nargs="+", help="names as `monotape list` shows them")


def main(options: argparse.Namespace) -> int:
    from monotape.cli.list import size
    from monotape.errors import UsageError
    from monotape.weights import embedded
    from monotape.weights.paths import local_path
    from monotape.weights.removal import remove

    for name in options.model:
        if local_path(name) is not None:
            raise UsageError(
                f"{name} is a file or folder of yours.", "Only what is in the cache is removed here."
            )
        if name == embedded.NAME:
            raise UsageError(
                "The embedded model is a part of Monotape itself.", "`pip uninstall monotape` removes both."
            )
        for model in remove(name):
            print(f"removed {model.name}, {size(model.bytes)}")
    return 0
