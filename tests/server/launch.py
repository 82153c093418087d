"""Starts a server with another source of models than the real one."""

from __future__ import annotations

import json
import sys

from monotape.engine.config import EngineConfig
from monotape.server.config import ServerConfig
from monotape.server.run import serve

if __name__ == "__main__":
    source, server, engine = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
    settings = {name: tuple(value) if isinstance(value, list) else value for name, value in server.items()}
    sys.exit(serve(ServerConfig(**settings), EngineConfig(progress=False, **engine), source))
