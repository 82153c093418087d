"""Imports flow one way, between the parts of the package and between the rooms of its server, and never in a circle."""

from __future__ import annotations

from pathlib import Path

import pytest

from layers import Package

PACKAGE = Package(Path(__file__).parent.parent / "src" / "monotape")
_BASE = {"errors", "config"}
_MODELS = {"models", "weights", "plan", *_BASE}
_ENGINE = {"compiler", "backends", *_MODELS}
#: What each part of the package may import, itself aside. A file beside the folders is a part of its own.
PARTS: dict[str, set[str]] = {
    "errors": set(),
    "config": {"errors"},
    "plan": {*_BASE},
    "models": {"plan", *_BASE},
    "weights": {"models", "plan", "embedded", *_BASE},
    "compiler": {*_MODELS},
    "backends": {*_MODELS},
    "embedded": {"errors"},
    "training": {"embedded", *_MODELS},
    "planner": {*_MODELS},
    "engine": {*_ENGINE},
    "__init__": {"engine", "errors"},  # the public names
    "server": {"engine", "__init__", *_ENGINE},
    "cluster": {"server", "engine", *_ENGINE},
    "cli": {"cluster", "server", "engine", "planner", "__init__", *_ENGINE},
    "__main__": {"cli"},
}
#: What each room of the server may import of the others, from the start of the server down to its processes.
ROOMS: dict[str, set[str]] = {
    "run": {"app", "http", "service", "engine", "config"},
    "app": {"apis", "http", "service", "config", "api_error"},
    "apis": {"http", "conversation", "requests", "service", "engine", "playground", "api_error"},
    "http": {"service", "config", "api_error"},
    "conversation": {"requests", "service", "engine", "grammar", "api_error"},
    "requests": {"grammar", "api_error"},
    "service": {"engine", "grammar", "config", "api_error"},
    "engine": {"grammar", "frames"},
    "grammar": {"frames"},
    "playground": set(),
    "frames": set(),
    "config": set(),
    "api_error": set(),
    "__init__": set(),
}


def test_parts_import_only_from_below() -> None:
    assert list(PACKAGE.breaches(PARTS)) == []


def test_rooms_of_the_server_import_only_what_their_rules_say() -> None:
    assert list(PACKAGE.breaches(ROOMS, "server")) == []


@pytest.mark.parametrize(("folder", "rules"), [("", PARTS), ("server", ROOMS)])
def test_every_rule_is_of_a_part_that_is_there(folder: str, rules: dict[str, set[str]]) -> None:
    assert set(rules) == PACKAGE.parts(folder)
    assert set().union(*rules.values()) <= set(rules)


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Imports for type checkers and those inside functions count: they tie two files together as well."""
    assert PACKAGE.cycle() == []


# The reader of imports itself, on packages that break the rules.

RULES = {"__init__": set[str](), "__main__": {"top"}, "low": set[str](), "top": {"low"}}


@pytest.fixture
def broken(tmp_path: Path) -> Package:
    """A package without a fault, for a test to put one in."""
    for name in ("__init__", "__main__", "low/__init__", "low/a", "low/b", "top/__init__", "top/c"):
        path = tmp_path / "pack" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    return Package(tmp_path / "pack")


@pytest.mark.parametrize(
    "line",
    [
        "import pack.top.c",
        "import os, pack.top.c as c",
        "from pack.top import c",
        "from pack.top.c import name",
        "from pack import top",
        "from ..top import c",
        "from ..top.c import name",
        "from .. import top",
        "def late():\n    from pack.top import c",
        "if TYPE_CHECKING:\n    from pack.top import c",
    ],
)
def test_every_way_to_import_is_seen(broken: Package, line: str) -> None:
    (broken.root / "low" / "a.py").write_text(line)
    found = list(broken.breaches(RULES))
    assert found in (["pack.low.a imports pack.top"], ["pack.low.a imports pack.top.c"])


@pytest.mark.parametrize("line", ["from pack import version", "import pack", "from .. import version"])
def test_the_package_itself_is_a_part(broken: Package, line: str) -> None:
    (broken.root / "low" / "a.py").write_text(line)
    assert list(broken.breaches(RULES)) == ["pack.low.a imports pack"]


def test_modules_beside_the_folders_have_rules(broken: Package) -> None:
    (broken.root / "__main__.py").write_text("from pack.low import a")
    (broken.root / "stray.py").write_text("")
    assert sorted(broken.breaches(RULES)) == ["pack.__main__ imports pack.low.a", "pack.stray has no rule"]


def test_a_folder_has_rules_of_its_own(broken: Package) -> None:
    (broken.root / "low" / "a.py").write_text("from pack.low import b\nfrom pack.top import c")
    rules = {"__init__": set[str](), "a": set[str](), "b": {"a"}}
    assert list(broken.breaches(rules, "low")) == ["pack.low.a imports pack.low.b"]


@pytest.mark.parametrize(
    "back",
    [
        "import pack.low.a",
        "from . import a",
        "if TYPE_CHECKING:\n    from pack.low.a import name",
        "def late():\n    from pack.low.a import name",
    ],
)
def test_circles_are_found(broken: Package, back: str) -> None:
    (broken.root / "low" / "a.py").write_text("from pack.low.b import name")
    assert broken.cycle() == []
    (broken.root / "low" / "b.py").write_text(back)
    assert set(Package(broken.root).cycle()) == {"pack.low.a", "pack.low.b"}


def test_a_good_package_passes(broken: Package) -> None:
    (broken.root / "top" / "c.py").write_text("from pack.low import a\nfrom ..low.b import name\nimport os")
    assert list(broken.breaches(RULES)) == [] and broken.cycle() == []
