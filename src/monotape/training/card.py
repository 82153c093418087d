"""The model card: size, data, licences, quality and limits, from the records of the corpus and of the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from monotape.training.settings import Settings


def model_card(settings: Settings, corpus: Mapping[str, Any], result: Mapping[str, Any] | None) -> str:
    """Markdown. `result` is the run's JSON; without one the card says that the run has not ended."""
    trained = [package for package in corpus["packages"] if not package["held_out"] and package["tokens"]]
    held_out = [package for package in corpus["packages"] if package["held_out"] and package["tokens"]]
    tokens = sum(package["tokens"] for package in trained)
    lines = [
        "# A small model that completes Python",
        "",
        f"A Laneformer of {settings.layers} layers, width {settings.width}, {settings.heads} heads and {settings.ffn} "
        f"feed-forward columns, {settings.lanes} lane{'s' * (settings.lanes > 1)}, arm `{settings.arm}`, "
        f"context {settings.context} tokens. "
        "It completes Python and fills in the middle. It is no assistant: it follows no instructions "
        "and knows little of the world.",
        "",
        "## Quality",
        "",
        _quality(result),
        "",
        "## Data",
        "",
        f"{tokens / 1e6:.1f}M tokens of the Python sources of {len(trained)} packages, deduplicated, at most "
        f"{corpus['preparation']['package_bytes'] / 1e6:g} MB of text each. "
        f"Held out for validation: {', '.join(package['name'] for package in held_out)}.",
        "",
        "## Licences",
        "",
        "The weights are under the licence of Monotape (Apache-2.0). Every package that was trained on names "
        f"a permissive licence in its own metadata ({_counted(trained)}). Text that the model writes may repeat "
        "text of these packages, whose notices then apply:",
        "",
        *(
            f"- {package['name']} {package['version']}: {_one_line(package['licence'])}"
            for package in trained
        ),
        "",
    ]
    return "\n".join(lines)


def _quality(result: Mapping[str, Any] | None) -> str:
    if result is None:
        return "The run has not ended."
    found = result["validation"]
    return (
        f"{found['bits_per_byte']:.4f} bits per byte (standard error {found['standard_error']:.4f}) on "
        f"{found['bytes']:,} bytes of packages that it was not trained on, after {result['tokens'] / 1e6:.1f}M tokens, "
        f"{result['training_s']:.0f} s on one {result['device']}; commit {result['commit'][:12]}, seed "
        f"{result['settings']['seed']}."
    )


def _counted(packages: list[dict[str, Any]]) -> str:
    counts = Counter(_one_line(package["licence"]) for package in packages)
    common = counts.most_common(4)
    rest = len(packages) - sum(count for _, count in common)
    return ", ".join(
        [*(f"{name}: {count}" for name, count in common), *([f"others: {rest}"] if rest else [])]
    )


def _one_line(licence: str) -> str:
    return " ".join(licence.split())[:80]
