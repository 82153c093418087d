"""SIGTERM: answers that are not complete end with an error in the shape of their own interface."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from server.running import RunningServer, scripted_server
from waiting import PATIENCE_S, until

pytestmark = pytest.mark.slow

LONG = "rate=50 repeat=9000 say:word "
MESSAGES = [{"role": "user", "content": LONG}]
#: Every interface, and how it asks for a long stream.
STREAMS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "stream": True},
    "/v1/completions": {"prompt": LONG, "max_tokens": 9000, "stream": True},
    "/v1/responses": {"input": LONG, "stream": True},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 9000, "stream": True},
}
SENTENCE = "The server is being shut down before this answer is complete. Ask again in a moment."


class Client(threading.Thread):
    """Reads one stream to its end, however it ends."""

    def __init__(self, server: RunningServer, path: str) -> None:
        super().__init__(daemon=True)
        self._url, self._body = server.url + path, STREAMS[path]
        self.path, self.text, self.began, self.fault = path, "", threading.Event(), ""

    def run(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=self._body, timeout=PATIENCE_S) as stream:
                for text in stream.iter_text():
                    self.text += text
                    self.began.set()
        except httpx.HTTPError as error:
            self.fault = repr(error)


def last_data(text: str) -> dict[str, Any]:
    lines = [line for line in text.splitlines() if line.startswith("data: ") and line != "data: [DONE]"]
    found: dict[str, Any] = json.loads(lines[-1].removeprefix("data: "))
    return found


def check_shape(path: str, text: str) -> None:
    found = last_data(text)
    if path == "/v1/messages":
        assert found == {"type": "error", "error": {"type": "overloaded_error", "message": SENTENCE}}
        assert "event: error\n" in text
    elif path == "/v1/responses":
        assert found["type"] == "response.failed" and found["response"]["status"] == "failed"
        assert found["response"]["error"]["message"] == SENTENCE
    else:
        assert found["error"]["message"] == SENTENCE and found["error"]["code"] == "server_shutdown"
        assert text.endswith("data: [DONE]\n\n")


def test_streams_end_with_an_error_of_their_own_shape() -> None:
    """A server for each interface, all at a time, since each waits for seconds before it cuts an answer."""
    with ThreadPoolExecutor(len(STREAMS)) as pool:
        list(pool.map(end_streams, STREAMS))


def end_streams(first: str) -> None:
    """One stream has begun to answer, the others wait for their turn: all hear why nothing more comes."""
    others = [path for path in STREAMS if path != first]
    with scripted_server() as server:
        clients = [Client(server.wait(), first)]
        clients[0].start()
        assert clients[0].began.wait(PATIENCE_S)
        plain: list[httpx.Response] = []
        if first == "/v1/chat/completions":  # the waiting ones need to be asked once only
            clients += [Client(server, path) for path in others]
            for client in clients[1:]:
                client.start()
            body = {"messages": MESSAGES}
            waiting = threading.Thread(target=lambda: plain.append(server.post("/v1/chat/completions", body)))
            waiting.start()
            until(lambda: server.metric("vllm:num_requests_waiting") == 4)
        assert server.end() == 0
        for client in clients:
            client.join(PATIENCE_S)
            assert client.fault == "", client.path
            check_shape(client.path, client.text)
        if first == "/v1/chat/completions":
            waiting.join(PATIENCE_S)
            assert plain[0].status_code == 503 and plain[0].headers["retry-after"] == "5"
            assert plain[0].json()["error"]["message"] == SENTENCE
    assert not [line for line in server.lines if "Traceback" in line or "Exception" in line]


def test_an_answer_that_is_nearly_complete_is_completed() -> None:
    with scripted_server() as server:
        body = {"messages": [{"role": "user", "content": "rate=10 say:0123456789"}], "stream": True}
        with httpx.stream(
            "POST", server.wait().url + "/v1/chat/completions", json=body, timeout=PATIENCE_S
        ) as stream:
            text = ""
            for part in stream.iter_text():
                if not text:
                    server.process.terminate()
                text += part
        assert '"finish_reason":"stop"' in text and "error" not in text
        assert server.process.wait(PATIENCE_S) == 0
