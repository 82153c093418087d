"""The pages that come from the code are what the code says."""

from __future__ import annotations

import pytest

import pages
from api_page import markdown
from monotape.server.playground.agents import agents


@pytest.mark.parametrize(
    "name",
    ["api.md", *sorted(f"agents/{path.name}" for path in pages.AGENTS.glob("*.md") if path.stem in agents())],
)
def test_a_generated_page_is_current(name: str) -> None:
    """Fails after a change of routes, fields or agents: run `make api-docs` and review the difference."""
    wanted = {str(path.relative_to(pages.ROOT / "docs")): text for path, text in pages.pages()}
    assert (pages.ROOT / "docs" / name).read_text("utf-8") == wanted[name]


def test_every_agent_page_is_among_them() -> None:
    names = {path.stem for path, _ in pages.pages()}
    assert {"api", "codex", "claude-code", "aider", "opencode", "cline"} <= names


def test_settings_stand_between_their_marks() -> None:
    agent = agents()["codex"]
    text = f"# Before\n\n{pages.BEGIN}yesterday{pages.END}\n\nafter\n"
    made = pages.with_settings(text, agent)
    assert made.startswith("# Before\n") and made.endswith("\n\nafter\n")
    assert "yesterday" not in made and 'wire_api = "responses"' in made
    assert pages.with_settings(made, agent) == made
    with pytest.raises(SystemExit, match=r"codex\.md has no place"):
        pages.with_settings("# Nothing\n", agent)


DOCUMENT = {
    "paths": {
        "/v1/things/{name}": {
            "get": {
                "summary": "One | thing.",
                "parameters": [{"name": "name", "in": "path", "schema": {"type": "string", "minLength": 1}}],
                "responses": {"200": {"description": "It."}, "404": {"$ref": "#/components/responses/Gone"}},
            }
        },
        "/v1/things": {
            "post": {
                "summary": "Make one.",
                "requestBody": {
                    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Thing"}}}
                },
                "responses": {
                    "200": {
                        "description": "Made.",
                        "content": {"text/event-stream": {"schema": {"type": "string"}}},
                    },
                    "404": {"$ref": "#/components/responses/Gone"},
                },
            }
        },
    },
    "components": {
        "responses": {"Gone": {"description": "No such thing."}},
        "schemas": {
            "Thing": {
                "type": "object",
                "required": ["size"],
                "properties": {
                    "size": {"type": "integer", "minimum": 1, "maximum": 9},
                    "seed": {
                        "anyOf": [{"type": "integer", "minimum": -(2**63)}, {"type": "null"}],
                        "default": None,
                    },
                    "kind": {"enum": ["a", "b"], "default": "a"},
                    "parts": {
                        "type": "array",
                        "items": {"$ref": "#/components/schemas/Thing"},
                        "maxItems": 7,
                    },
                },
            }
        },
    },
}


def test_a_document_becomes_tables() -> None:
    text = markdown(DOCUMENT)
    assert "| [GET /v1/things/{name}](#get-v1thingsname) | One \\| thing. |" in text
    assert "| `name` | string, at least 1 |" in text
    assert "| `size` | integer, 1 to 9 | required |" in text
    assert "| `seed` | integer |  |" in text
    assert '| `kind` | `"a"`, `"b"` | default `"a"` |' in text
    assert "| `parts` | list of [Thing](#thing), at most 7 |" in text
    assert text.count("No such thing.") == 1  # said once for every route
    assert "| 200 | text/event-stream: string | Made. |" in text
