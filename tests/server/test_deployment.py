"""The files beside docs/deployment.md: the dashboard asks for metrics that exist, the unit for flags that do."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

from monotape.cli.main import build_parser
from monotape.engine.config import EngineConfig
from monotape.server.config import ServerConfig
from monotape.server.service.metrics import Metrics

DOCS = Path(__file__).parents[2] / "docs"


def exported() -> set[str]:
    """The name of every series, labels or not: HELP lines come even for what has not happened yet."""
    metrics = Metrics()
    metrics.watch(running=lambda: 0, waiting=lambda: 0, restarts=lambda: 0)
    names = set()
    for line in metrics.text().decode().splitlines():
        if found := re.match(r"# TYPE (\S+) (\w+)", line):
            suffixes = ("_bucket", "_sum", "_count") if found[2] == "histogram" else ("",)
            names |= {found[1] + suffix for suffix in suffixes}
    return names


def test_every_metric_of_the_dashboard_exists() -> None:
    dashboard = json.loads((DOCS / "deployment" / "dashboard.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked = {name for text in expressions for name in re.findall(r"\b(?:vllm:|monotape_)\w+", text)}
    assert len(asked) >= 10
    assert asked <= exported()
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_every_metric_on_the_page_exists() -> None:
    text = (DOCS / "deployment.md").read_text()
    assert set(re.findall(r"`((?:vllm:|monotape_)\w+)`", text)) <= exported()


def test_every_flag_of_the_server_exists() -> None:
    fields = {field.name for config in (ServerConfig, EngineConfig) for field in dataclasses.fields(config)}
    fields |= {name for parser in build_parser(("deploy", "plan"))[1].values() for name in parser.settings}
    texts = [(DOCS / "deployment.md").read_text(), (DOCS / "deployment" / "monotape.service").read_text()]
    texts += [path.read_text() for path in sorted((DOCS / "agents").glob("*.md"))]
    found = set()
    for text in texts:
        for flags in re.findall(r"monotape serve \S+((?: --[\w-]+(?: [^\s-]\S*)?)+)", text):
            found |= set(re.findall(r"--([\w-]+)", flags))
    found |= set(re.findall(r"`--([\w-]+)", texts[0]))
    assert {"api-key", "max-model-len", "max-queue", "allowed-hosts"} <= found
    # A switch that is on may be turned off.
    assert {flag.removeprefix("no-").replace("-", "_") for flag in found} <= fields


def test_links_between_the_pages_lead_somewhere() -> None:
    missing = []
    for path in sorted(DOCS.rglob("*.md")):
        text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
        for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
            if "://" not in link and not (path.parent / link).exists():
                missing.append(f"{path.name}: {link}")
    assert missing == []
