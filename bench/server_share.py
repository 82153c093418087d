"""What the host adds to the first token: Python before a launch, the server before that, and after a client has left.

    python bench/server_share.py --model smollm2 --tokens 8192 --turns 20 --save

The model has no weights (bench/share_source.py) and a real tokenizer and template. Every figure is the time of one
machine's monotonic clock, from the last byte that the client gave its socket to the call that starts the job. On a
machine with other work to do, `chrt -f 1` before the command keeps that work from being measured.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from monotape.engine.config import EngineConfig
from monotape.engine.llm import LLM
from monotape.engine.sampling_params import SamplingParams
from report import ROOT, publish, spread
from share_source import CONTEXT, ClockSource, load_text

_LAUNCH = """
import sys
from monotape.engine.config import EngineConfig
from monotape.server.config import ServerConfig
from monotape.server.run import serve
sys.exit(serve(ServerConfig(port=0), EngineConfig(model=sys.argv[1], progress=False), "share_source"))
"""
_WORDS = (
    "request",
    "cache",
    "token",
    "memory",
    "worker",
    "page",
    "stage",
    "plan",
    "kernel",
    "answer",
    "prompt",
)


def engine_share(lengths: list[int], repeats: int) -> dict[str, Any]:
    """From `LLM.stream` to the start of the job, for a prompt whose KV is there but for its last token."""
    source = ClockSource(None, vocab=200_000)
    llm = LLM.from_parts(source, context=CONTEXT)
    found = {}
    for length in lengths:
        rng = random.Random(length)
        ids = [rng.randrange(300, 200_000) for _ in range(length)]
        took = []
        for _ in range(repeats + 1):
            given = {"prompt_token_ids": list(ids)}  # a list of its own, as each request brings one
            before = time.monotonic_ns()
            with llm.stream(given, SamplingParams(temperature=0, max_tokens=1)) as stream:
                took.append((source.began_ns - before) / 1e6)
                for _ in stream:
                    pass
        found[str(length)] = spread(took[1:])
    return found


def chat_share(model: str, lengths: list[int], turns: int) -> dict[str, Any]:
    """From `LLM.stream_chat` to the start of the job, for the next turn of a conversation of about so many tokens."""
    config = EngineConfig(model=model, progress=False)
    text = load_text(config)
    assert text.tokenizer is not None
    source = ClockSource(text.tokenizer, text.tokenizer.size + 64)
    found = {}
    with LLM.from_parts(
        source, context=CONTEXT, tokenizer=text.tokenizer, chat_template=text.template, config=config
    ) as llm:
        for length in lengths:
            rng, took = random.Random(length), []
            messages = conversation(rng, length)
            for _ in range(turns + 1):
                messages = [*messages, *next_turn(rng, "An answer.")]
                before = time.monotonic_ns()
                with llm.stream_chat(messages, SamplingParams(temperature=0, max_tokens=1)) as stream:
                    took.append((source.began_ns - before) / 1e6)
                    for _ in stream:
                        pass
            found[str(length)] = spread(took[1:])
    return found


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(_WORDS) for _ in range(count))


def conversation(rng: random.Random, tokens: int) -> list[dict[str, str]]:
    """Fifteen turns of about so many tokens in all, the last one the user's."""
    roles = ("user", "assistant")
    return [{"role": roles[turn % 2], "content": words(rng, tokens // 17)} for turn in range(15)]


def next_turn(rng: random.Random, answer: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": answer}, {"role": "user", "content": words(rng, 40)}]


@contextlib.contextmanager
def running(model: str) -> Iterator[http.client.HTTPConnection]:
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "bench")])
    process = subprocess.Popen(
        [sys.executable, "-c", _LAUNCH, model], stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    assert process.stderr is not None
    try:
        address = next(line.split()[-1] for line in process.stderr if " is ready at " in line)
        url = urlsplit(address.rstrip("."))
        connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=60)
        connection.connect()
        yield connection
        connection.close()
    finally:
        process.terminate()
        process.wait()


def ask(
    connection: http.client.HTTPConnection, messages: list[dict[str, str]]
) -> tuple[float, dict[str, Any]]:
    """Milliseconds from the request's last byte to the start of its job, and the answer.

    The clock is read before the last bytes are given to the socket, in one call with all of the body: after that call
    another process may have run for long.
    """
    body = json.dumps({"messages": messages, "temperature": 0}).encode()
    connection.putrequest("POST", "/v1/chat/completions")
    connection.putheader("Content-Type", "application/json")
    connection.putheader("Content-Length", str(len(body)))
    connection.endheaders()
    before = time.monotonic_ns()
    connection.send(body)
    answer: dict[str, Any] = json.loads(connection.getresponse().read())
    began = int(answer["choices"][0]["message"]["content"].split()[0])
    return (began - before) / 1e6, answer


def server_share(connection: http.client.HTTPConnection, tokens: int, turns: int) -> dict[str, Any]:
    rng = random.Random(3)
    new = [ask(connection, conversation(rng, tokens))[0] for _ in range(max(3, turns // 4))]
    messages = conversation(rng, tokens)
    _, first = ask(connection, messages)
    seen, phases = [], {"render": [], "tokenize": []}  # type: list[float], dict[str, list[float]]
    for _ in range(turns):
        messages += next_turn(rng, first["choices"][0]["message"]["content"])
        took, first = ask(connection, messages)
        seen.append(took)
        for phase in first["timings"]["phases"]:
            if phase["phase"] in phases:
                phases[phase["phase"]].append(phase["ms"])
    return {
        "prompt_tokens": first["usage"]["prompt_tokens"],
        "new_conversation_ms": spread(new),
        "next_turn_ms": spread(seen),
        **{f"next_turn_{name}_ms": spread(values) for name, values in phases.items()},
    }


def cancel_share(connection: http.client.HTTPConnection, repeats: int) -> dict[str, Any]:
    """From the client's close to the moment at which the job knows."""
    took = []
    body = json.dumps({"messages": [{"role": "user", "content": "wait"}], "stream": True}).encode()
    for _ in range(repeats):
        leaving = http.client.HTTPConnection(connection.host, connection.port, timeout=60)
        leaving.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        leaving.getresponse().read1(64)
        time.sleep(0.2)
        before = time.monotonic_ns()
        leaving.close()
        time.sleep(0.3)
        _, answer = ask(connection, [{"role": "user", "content": "when?"}])
        took.append((int(answer["choices"][0]["message"]["content"].split()[1]) - before) / 1e6)
    return spread(took)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="whose tokenizer and template are used")
    parser.add_argument("--tokens", type=int, default=8192, help="about so many in the conversation")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument(
        "--lengths", default="4096,32768,131072", help="cached prompts for the engine's share"
    )
    parser.add_argument("--save", action="store_true", help="keep the result under reports/")
    options = parser.parse_args()
    lengths = [int(length) for length in options.lengths.split(",")]
    report: dict[str, Any] = {"load": os.getloadavg()}
    report["engine_cached_prompt_ms"] = engine_share(lengths, options.turns)
    report["engine_next_turn_ms"] = chat_share(options.model, lengths, options.turns)
    with running(options.model) as connection:
        report |= server_share(connection, options.tokens, options.turns)
        report["cancelled_after_ms"] = cancel_share(connection, max(3, options.turns // 4))
    publish("serve-share", report, save=options.save, measured="server")


if __name__ == "__main__":
    main()
