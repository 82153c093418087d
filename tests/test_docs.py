"""Names in the documentation exist; prose copies drift everywhere else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "monotape"
DOCUMENTS = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")
_CODE = re.compile(r"`([^`\n]+)`")
_PATH = re.compile(r"[\w./-]*(/|\.(py|h|cpp|md|json|svg|toml))")
_NAME = re.compile(r"[A-Za-z_][\w]*((\.|::)\w+)*")


def sources() -> str:
    suffixes = (".py", ".h", ".cpp", ".cu")
    paths = [path for path in PACKAGE.rglob("*") if path.suffix in suffixes]
    return "\n".join(path.read_text() for path in paths)


def exists(path: str) -> bool:
    bases = (ROOT, PACKAGE, PACKAGE / "backends", PACKAGE / "backends" / "cpu", PACKAGE / "engine")
    return any((base / path).exists() for base in bases)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_paths_in_documents_exist(document: str) -> None:
    text = re.sub(r"```.*?```", "", (ROOT / document).read_text(), flags=re.DOTALL)
    named = {code for code in _CODE.findall(text) if _PATH.fullmatch(code)}
    linked = {link for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text) if "://" not in link}
    missing = sorted(path for path in named | linked if not exists(path))
    assert not missing


@pytest.mark.parametrize("path", sorted((ROOT / "docs").rglob("*.md")), ids=lambda path: path.name)
def test_links_between_documents_lead_somewhere(path: Path) -> None:
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    linked = {link for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text) if ":" not in link}
    assert sorted(link for link in linked if not (path.parent / link).exists()) == []


@pytest.mark.parametrize("document", [*DOCUMENTS, "reports/LOG.md", "docs/performance.md"])
def test_links_within_a_document_lead_to_a_heading(document: str) -> None:
    text = (ROOT / document).read_text()
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert sorted(set(re.findall(r"\]\(#([^)]+)\)", text)) - anchors) == []


def test_names_in_the_architecture_exist() -> None:
    text, code = (ROOT / "ARCHITECTURE.md").read_text(), sources()
    words = {name for name in _CODE.findall(text) if _NAME.fullmatch(name)}
    capital_or_call = {name for name in words if re.search(r"[A-Z_]|::|\.", name)}
    assert len(capital_or_call) > 25
    missing = []
    for name in sorted(capital_or_call):
        if not all(re.search(rf"\b{re.escape(part)}\b", code) for part in re.split(r"\.|::", name)):
            missing.append(name)
    assert not missing


def test_the_test_command_of_the_readme_is_what_ci_runs() -> None:
    assert "make test" in (ROOT / "README.md").read_text()
    assert "make test" in (ROOT / ".ci" / "run").read_text()


def test_files_that_are_tracked_name_no_folder_of_one_machine() -> None:
    """The project speaks of the project alone."""
    import subprocess

    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    pattern = re.compile(r"(?<![\w.])/(home|root|work|Users)/\w")
    found = []
    for name in listed.splitlines():
        path = ROOT / name
        if path.suffix in (".py", ".md", ".toml", ".json", ".cpp", ".h", ".txt") and path != Path(__file__):
            found += [f"{name}: {match.group()}" for match in pattern.finditer(path.read_text())]
    assert not found
