"""Starts a server with another source of models than the real one."""

from __future__ import annotations

import json
import logging
import sys

from monotape.engine.config import EngineConfig
from monotape.server.config import ServerConfig
from monotape.server.http.limits import Limits
from monotape.server.run import serve

if __name__ == "__main__":
    logging.basicConfig(level="INFO", format="%(levelname)s %(message)s")
    source, server, engine = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
    settings = {name: tuple(value) if isinstance(value, list) else value for name, value in server.items()}
    limits = Limits(**json.loads(sys.argv[4])) if len(sys.argv) > 4 else None
    sys.exit(serve(ServerConfig(**settings), EngineConfig(progress=False, **engine), source, limits=limits))
