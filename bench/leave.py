"""How soon the engine is idle once a client has gone: at 0, 1 and 50 % of the tokens, streaming and not.

    monotape serve smollm2 &
    python bench/leave.py --url http://127.0.0.1:8000 --save

A client asks over a bare socket and closes it: at 0 right after its prompt was sent, while the prompt is computed; at 1
and 50 % after so much of the answer (or, in a plain request, of the time that it takes). The server's own gauge of
running requests, read every two milliseconds, says when it is idle; no time is less than one reading.
"""

from __future__ import annotations

import argparse
import json
import socket
import time
from typing import Any
from urllib.parse import urlsplit

import httpx

from report import publish, spread

_PROMPT = "Tell me about the sea. " * 40


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", required=True, help="a running server with nothing else to do")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--times", type=int, default=10, help="that each client leaves")
    parser.add_argument("--save", action="store_true", help="keep the result under reports/")
    return parser.parse_args()


class Server:
    """The server that is left, and what it says of itself."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.address = (parts.hostname or "127.0.0.1", parts.port or 80)
        self.http = httpx.Client(base_url=url, timeout=120)
        self.model = self.http.get("/v1/models").json()["data"][0]["id"]
        self._asked = 0

    def ask(self, tokens: int, stream: bool) -> socket.socket:
        """Sends a request and does not wait. Every prompt begins differently: none is in the KV yet."""
        self._asked += 1
        body = {
            "model": self.model, "max_tokens": tokens, "stream": stream, "temperature": 0, "ignore_eos": True,
            "messages": [{"role": "user", "content": f"{self._asked}. {_PROMPT}"}],
        }  # fmt: skip
        content = json.dumps(body).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {self.address[0]}:{self.address[1]}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        connection = socket.create_connection(self.address, timeout=120)
        connection.sendall(head.encode() + content)
        return connection

    def running(self) -> bool:
        lines = self.http.get("/metrics").text.splitlines()
        return any(
            line.startswith("vllm:num_requests_running ") and not line.endswith(" 0.0") for line in lines
        )

    def wait_until(self, running: bool) -> float:
        """Seconds until the condition holds."""
        start = time.perf_counter()
        while self.running() != running:
            time.sleep(0.002)
        return time.perf_counter() - start


def answer_seconds(server: Server, tokens: int) -> float:
    start = time.perf_counter()
    connection = server.ask(tokens, stream=False)
    connection.recv(1)
    connection.close()
    return time.perf_counter() - start


def leave(server: Server, tokens: int, stream: bool, share: float, whole: float) -> float:
    """Milliseconds from closing the connection to an idle engine."""
    server.wait_until(running=False)
    connection = server.ask(tokens, stream)
    server.wait_until(running=True)
    if stream and share:
        wanted, seen = max(1, round(share * tokens)), b""
        while seen.count(b"data: ") < wanted:
            seen += connection.recv(65536)
    elif share:
        time.sleep(share * whole)
    connection.close()
    return 1e3 * server.wait_until(running=False)


def main() -> None:
    options = parse_arguments()
    server = Server(options.url)
    whole = answer_seconds(server, options.tokens)
    results: list[dict[str, Any]] = []
    for stream in (True, False):
        for share in (0, 0.01, 0.5):
            times = [leave(server, options.tokens, stream, share, whole) for _ in range(options.times)]
            results.append({"streaming": stream, "share_of_tokens": share, "idle_after_ms": spread(times)})
            found = results[-1]["idle_after_ms"]
            print(
                f"{'streaming' if stream else 'plain':<10} {100 * share:>3.0f} %  idle after {found['median']:.1f} ms"
                f" ({found['min']:.1f} to {found['max']:.1f})", flush=True,
            )  # fmt: skip
    facts = {"model": server.model, "tokens": options.tokens, "answer_s": whole, "clients": results}
    publish("serve-leave", facts, save=options.save, measured="server")


if __name__ == "__main__":
    main()
