"""Print what an agent needs to work with a running server.

The model's name and the length of its context are asked of the server, so that what is printed can be pasted as it
is. Without a server, `--model` says what to print.
"""

from __future__ import annotations

import argparse
import json
import sys

from monotape.cli.endpoint import Endpoint
from monotape.cli.options import integer
from monotape.config import api_key
from monotape.errors import UsageError, did_you_mean
from monotape.server.playground.agents import NO_KEY, Agent, Target, agents, as_text

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_CONTEXT = 32768  # printed only when no server was asked


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("agent", metavar="AGENT", help=", ".join(agents()))
    parser.add_argument("--url", default=DEFAULT_URL, help=f"where the server is (default: {DEFAULT_URL})")
    parser.add_argument(
        "--model", "-m", metavar="NAME", help="the model's name (default: what the server says)"
    )
    parser.add_argument(
        "--api-key", metavar="KEY", help="the server's key, if it has one (default: MONOTAPE_API_KEY)"
    )
    parser.add_argument(
        "--max-model-len",
        type=integer,
        metavar="N",
        help="length of the context (default: what the server says)",
    )
    parser.add_argument("--json", action="store_true", help="print one object with every step")


ROOM_TO_ANSWER = 8192  # tokens of an answer and of the conversation, beside an agent's instructions


def main(options: argparse.Namespace) -> int:
    agent = _agent(options.agent)
    target = _target(options)
    if options.json:
        steps = [
            {"text": step.text, "file": step.file, "language": step.language, "content": step.content(target)}
            for step in agent.steps
        ]
        print(json.dumps({"agent": agent.id, "url": target.url, "steps": steps, "notes": list(agent.notes)}))
        return 0
    print(as_text(agent, target))
    if agent.instructions is not None and target.context < agent.instructions + ROOM_TO_ANSWER:
        print(
            f"note: {agent.title} sends about {agent.instructions} tokens before your first word, and the context is "
            f"{target.context}. Serve with a larger --max-model-len, or a model that allows one.",
            file=sys.stderr,
        )
    return 0


def _agent(name: str) -> Agent:
    known = agents()
    if name not in known:
        raise UsageError(
            f"No agent '{name}' is described.",
            f"{did_you_mean(name, known)}There are: {', '.join(known)}.",
        )
    return known[name]


def _target(options: argparse.Namespace) -> Target:
    """Where to point the agent: what the server says of itself, or what the user did."""
    key = options.api_key or api_key()
    endpoint = Endpoint(options.url, key)
    name, context = options.model, options.max_model_len
    if context is not None and context < 1:
        raise UsageError(f"--max-model-len is {context}.", "It must be at least 1.")
    if name is None:
        model = endpoint.model(None)
        name, context = model.id, context or model.context
    return Target(endpoint.url, name, context or DEFAULT_CONTEXT, key or NO_KEY)
