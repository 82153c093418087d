"""How each agent is pointed at a server: one description for `monotape connect`, the playground and the docs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("agents.json")
#: What stands for a key where a server needs none: every client insists on having some text there.
NO_KEY = "monotape"


@dataclass(frozen=True, slots=True)
class Target:
    """The server that an agent is pointed at."""

    url: str  # without /v1
    model: str
    context: int
    key: str = NO_KEY

    @property
    def output(self) -> int:
        """The longest answer an agent should ask for: a quarter of the context leaves the rest for the work."""
        return max(1, self.context // 4)


@dataclass(frozen=True, slots=True)
class Step:
    """Something to do: a sentence, and a text to put into a file or a shell."""

    text: str
    file: str | None
    language: str
    lines: tuple[str, ...]

    def content(self, target: Target) -> str:
        text = "\n".join(self.lines)
        for name in ("url", "model", "context", "key", "output"):
            text = text.replace("{{" + name + "}}", str(getattr(target, name)))
        return text


@dataclass(frozen=True, slots=True)
class Agent:
    """A program that speaks to a server, and what its user has to do once."""

    id: str
    title: str
    endpoint: str
    summary: str
    steps: tuple[Step, ...]
    notes: tuple[str, ...]
    instructions: int | None  # tokens it was seen to send before the first word of its user


def agents() -> dict[str, Agent]:
    """Every agent that is described, by id, in the order of agents.json."""
    found = {}
    for entry in json.loads(SOURCE.read_text("utf-8"))["agents"]:
        steps = tuple(
            Step(step["text"], step.get("file"), step["language"], tuple(step["lines"]))
            for step in entry["steps"]
        )
        found[entry["id"]] = Agent(
            entry["id"],
            entry["title"],
            entry["endpoint"],
            entry["summary"],
            steps,
            tuple(entry["notes"]),
            entry.get("instructions"),
        )
    return found


def as_text(agent: Agent, target: Target) -> str:
    """The settings as `monotape connect` prints them; comments say what to do, so a shell can take it whole."""
    parts = [f"# {agent.title}: {agent.summary} {target.url}{agent.endpoint}"]
    for number, step in enumerate(agent.steps, start=1):
        place = f" In {step.file}:" if step.file else ""
        parts.append(f"\n# {number}. {step.text}{place}\n{step.content(target)}")
    parts += [f"\n# {note}" for note in agent.notes]
    return "\n".join(parts)


def as_markdown(agent: Agent, target: Target) -> str:
    """The same for a page of the documentation."""
    parts = []
    for number, step in enumerate(agent.steps, start=1):
        place = f" In `{step.file}`:" if step.file else ""
        parts.append(f"{number}. {step.text}{place}\n\n```{step.language}\n{step.content(target)}\n```")
    parts += list(agent.notes)
    return "\n\n".join(parts) + "\n"
