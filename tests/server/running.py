"""Servers for tests: real processes on free ports, each started once and ended with the run."""

from __future__ import annotations

import contextlib
import json
import os
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
#: For plain HTTP. Reading the system's certificates takes httpx 50 ms of CPU time a client, more than most requests.
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


class RunningServer:
    """A server process, its address and what it has printed."""

    def __init__(self, process: subprocess.Popen[str], model: str) -> None:
        self.process, self.model = process, model
        self.lines: list[str] = []
        self._ready = threading.Event()
        self._listening = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._listening.wait(PATIENCE_S)
        self.url = next(line.split()[2].rstrip(";") for line in self.lines if line.startswith("Listening"))

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip())
            if line.startswith("Listening"):
                self._listening.set()
            if " is ready at " in line:
                self._ready.set()
        self._listening.set()
        self._ready.set()

    def end(self) -> int:
        """Ends it as an operator would; the exit code."""
        self.process.terminate()
        try:
            self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join(PATIENCE_S)
        assert not self._reader.is_alive(), "a process of the server is still there"
        assert self.process.stderr is not None
        self.process.stderr.close()
        return self.process.returncode

    def wait(self) -> RunningServer:
        """Until it is ready."""
        assert self._ready.wait(PATIENCE_S), self.lines
        assert self.process.poll() is None, self.lines
        return self

    def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=PATIENCE_S, verify=NO_TLS, **more)

    def get(self, path: str, **more: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=PATIENCE_S, verify=NO_TLS, **more)

    def chat(self, text: str, **more: Any) -> dict[str, Any]:
        """One plain chat that must succeed."""
        body = {"messages": [{"role": "user", "content": text}], "temperature": 0, **more}
        response = self.post("/v1/chat/completions", body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def say(self, text: str, **more: Any) -> str:
        """What a plain chat answers."""
        return str(self.chat(text, **more)["choices"][0]["message"]["content"])

    def metric(self, name: str) -> float:
        """A figure of /metrics, summed over its labels. One with labels has no lines until something is counted."""
        text = self.get("/metrics").text
        lines = [line for line in text.splitlines() if line.startswith(name)]
        assert lines or f"\n# TYPE {name} " in text, name
        return sum(float(line.rpartition(" ")[2]) for line in lines)


@contextlib.contextmanager
def scripted_server(source: str = "server.scripted", **settings: Any) -> Iterator[RunningServer]:
    """A server whose model is scripted.py's. `engine` holds settings of the engine, `limits` of connections."""
    engine = settings.pop("engine", {"model": "scripted"})
    limits = settings.pop("limits", None)
    command = [
        sys.executable,
        "-m",
        "server.launch",
        source,
        json.dumps({"port": 0, **settings}),
        json.dumps(engine),
        *([] if limits is None else [json.dumps(limits)]),
    ]
    with process(command, engine["model"]) as server:
        yield server


@contextlib.contextmanager
def real_server(model: str, *flags: str) -> Iterator[RunningServer]:
    """`monotape serve` itself."""
    with process([sys.executable, "-m", "monotape", "serve", model, "--port", "0", *flags], model) as server:
        yield server


def environment() -> dict[str, str]:
    """With the sources of this checkout and its tests."""
    folders = [str(ROOT / name) for name in ("src", "tests", "bench")]
    paths = [*folders, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


@contextlib.contextmanager
def process(command: list[str], model: str) -> Iterator[RunningServer]:
    started = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment(), cwd=ROOT)
    server = RunningServer(started, model)
    try:
        yield server
    finally:
        server.end()
