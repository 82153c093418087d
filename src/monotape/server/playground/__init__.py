"""The page at `GET /`: its source files put together into one that needs nothing else, not even a build step."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).parent
VENDOR = FOLDER / "vendor"
#: In the order in which they need each other.
SCRIPTS = (
    "store.js", "wire.js", "figures.js", "markup.js", "markdown.js", "instruments.js", "settings.js",
    "conversations.js", "attach.js", "scroll.js", "message.js", "chat.js", "export.js", "list.js", "race.js",
    "timeline.js", "context.js", "connect.js", "theme.js", "main.js",
)  # fmt: skip


@functools.cache
def page() -> str:
    """The whole page. Its own policy lets the browser run these scripts and speak to this server, and nothing else.

    Trusted types leave DOMPurify as the only way from a string to elements, whatever a script here does by mistake.
    """
    style = _read("style.css") + "\n" + _read("markdown.css")
    libraries = _inline("\n;\n".join(vendored()))
    script = _inline("\n".join(_read(name) for name in SCRIPTS))
    early = _inline(_read("early.js"))
    agents = _read("agents.json").replace("<", "\\u003c")
    hashes = " ".join(map(_hash, (early, libraries, script)))
    policy = (
        f"default-src 'none'; script-src {hashes}; style-src {_hash(style)}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; "
        "trusted-types dompurify"
    )
    parts = {
        "policy": policy, "style": style, "early": early, "agents": agents, "libraries": libraries,
        "script": script,
    }  # fmt: skip
    return re.sub(r"<!--(\w+)-->", lambda found: parts[found[1]], _read("page.html"))


def vendored() -> Iterator[str]:
    """The libraries of vendor/vendored.json, ready to run one after another as plain scripts.

    highlight.js offers its core alone only as a module; what it exports becomes the global that its languages expect.
    """
    for package in json.loads((VENDOR / "vendored.json").read_text("utf-8"))["packages"]:
        for script in package["scripts"]:
            text = (VENDOR / package["folder"] / script["path"]).read_text("utf-8")
            text = re.sub(r"^//# sourceMappingURL=.*$", "", text, flags=re.MULTILINE)
            yield re.sub(r"\bexport\{(\w+) as default\};?\s*$", r"globalThis.hljs=\1;", text).strip()


def _read(name: str) -> str:
    return (FOLDER / name).read_text("utf-8").strip()


def _inline(script: str) -> str:
    """The script without what an HTML parser would take for its end; in strings and patterns it means the same."""
    return (
        script.replace("<!--", "\\x3c!--").replace("</script", "<\\/script").replace("<script", "\\x3cscript")
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
