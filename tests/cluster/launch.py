"""Starts replicas with another source of models than the real one."""

from __future__ import annotations

import json
import signal
import sys
import threading

import ray

from monotape.cluster import deploying
from monotape.cluster.config import DeployConfig
from monotape.engine.config import EngineConfig
from monotape.errors import MonotapeError
from monotape.server.config import ServerConfig


def main() -> int:
    source, plan, server, engine = sys.argv[1], *map(json.loads, sys.argv[2:5])
    settings = {name: tuple(value) if isinstance(value, list) else value for name, value in server.items()}
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    config = DeployConfig(**plan)
    deploying.connect(config.address)
    print(f"Ray at {ray.get_runtime_context().gcs_address}", file=sys.stderr)
    try:
        address = deploying.deploy(
            config, ServerConfig(**settings), EngineConfig(progress=False, **engine), source
        )
        print(f"Listening at {address}; all replicas", file=sys.stderr)
        print(f"{engine['model']} is ready at {address}", file=sys.stderr, flush=True)
        if config.address is None:
            ended.wait()
    except MonotapeError as error:
        print(f"monotape: {error}", file=sys.stderr)
        return 2
    finally:
        if config.address is None:
            deploying.shut_down()
    return 0


if __name__ == "__main__":
    sys.exit(main())
