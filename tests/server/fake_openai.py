"""A server that speaks the wire protocol of `monotape serve` with a script instead of a model.

What it says of itself has the shape of server/engine/info.py. Words of the last message choose what goes wrong:
"please refuse" a 400, "please be busy" a 429, "please break" an error in the middle of the stream, "please vanish" a
connection that ends without a word.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

STORY = (
    "A tape recorder keeps a voice by dragging a ribbon past a small magnet. The ribbon does not know what it holds; "
    "it only knows the order.\n\nPlay it once and the room is full again:\n\n"
    "- the kettle,\n- the chair,\n- somebody laughing two rooms away.\n\n```python\nfor page in tape:\n"
    "    play(page)  # in order, once\n```\n\n"
    "Nothing is skipped and nothing is read twice, which is why it is **fast**. "
)
WEIGHTS, KV_PER_POSITION, BANDWIDTH = 151_552_000, 23_040, 2.1e10
TIMELINE = (
    ("embed", 0.4), ("qkv", 11.0), ("attention", 9.2), ("output", 7.1), ("gate_up", 31.5), ("down", 16.3),
    ("head", 14.9), ("sample", 2.2),
)  # fmt: skip


@dataclass
class Script:
    """How the server behaves. `dialect` decides what an answer says about its own speed."""

    model: str = "smollm2"
    context: int = 8192
    tokens_per_second: float = 400.0
    prefill_s: float = 0.02
    prefill_told_s: float | None = (
        None  # how long reading the prompt is said to take, if not as long as it does
    )
    chunk_s: float = 0.01  # how long tokens are collected before they are sent together
    dialect: str = "monotape"  # or llamacpp, or plain
    key: str | None = None
    timeline: bool = True
    bandwidth: float | None = BANDWIDTH
    completes: str | None = None  # what the model writes, if it does not chat
    story: str = STORY
    once: bool = False  # the story ends the answer, instead of beginning again
    late_s: float = (
        0.0  # how long the last tokens are on their way, which the engine's clock knows nothing of
    )
    drafted: int | None = (
        None  # drafts that each answer is said to have checked; None: the server says nothing
    )
    accepted: int = 0
    requests: list[dict[str, Any]] = field(default_factory=list)
    cancelled: int = 0
    finished: int = 0


def info(script: Script) -> dict[str, Any]:
    start, stages = 0.0, []
    for stage, us in TIMELINE:
        stages.append({"stage": stage, "start_us": start, "us": us})
        start += us
    return {
        "model": script.model, "dtype": "q8", "kv_dtype": "f16", "backend": "scripted", "workers": 2,
        "context": script.context, "vocab": 49152,
        "bytes_per_token": {"weights": WEIGHTS, "kv_per_position": KV_PER_POSITION},
        "bandwidth_bytes_per_second": script.bandwidth,
        "speed_of_light_tokens_per_second": script.bandwidth / WEIGHTS if script.bandwidth else None,
        "version": "0.1.0", "launches": None, "token_timeline": stages if script.timeline else None,
        "completes": script.completes,
        "startup": [{"phase": "weights", "seconds": 0.4}],
    }  # fmt: skip


def pieces(story: str) -> Iterator[str]:
    """The tokens of the story: a word with the white space before it."""
    word = ""
    for character in story:
        if character in " \n" and word.strip():
            yield word
            word = ""
        word += character
    yield word


def endless(story: str) -> Iterator[str]:
    while True:
        yield from pieces(story)


class Answer:
    """One scripted answer: what each event of its stream holds."""

    def __init__(self, script: Script, body: dict[str, Any]) -> None:
        self.script = script
        usual = 1_000_000 if script.once else 120
        self.limit = int(body.get("max_tokens") or body.get("max_completion_tokens") or usual)
        self.prompt = sum(len(str(message["content"]).split()) + 4 for message in body["messages"])
        self.cached = max(0, self.prompt - len(str(body["messages"][-1]["content"]).split()) - 4)
        self.live = bool(body.get("timings_per_token"))
        last = body["messages"][-1]
        begun = str(last["content"]) if last["role"] == "assistant" else ""
        self.story = script.story.removeprefix(begun)
        self.ends = script.once and len(list(pieces(self.story))) <= self.limit
        if script.once:
            self.limit = min(self.limit, len(list(pieces(self.story))))
        self.progress = bool(body.get("return_progress"))
        self.started = time.perf_counter()

    def event(self, delta: dict[str, Any], finish: str | None = None, **more: Any) -> dict[str, Any]:
        choices = [{"index": 0, "delta": delta, "finish_reason": finish}]
        return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "choices": choices, **more}

    def figures(self, count: int, decode_s: float, first_s: float) -> dict[str, Any]:
        prefill, decode = 1000 * self.script.prefill_s, 1000 * decode_s
        speed = (count - 1) / decode_s if decode_s else None
        timings = {
            "cache_n": self.cached, "prompt_n": self.prompt - self.cached, "prompt_ms": prefill,
            "predicted_n": count, "predicted_ms": decode, "predicted_per_second": speed,
            "itl_p50_ms": decode / max(1, count - 1), "itl_p99_ms": 1.3 * decode / max(1, count - 1),
            "bytes_per_token": WEIGHTS + KV_PER_POSITION * (self.prompt + count // 2),
            "phases": [
                {"phase": "render", "start_ms": 0.0, "ms": 0.8}, {"phase": "tokenize", "start_ms": 0.8, "ms": 0.4},
                {"phase": "queue", "start_ms": 1.2, "ms": 0.3},
                {"phase": "prefill", "start_ms": 1.5, "ms": prefill},
                {"phase": "decode", "start_ms": 1.5 + prefill, "ms": decode},
            ],
        }  # fmt: skip
        if self.script.drafted is not None:
            timings |= {"draft_n": self.script.drafted, "draft_n_accepted": self.script.accepted}
        metrics = {
            "time_to_first_token_ms": 1000 * first_s, "generation_time_ms": decode, "queue_time_ms": 0.3,
            "mean_itl_ms": decode / max(1, count - 1), "tokens_per_second": speed, "decode_tokens_per_second": speed,
        }  # fmt: skip
        return {"plain": {}, "llamacpp": {"timings": timings}}.get(
            self.script.dialect, {"timings": timings, "metrics": metrics}
        )

    def usage(self, count: int) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt, "completion_tokens": count, "total_tokens": self.prompt + count,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            **self.details(),
        }  # fmt: skip

    def details(self) -> dict[str, Any]:
        if self.script.drafted is None:
            return {}
        accepted, rejected = self.script.accepted, self.script.drafted - self.script.accepted
        counts = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
        return {"completion_tokens_details": counts}

    def reading(self) -> Iterator[dict[str, Any]]:
        """The prompt, read in four steps, and said to be where the client wants to know."""
        for step in range(4):
            if self.progress and self.script.dialect == "monotape":
                processed = self.cached + (self.prompt - self.cached) * step // 4
                took_ms = 1000 * (self.script.prefill_told_s or self.script.prefill_s) * step / 4
                figures = {
                    "total": self.prompt, "cache": self.cached, "processed": processed, "time_ms": took_ms
                }  # fmt: skip
                yield {**self.event({}), "choices": [], "prompt_progress": figures}
            time.sleep(self.script.prefill_s / 4)

    def events(self, *, breaks: bool) -> Iterator[dict[str, Any]]:
        """What is sent, at the moment at which it is."""
        yield self.event({"role": "assistant", "content": ""})
        yield from self.reading()
        first_at = time.perf_counter()
        source, sent = endless(self.story), 0
        while sent < self.limit:
            due = 1 + int((time.perf_counter() - first_at) * self.script.tokens_per_second)
            fresh = min(self.limit, due) - sent
            if fresh <= 0:
                time.sleep(self.script.chunk_s)
                continue
            sent += fresh
            if sent == self.limit:
                time.sleep(self.script.late_s)
            so_far = {"predicted_n": sent, "predicted_ms": 1000 * (sent - 1) / self.script.tokens_per_second}
            live = {"timings": so_far} if self.live and self.script.dialect == "monotape" else {}
            yield self.event({"content": "".join(next(source) for _ in range(fresh))}, **live)
            if breaks and sent > 5:
                yield {
                    "error": {"message": "The engine died; it is being restarted.", "type": "server_error"}
                }
                return
        decode_s = (sent - 1) / self.script.tokens_per_second
        figures = self.figures(sent, decode_s, first_at - self.started)
        yield self.event({}, "stop" if self.ends else "length", **figures)
        yield {**self.event({}), "choices": [], "usage": self.usage(sent), **figures}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    script: Script

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def _reply(self, status: int, value: Any, **headers: str) -> None:
        html = isinstance(value, str)
        data = value.encode() if html else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/html; charset=utf-8" if html else "application/json")
        self.send_header("Content-Length", str(len(data)))
        for name, text in headers.items():
            self.send_header(name.replace("_", "-"), text)
        self.end_headers()
        self.wfile.write(data)

    def _error(self, status: int, message: str, code: str | None = None, **headers: str) -> None:
        body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}
        self._reply(status, body, **headers)

    def _allowed(self) -> bool:
        if self.script.key is None or self.headers.get("Authorization") == f"Bearer {self.script.key}":
            return True
        self._error(401, "Incorrect API key provided.", "invalid_api_key")
        return False

    def do_GET(self) -> None:
        if self.path == "/":
            from monotape.server.playground import page

            self._reply(200, page())
        elif self.path == "/favicon.ico":
            self._reply(404, {})
        elif not self._allowed():
            pass
        elif self.path == "/v1/models":
            entry = {"id": self.script.model, "object": "model", "max_model_len": self.script.context}
            self._reply(200, {"object": "list", "data": [entry]})
        elif self.path == "/monotape/info" and self.script.dialect == "monotape":
            self._reply(200, info(self.script))
        else:
            self._error(404, f"There is no {self.path} here.")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._allowed():
            return
        self.script.requests.append(body)
        said = str(body["messages"][-1]["content"])
        if "please refuse" in said:
            self._error(
                400,
                f"This model's maximum context length is {self.script.context} tokens. However, you requested 10 "
                "output tokens and your prompt contains 9000 input tokens",
                "context_length_exceeded",
            )
        elif "please be busy" in said:
            self._error(429, "The queue is full.", "rate_limit_exceeded", Retry_After="2")
        else:
            self._stream(body, said)

    def _stream(self, body: dict[str, Any], said: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            for event in Answer(self.script, body).events(breaks="please break" in said):
                self._send_piece(f"data: {json.dumps(event)}\n\n")
                if "please vanish" in said:
                    self.close_connection = True
                    return
            self._send_piece("data: [DONE]\n\n")
            self._send_piece("")
            self.script.finished += 1
        except OSError:
            self.script.cancelled += 1
            self.close_connection = True

    def _send_piece(self, text: str) -> None:
        data = text.encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()


@contextmanager
def running(script: Script) -> Iterator[str]:
    """Serves the script on a free port of this machine; gives the address."""
    handler = type("ScriptedHandler", (Handler,), {"script": script})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


if __name__ == "__main__":
    with running(Script()) as url:
        print(url, flush=True)
        threading.Event().wait()
