"""Serve a model with several engines behind one address, on this machine or a Ray cluster."""

from __future__ import annotations

import argparse
import dataclasses
import signal
import sys
import threading
import time

from monotape.cli import serve
from monotape.cli.options import integer
from monotape.errors import UsageError

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
    from monotape.server.service.service import served_names

    options = serve.with_file(options, "monotape deploy", add_arguments)
    for name in _NOT_HERE:
        if getattr(options, name) is not None:
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{flag} cannot be set here: Ray's proxies listen.", "Leave it out.")
    config, engine = serve.configurations(options)
    plan = DeployConfig(
        **{field.name: getattr(options, field.name) for field in dataclasses.fields(DeployConfig)}
    )
    began = time.monotonic()
    deploying.connect(plan.address)
    try:
        address = deploying.deploy(plan, config, engine)
        took, name = time.monotonic() - began, served_names(engine.model, config.served_model_name)[0]
        print(
            f"Listening at {address}; replicas of {name}: {plan.replicas}, after {took:.1f} s",
            file=sys.stderr,
        )
        print(f"{name} is ready at {address}", file=sys.stderr, flush=True)
        if plan.address is None:
            _wait_for_signal()
    finally:
        if plan.address is None:
            deploying.shut_down()
    return 0


def _wait_for_signal() -> None:
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    ended.wait()
