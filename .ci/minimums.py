"""Prints the oldest versions that pyproject.toml allows, as constraints for pip: `name==bound` for each `name>=bound`.

    python .ci/minimums.py serve    # of the package and its extra "serve"

A requirement without a lower bound is an error: nobody has tried its first release.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?\s*(>=|==)?\s*([^,;\s]*)")


def constraints(requirements: list[str]) -> list[str]:
    """One line for every requirement but the package itself."""
    found = {}
    for requirement in requirements:
        parsed = _REQUIREMENT.match(requirement)
        assert parsed is not None, requirement
        name, sign, version = parsed.groups()
        if name == "monotape":
            continue
        if sign is None or not version:
            raise ValueError(f"pyproject.toml gives no lower bound for {requirement}.")
        found[name.lower()] = version
    return [f"{name}=={version}" for name, version in sorted(found.items())]


def main(extras: list[str]) -> None:
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    optional = project["optional-dependencies"]
    print(
        "\n".join(
            constraints([*project["dependencies"], *(one for name in extras for one in optional[name])])
        )
    )


if __name__ == "__main__":
    main(sys.argv[1:])
