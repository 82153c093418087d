"""The page at `GET /`: its source files put together into one that needs nothing else, not even a build step."""

from __future__ import annotations

import base64
import functools
import hashlib
from pathlib import Path

FOLDER = Path(__file__).parent
#: In the order in which they need each other.
SCRIPTS = (
    "wire.js", "figures.js", "markup.js", "instruments.js", "chat.js", "race.js", "timeline.js", "context.js",
    "connect.js", "main.js",
)  # fmt: skip


@functools.cache
def page() -> str:
    """The whole page. Its own policy lets the browser run this script and speak to this server, and nothing else."""
    style = _read("style.css")
    script = "\n".join(_read(name) for name in SCRIPTS)
    agents = _read("agents.json").replace("<", "\\u003c")
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    whole = _read("page.html").replace("<!--policy-->", policy).replace("<!--style-->", style)
    return whole.replace("<!--agents-->", agents).replace("<!--script-->", script)


def _read(name: str) -> str:
    return (FOLDER / name).read_text("utf-8").strip()


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
