"""What hostile clients cost a server: a kill, connections that never end, headers without end, grammar bombs.

    python bench/attack.py --save
    python bench/attack.py --kills 1 --patience 5 --seconds 5    # a short look

The server is a process of its own on loopback with the limits that users get; its engine is bench/echo_source.py's.
Memory is read from /proc: of the server's process (resident), and of it with all its children (proportional, so that
pages which forks share count once). Each attack is bounded in time, and the flood of headers also by the server's
growth. A plain request is asked again and again meanwhile; its delay is what other users would notice.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import signal
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from report import publish
from serve import resident_bytes, running

RATE = 3000.0  # tokens a second of the engine
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
FILLER = (b"X-Filler: " + b"a" * 500 + b"\r\n") * 100
PROPERTIES = 16_400  # all optional: a grammar of them takes minutes and gigabytes where nothing bounds it
MOST_GROWTH = 2 << 30  # bytes of the server at which a flood stops, so that the machine survives an old one
REQUEST_S = 180.0
MB = 1e6


def family(pid: int) -> list[int]:
    """A process and all that it has started, and so on."""
    found = [pid]
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += family(int(child))
    return found


def proportional_bytes(pids: list[int]) -> int:
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += 1024 * int(line.split()[1])
    return total


def running_processes(pids: list[int]) -> list[int]:
    """Those that have not ended; a zombie has."""
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                found.append(pid)
    return found


def new_client(address: str) -> httpx.Client:
    """Connects anew for each request, as another user would."""
    limits = httpx.Limits(max_keepalive_connections=0)
    return httpx.Client(base_url=address, timeout=REQUEST_S, limits=limits)


def ask(client: httpx.Client, **more: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": "go"}], "max_tokens": 8, **more}
    return client.post("/v1/chat/completions", json=body)


def connect(address: str) -> socket.socket:
    parts = urlsplit(address)
    assert parts.hostname == "127.0.0.1" and parts.port
    return socket.create_connection((parts.hostname, parts.port), timeout=10)


@dataclass(slots=True)
class Watch:
    """Memory and the delay of plain requests while an attack goes on."""

    client: httpx.Client
    pid: int
    before: int = 0
    peak: int = 0
    peak_of_all: int = 0
    after: int = 0
    delays: list[float] = field(default_factory=list)
    refused: int = 0
    over: threading.Event = field(default_factory=threading.Event)

    def look(self) -> None:
        while not self.over.wait(0.1):
            self.peak = max(self.peak, resident_bytes(self.pid))
            self.peak_of_all = max(self.peak_of_all, proportional_bytes(family(self.pid)))

    def probe(self) -> None:
        while not self.over.wait(0.05):
            start = time.perf_counter()
            try:
                answered = ask(self.client).status_code == 200
            except httpx.HTTPError:
                answered = False
            self.delays.append(time.perf_counter() - start)
            self.refused += not answered

    def facts(self) -> dict[str, Any]:
        return {
            "memory_before_mb": round(self.before / MB, 1),
            "memory_peak_mb": round(self.peak / MB, 1),
            "memory_after_mb": round(self.after / MB, 1),
            "peak_with_children_mb": round(self.peak_of_all / MB, 1),
            "plain_requests": len(self.delays),
            "plain_not_answered": self.refused,
            "plain_median_s": round(statistics.median(self.delays), 3) if self.delays else None,
            "plain_longest_s": round(max(self.delays), 3) if self.delays else None,
        }


@contextlib.contextmanager
def watched(address: str, pid: int) -> Iterator[Watch]:
    """Asks a few times before: whatever a first request loads belongs to no attack."""
    with new_client(address) as client:
        for _ in range(3):
            ask(client)
        watch = Watch(client, pid, before=resident_bytes(pid))
        threads = [threading.Thread(target=work) for work in (watch.look, watch.probe)]
        for thread in threads:
            thread.start()
        try:
            yield watch
        finally:
            watch.over.set()
            for thread in threads:
                thread.join()
            time.sleep(2.0)
            watch.after = resident_bytes(pid)


def kill_in_a_stream(times: int) -> dict[str, Any]:
    """Ends the server by SIGKILL in the middle of an answer; what it started must end too."""
    orphaned = 0
    for _ in range(times):
        with running(RATE) as (address, pid):
            body = {"messages": [{"role": "user", "content": "go"}], "max_tokens": 100_000, "stream": True}
            url = f"{address}/v1/chat/completions"
            with (
                contextlib.suppress(httpx.HTTPError),
                httpx.stream("POST", url, json=body, timeout=30) as stream,
            ):
                next(stream.iter_lines())
                processes = family(pid)
                os.kill(pid, signal.SIGSTOP)  # or its engine sees an end of file, no reset
                time.sleep(0.5)
                kill(pid)
            deadline = time.monotonic() + 10
            while (left := running_processes(processes)) and time.monotonic() < deadline:
                time.sleep(0.05)
            orphaned += bool(left)
            for orphan in left:
                kill(orphan)
    return {"attack": "kill -9 in a stream", "times": times, "times_with_orphans": orphaned}


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def still_open(client: socket.socket) -> bool:
    """Whether the server has not closed it; an answer that came before is read away."""
    client.setblocking(False)
    try:
        while client.recv(1 << 16):
            pass
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def sit(idle: int, half: int, patience: float) -> dict[str, Any]:
    """Connections that say nothing, and others that stop in the middle of a header."""
    with running(RATE) as (address, pid), contextlib.ExitStack() as stack, watched(address, pid) as watch:
        start = time.monotonic()
        silent = [stack.enter_context(connect(address)) for _ in range(idle)]
        unfinished = [stack.enter_context(connect(address)) for _ in range(half)]
        for client in unfinished:
            client.sendall(HEAD)
        closed_after = None
        while closed_after is None and time.monotonic() < start + patience:
            time.sleep(0.5)
            if not any(map(still_open, [*silent, *unfinished])):
                closed_after = round(time.monotonic() - start, 1)
        left = [sum(map(still_open, some)) for some in (silent, unfinished)]
    return {
        "attack": "idle and half-finished connections",
        "idle": idle, "half_finished": half, "patience_s": patience, "all_closed_after_s": closed_after,
        "idle_left": left[0], "half_finished_left": left[1], **watch.facts(),
    }  # fmt: skip


def flood(address: str, pid: int, connections: int, seconds: float) -> dict[str, Any]:
    """Header lines without end, from many connections; one that was cut comes again."""
    start, most = time.monotonic(), resident_bytes(pid) + MOST_GROWTH
    sent, cut = [0] * connections, [0] * connections

    def goes_on() -> bool:
        return time.monotonic() < start + seconds and resident_bytes(pid) < most

    def attack(number: int) -> None:
        while goes_on():
            try:
                with connect(address) as client:
                    client.sendall(HEAD)
                    while goes_on():
                        client.sendall(FILLER)
                        sent[number] += len(FILLER)
            except OSError:
                cut[number] += 1

    with ThreadPoolExecutor(connections) as pool:
        list(pool.map(attack, range(connections)))
    return {
        "seconds": round(time.monotonic() - start, 1),
        "sent_mb": round(sum(sent) / MB),
        "connections_cut": sum(cut),
    }


def flood_headers(connections: int, seconds: float) -> dict[str, Any]:
    """The attacker is another process, so that it does not slow the plain requests down by itself."""
    attacker = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
    with running(RATE) as (address, pid), attacker, watched(address, pid) as watch:
        found = attacker.submit(flood, address, pid, connections, seconds).result()
    return {"attack": "headers without end", "connections": connections, **found, **watch.facts()}


def bomb_grammars(schemas: int) -> dict[str, Any]:
    """Schemas whose grammars nothing could hold; what a plain request waits beside them."""
    properties = {f"p{index}": {"type": "string"} for index in range(PROPERTIES)}
    wanted = {"name": "x", "schema": {"type": "object", "properties": properties}}
    bomb = {"response_format": {"type": "json_schema", "json_schema": wanted}}

    def throw(address: str) -> tuple[int, bool]:
        try:
            with new_client(address) as client:
                response = ask(client, **bomb)
        except httpx.HTTPError:
            return 0, False
        return response.status_code, "panic" in response.text or "backtrace" in response.text

    pool = ThreadPoolExecutor(schemas)
    with running(RATE) as (address, pid), pool, watched(address, pid) as watch:
        start = time.monotonic()
        answers = list(pool.map(throw, [address] * schemas))
        took = time.monotonic() - start
    return {
        "attack": "grammar bombs", "schemas": schemas, "properties": PROPERTIES, "all_answered_after_s": round(took, 1),
        "answers": ", ".join(sorted({str(status) if status else "none" for status, _ in answers})),
        "answers_with_a_panic": sum(panic for _, panic in answers), **watch.facts(),
    }  # fmt: skip


def show(result: dict[str, Any]) -> None:
    print(f"{result['attack']}:", flush=True)
    for name, value in result.items():
        if name != "attack":
            print(f"  {name.replace('_', ' '):<24} {value}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=5, help="how many servers are killed in a stream")
    parser.add_argument("--idle", type=int, default=300, help="connections that say nothing")
    parser.add_argument("--half", type=int, default=100, help="connections that stop in a header")
    parser.add_argument(
        "--patience", type=float, default=130.0, help="seconds in which they should be closed"
    )
    parser.add_argument("--floods", type=int, default=50, help="connections with headers without end")
    parser.add_argument("--seconds", type=float, default=30.0, help="for how long headers are sent")
    parser.add_argument("--schemas", type=int, default=8, help="grammar bombs at once")
    parser.add_argument("--save", action="store_true", help="keep the result under reports/")
    options = parser.parse_args()
    attacks: list[Callable[[], dict[str, Any]]] = [
        lambda: kill_in_a_stream(options.kills),
        lambda: sit(options.idle, options.half, options.patience),
        lambda: flood_headers(options.floods, options.seconds),
        lambda: bomb_grammars(options.schemas),
    ]
    results = []
    for attack in attacks:
        results.append(attack())
        show(results[-1])
    publish("serve-attack", {"results": results}, save=options.save, measured="server")


if __name__ == "__main__":
    main()
