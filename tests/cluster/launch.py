"""`monotape deploy` with another source of models than the real one, and its settings as JSON."""

from __future__ import annotations

import argparse
import json
import sys

from monotape.cli.deploy import run
from monotape.cluster import deploying
from monotape.cluster.config import DeployConfig
from monotape.engine.config import EngineConfig
from monotape.errors import MonotapeError
from monotape.server.config import ServerConfig


def main() -> int:
    parser = argparse.ArgumentParser()
    for name in ("plan", "server", "engine"):
        parser.add_argument(name, type=json.loads)
    parser.add_argument("--address")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    settings = {
        name: tuple(value) if isinstance(value, list) else value for name, value in options.server.items()
    }
    plan = DeployConfig(address=options.address, **options.plan)
    config, engine = (
        ServerConfig(port=options.port, **settings),
        EngineConfig(progress=False, **options.engine),
    )
    try:
        run(plan, lambda: deploying.deploy(plan, config, engine, "server.scripted"))
    except MonotapeError as error:
        print(f"monotape: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
