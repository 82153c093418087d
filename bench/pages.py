"""Writes the parts of the documentation that come from the code.

    python bench/pages.py            # writes them
    python bench/pages.py --check    # fails where a page is not what the code says

docs/api.md is made from the server's OpenAPI document; the settings on each page of docs/agents/ from what
`monotape connect` prints, between two marks.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from api_page import api_page
from monotape.server.playground.agents import Agent, Target, agents, as_markdown
from report import ROOT

API = ROOT / "docs" / "api.md"
AGENTS = ROOT / "docs" / "agents"
#: What the pages assume; `monotape connect` asks the server instead.
EXAMPLE = Target("http://127.0.0.1:8000", "smollm2", 32_768)
BEGIN, END = "<!-- settings: python bench/pages.py -->\n", "<!-- end of settings -->"


def with_settings(text: str, agent: Agent) -> str:
    """A page with its settings written anew."""
    before, found, rest = text.partition(BEGIN)
    _, closed, after = rest.partition(END)
    if not found or not closed:
        raise SystemExit(
            f"docs/agents/{agent.id}.md has no place for its settings: {BEGIN.strip()} ... {END}"
        )
    return f"{before}{BEGIN}\n{as_markdown(agent, EXAMPLE)}\n{END}{after}"


def pages() -> Iterator[tuple[Path, str]]:
    """Every generated page and what it should hold."""
    yield API, api_page()
    known = agents()
    for path in sorted(AGENTS.glob("*.md")):
        if path.stem in known:
            yield path, with_settings(path.read_text("utf-8"), known[path.stem])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page is out of date")
    options = parser.parse_args()
    stale = []
    for path, text in pages():
        if path.is_file() and path.read_text("utf-8") == text:
            continue
        stale.append(str(path.relative_to(ROOT)))
        if not options.check:
            path.write_text(text, "utf-8")
    if options.check and stale:
        print(f"{', '.join(stale)}: out of date. Run `make api-docs`.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
