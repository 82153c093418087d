"""What of an engine's speed reaches an unmodified client, and what the server itself costs.

    python bench/serve.py --rates 1000,3000 --tokens 9000 --save
    python bench/serve.py --clients 200 --seconds 60 --save

The engine says its prompt at a fixed rate (bench/echo_source.py). What arrives is measured with the `openai` package on
loopback; the many clients are bare ones, each of which knows the one right answer to its question. CPU is that of the
server's process alone, from /proc: the engine's stands beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai

from echo_source import expected
from monotape.server.config import ServerConfig
from report import publish, spread
from serving import served_by

_LAUNCH = """
import sys
from monotape.engine.config import EngineConfig
from monotape.server.config import ServerConfig
from monotape.server.run import serve
sys.exit(serve(ServerConfig(port=0), EngineConfig(model=sys.argv[1], progress=False), "echo_source"))
"""


def running(rate: float) -> contextlib.AbstractContextManager[tuple[str, int]]:
    """A server with such an engine: its address and process."""
    return served_by(_LAUNCH, f"rate-{rate:g}")


def cpu_seconds(pid: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def engine_of(pid: int) -> int:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return next(
        int(child)
        for child in children
        if b"server.engine.process" in Path(f"/proc/{child}/cmdline").read_bytes()
    )


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def stream(client: openai.OpenAI, tokens: int) -> dict[str, float]:
    """One streamed chat as the client sees it."""
    (model,) = client.models.list()
    first = last = 0.0
    characters = at_first = chunks = 0
    engine_speed = 0.0
    for chunk in client.chat.completions.create(
        model=model.id, messages=[{"role": "user", "content": "go"}], max_tokens=tokens, stream=True
    ):
        chunks += 1
        text = chunk.choices[0].delta.content if chunk.choices else None
        if text:
            last = time.perf_counter()
            characters += len(text)  # a token of the source is one letter
            if not first:
                first, at_first = last, characters
        engine_speed = ((chunk.model_extra or {}).get("metrics") or {}).get(
            "decode_tokens_per_second", engine_speed
        )
    assert characters == tokens, f"{characters} of {tokens} tokens arrived"
    return {"client": (characters - at_first) / (last - first), "engine": engine_speed, "chunks": chunks}


def measure_rate(rate: float, tokens: int, runs: int) -> dict[str, Any]:
    with running(rate) as (address, pid), openai.OpenAI(base_url=f"{address}/v1", api_key="none") as client:
        stream(client, 200)
        engine = engine_of(pid)
        found, began = [], time.perf_counter()
        cpu, engine_cpu = cpu_seconds(pid), cpu_seconds(engine)
        for _ in range(runs):
            found.append(stream(client, tokens))
        elapsed = time.perf_counter() - began
        busy = {
            "server": (cpu_seconds(pid) - cpu) / elapsed,
            "engine": (cpu_seconds(engine) - engine_cpu) / elapsed,
        }
        idle = _idle(pid, engine)
    return {
        "rate": rate,
        "client_tokens_per_second": spread([run["client"] for run in found]),
        "share_of_rate": spread([run["client"] / rate for run in found]),
        "share_of_engine": spread([run["client"] / run["engine"] for run in found]),
        "chunks": spread([run["chunks"] for run in found]),
        "cpu_share_streaming": busy,
        "cpu_share_idle": idle,
    }


def _idle(pid: int, engine: int, seconds: float = 5.0) -> dict[str, float]:
    before = cpu_seconds(pid), cpu_seconds(engine)
    time.sleep(seconds)
    return {
        "server": (cpu_seconds(pid) - before[0]) / seconds,
        "engine": (cpu_seconds(engine) - before[1]) / seconds,
    }


@dataclass(slots=True)
class Crowd:
    """What many clients at once have met."""

    answered: int = 0
    refused: int = 0  # with 429 and a time to try again
    wrong: int = 0  # another status, another client's text, or not all of one's own
    lost: int = 0  # no answer at all
    most_waiting: int = 0
    server_bytes: list[int] = field(default_factory=list)
    engine_bytes: list[int] = field(default_factory=list)


async def crowd(address: str, pid: int, clients: int, seconds: float) -> Crowd:
    """Many clients at once, each asking again and again; every answer must be complete and the client's own."""
    found, engine = Crowd(), engine_of(pid)
    end = time.monotonic() + seconds

    async def watch_memory() -> None:
        while time.monotonic() < end:
            found.server_bytes.append(resident_bytes(pid))
            found.engine_bytes.append(resident_bytes(engine))
            await asyncio.sleep(seconds / 12)

    async def watch_queue(web: httpx.AsyncClient) -> None:
        while time.monotonic() < end:
            found.most_waiting = max(found.most_waiting, await waiting(web, address))
            await asyncio.sleep(0.1)

    limits = httpx.Limits(max_connections=clients + 1)
    async with httpx.AsyncClient(timeout=60, limits=limits) as web:
        watchers = (watch_memory(), watch_queue(web))
        await asyncio.gather(*watchers, *(one_of_many(web, address, n, end, found) for n in range(clients)))
    return found


async def one_of_many(web: httpx.AsyncClient, address: str, number: int, end: float, found: Crowd) -> None:
    content, tokens = f"client {number} of many", 40 + number % 7
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": tokens}
    while time.monotonic() < end:
        try:
            response = await web.post(f"{address}/v1/chat/completions", json=body)
        except httpx.HTTPError:
            found.lost += 1
            continue
        if response.status_code == 429:
            found.refused += 1
            await asyncio.sleep(min(1.0, float(response.headers["retry-after"])))
        elif response.status_code == 200 and answer_of(response) == expected(content, tokens):
            found.answered += 1
        else:
            found.wrong += 1


def answer_of(response: httpx.Response) -> str:
    return str(response.json()["choices"][0]["message"]["content"])


async def waiting(web: httpx.AsyncClient, address: str) -> int:
    """How many wait in the queue, by the server's own count."""
    text = (await web.get(f"{address}/metrics")).text
    name = "vllm:num_requests_waiting"
    return sum(int(float(line.rpartition(" ")[2])) for line in text.splitlines() if line.startswith(name))


def measure_crowd(clients: int, seconds: float) -> dict[str, Any]:
    with running(3000.0) as (address, pid):
        found = asyncio.run(crowd(address, pid, clients, seconds))
    return {"clients": clients, "seconds": seconds, "queue": ServerConfig().max_queue, **asdict(found)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", help="tokens a second of the source, after commas")
    parser.add_argument("--tokens", type=int, default=9000, help="tokens in an answer")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--clients", type=int, help="how many ask at once")
    parser.add_argument("--seconds", type=float, default=60.0, help="for how long they ask")
    parser.add_argument("--save", action="store_true", help="keep the result under reports/")
    options = parser.parse_args()
    if options.rates is None and options.clients is None:
        parser.error("give --rates or --clients")
    if options.rates is not None:
        rates = [float(rate) for rate in options.rates.split(",")]
        results = [measure_rate(rate, options.tokens, options.runs) for rate in rates]
        publish("serve-rates", {"client": "openai", "results": results}, save=options.save, measured="server")
    if options.clients is not None:
        publish(
            "serve-clients",
            measure_crowd(options.clients, options.seconds),
            save=options.save,
            measured="server",
        )


if __name__ == "__main__":
    main()
