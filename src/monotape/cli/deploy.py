"""Serve a model with several engines behind one address, on this machine or a Ray cluster."""

from __future__ import annotations

import argparse
import dataclasses
import signal
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from monotape.cli import serve
from monotape.cli.options import integer
from monotape.errors import UsageError

if TYPE_CHECKING:
    from monotape.cluster.config import DeployConfig

#: Settings of a listener that Ray's proxies do not have.
_NOT_HERE = ("max_connections",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from monotape.cluster.config import DeployConfig

    for field in dataclasses.fields(DeployConfig):
        parser.add_argument(
            "--" + field.name.replace("_", "-"),
            default=field.default,
            type=integer if "int" in str(field.type) else str,
            metavar=field.metadata["metavar"],
            help=field.metadata["help"],
        )
    serve.add_arguments(parser)


def main(options: argparse.Namespace) -> int:
    try:
        from monotape.cluster import deploying
    except ImportError as error:
        raise UsageError(
            f"Replicas need the package '{(error.name or 'ray').partition('.')[0]}'.",
            "pip install 'monotape[cluster]'",
        ) from None
    from monotape.cluster.config import DeployConfig

    options = serve.with_file(options, "monotape deploy", add_arguments)
    for name in _NOT_HERE:
        if getattr(options, name) is not None:
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{flag} cannot be set here: Ray's proxies listen.", "Leave it out.")
    config, engine = serve.configurations(options)
    plan = DeployConfig(
        **{field.name: getattr(options, field.name) for field in dataclasses.fields(DeployConfig)}
    )
    run(plan, lambda: deploying.deploy(plan, config, engine))
    return 0


def run(plan: DeployConfig, deploy: Callable[[], str]) -> None:
    """Deploys and, where Ray was started for it, waits until a signal ends both."""
    from monotape.cluster import deploying

    deploying.connect(plan.address)
    try:
        print(deploy(), file=sys.stderr, flush=True)
        if plan.address is None:
            _wait_for_signal()
    finally:
        if plan.address is None:
            deploying.shut_down()


def _wait_for_signal() -> None:
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    ended.wait()
