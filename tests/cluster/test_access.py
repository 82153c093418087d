"""Access to a cluster: clients without its key get nothing, and nothing of Ray can be reached from other machines."""

from __future__ import annotations

import grpc
import httpx
import pytest

from cluster.conftest import KEY
from processes import descendants, listening, need_proc
from server.running import RunningServer
from waiting import PATIENCE_S

pytestmark = pytest.mark.slow
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
PATHS = (
    "/",
    "/metrics",
    "/v1/models",
    "/monotape/info",
    "/tokenizer_info",
    "/openapi.json",
    "/nothing",
    "/-/nothing",
)
POSTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/tokenize",
    "/detokenize",
)


@pytest.mark.parametrize("key", [None, "wrong", KEY[:-1], f"{KEY}x"])
def test_a_wrong_key_gets_nothing(small: RunningServer, key: str | None) -> None:
    headers = {} if key is None else {"authorization": f"Bearer {key}", "x-api-key": key}
    body = {"messages": [{"role": "user", "content": "hi"}], "prompt": "hi", "max_tokens": 1}
    with httpx.Client(base_url=small.url, headers=headers, timeout=PATIENCE_S) as client:
        answers = [client.get(path) for path in PATHS] + [client.post(path, json=body) for path in POSTS]
        assert {answer.status_code for answer in answers} == {401}
        assert all(KEY not in answer.text and "small" not in answer.text for answer in answers)
        assert client.get("/health").status_code == 200


def test_the_right_key_gets_answers(small: RunningServer) -> None:
    for headers in ({"authorization": f"Bearer {KEY}"}, {"x-api-key": KEY}):
        assert small.get("/v1/models", headers=headers).json()["data"][0]["id"] == "small"


def test_ray_tells_nobody_about_its_applications(small: RunningServer) -> None:
    assert small.get("/-/routes").status_code == 404
    assert small.get("/-/healthz").status_code == 200  # for balancers, as /health


def test_headers_have_the_limits_of_the_single_server(small: RunningServer) -> None:
    for headers in ({"x-long": "x" * (33 << 10)}, {f"x-{number}": "x" for number in range(129)}):
        assert small.get("/health", headers=headers).status_code == 431


def test_ray_listens_to_this_machine_alone(small: RunningServer) -> None:
    """But for a port of each replica, which Ray opens to all: without the token it admits no connection."""
    need_proc()
    processes = descendants(small.process.pid)
    inner = [pid for pid, command in processes.items() if command.startswith("ray::ServeReplica")]
    found = listening(small.process.pid, *(pid for pid in processes if pid not in inner))
    assert found and {address for address, _ in found} <= LOOPBACK
    open_to_all = [port for address, port in listening(*inner) if address not in LOOPBACK]
    for port in open_to_all:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            with pytest.raises(grpc.RpcError) as refused:
                channel.unary_unary("/ray.serve.ASGIService/HandleRequest")(b"", timeout=PATIENCE_S)
            assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
