"""What two replicas bring, on this machine, with real Ray: throughput, kept conversations, and how soon one is free.

    python bench/replicas.py --model smollm2 --save

Each replica has one core. Measured are

- tokens a second of whole answers with one replica and with two: of the model, which needs cores and memory bandwidth,
  and of engines that only wait, which shows what the cluster itself costs. One replica is measured on all cores, where
  Ray has the second one to itself, and on one core with all of Ray, which is what each of two replicas has;
- 40 conversations of five turns: the share of turns after the first that found the KV of the turn before;
- the time from a client's leaving to the first byte of the answer that waited for its replica. That is an upper bound:
  it holds the start of a whole answer, which is measured beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from report import ROOT, publish, spread

CHAT = "/v1/chat/completions"
CONVERSATIONS, TURNS = 40, 5
RATE = "rate-60"  # tokens a second of engines that wait
#: What `monotape deploy` does, with the model of bench/echo_source.py, whose name is its rate.
_WAITING = """
import signal, sys
from monotape.cluster import deploying
from monotape.cluster.config import DeployConfig
from monotape.engine.config import EngineConfig
from monotape.server.config import ServerConfig
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
deploying.connect(None)
plan = DeployConfig(replicas=int(sys.argv[2]), cpus_per_replica=1)
engine = EngineConfig(model=sys.argv[1], progress=False)
try:
    said = deploying.deploy(plan, ServerConfig(port=0, any_model_name=True), engine, "echo_source")
    print(said, file=sys.stderr, flush=True)
    signal.pause()
finally:
    deploying.shut_down()
"""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer of the first measurement")
    parser.add_argument("--requests", type=int, default=8, help="for each replica, each time")
    parser.add_argument("--times", type=int, default=3, help="that everything is measured")
    parser.add_argument("--save", action="store_true", help="keep the result under reports/")
    return parser.parse_args()


@contextlib.contextmanager
def deployed(model: str, replicas: int, one_core: bool = False) -> Iterator[str]:
    """The address of a deployment on this machine, or on one core of it: Ray's own processes too."""
    command = [
        sys.executable, "-m", "monotape", "deploy", model, "--port", "0", "--replicas", str(replicas), "--backend",
        "cpu", "--cpus-per-replica", "1", "--max-sequences", "32", "--any-model-name",
    ]  # fmt: skip
    if model == RATE:
        command = [sys.executable, "-c", _WAITING, model, str(replicas)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in ("src", "bench"))}
    if one_core:
        command = ["taskset", "--cpu-list", "0", *command]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    try:
        ready = next(line for line in process.stderr if " is ready at " in line)
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield ready.split()[-1]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def ask(client: httpx.Client, messages: list[dict[str, str]], tokens: int, **more: Any) -> dict[str, Any]:
    body = {"messages": messages, "max_tokens": tokens, "temperature": 0, **more}
    answer: dict[str, Any] = client.post(CHAT, json=body).raise_for_status().json()
    return answer


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def throughput(url: str, users: int, requests: int, tokens: int) -> float:
    """Tokens a second, with as many users as replicas, each asking as soon as it has an answer."""
    with httpx.Client(base_url=url, timeout=600) as client, ThreadPoolExecutor(users) as pool:

        def user(number: int) -> int:
            return sum(
                ask(client, said(f"{number}. {index} sheep?"), tokens, ignore_eos=True)["usage"][
                    "completion_tokens"
                ]
                for index in range(requests)
            )

        began = time.perf_counter()
        made = sum(pool.map(user, range(users)))
        return made / (time.perf_counter() - began)


def kept(url: str, own_instructions: bool) -> float:
    """The share of turns after the first that found the KV of the turn before. Without instructions of its own a
    conversation has those of the template, which are most of a short one: the engine's pool may then give its sequence
    to another conversation.
    """
    talks: list[list[dict[str, str]]] = [[] for _ in range(CONVERSATIONS)]
    usages: list[list[dict[str, Any]]] = [[] for _ in range(CONVERSATIONS)]
    with httpx.Client(base_url=url, timeout=600) as client, ThreadPoolExecutor(8) as pool:

        def turn(number: int) -> None:
            if own_instructions and not talks[number]:
                talks[number].append({"role": "system", "content": f"{number * 7919} is your secret."})
            talks[number] += said(f"{'xyz'[number % 3] * (number + 3)} asks: what is {number} times two?")
            answer = ask(client, talks[number], 8)
            talks[number].append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
            usages[number].append(answer["usage"])

        for _ in range(TURNS):
            list(pool.map(turn, range(CONVERSATIONS)))
    pairs = [pair for usage in usages for pair in itertools.pairwise(usage)]
    found: list[bool] = [
        later["prompt_tokens_details"]["cached_tokens"] >= earlier["prompt_tokens"] - 1
        for earlier, later in pairs
    ]
    return sum(found) / len(found)


def freed_ms(url: str) -> tuple[float, float]:
    """From the close of one of two running streams to the first byte of the answer that waited, and the time to the
    first byte when nothing had to wait."""
    body = {"max_tokens": 2000, "stream": True, "ignore_eos": True, "temperature": 0}
    short = {**body, "messages": said("Hi."), "max_tokens": 1}
    with httpx.Client(base_url=url, timeout=600) as client:
        began = time.perf_counter()
        with client.stream("POST", CHAT, json=short) as response:
            next(response.iter_raw())
            idle_ms = 1e3 * (time.perf_counter() - began)
        time.sleep(0.3)
        with contextlib.ExitStack() as streams:
            running = []
            for name in ("one", "two"):
                asked = {**body, "messages": said(f"Count to {name} thousand.")}
                running.append(streams.enter_context(client.stream("POST", CHAT, json=asked)))
            lines = [stream.iter_lines() for stream in running]
            for line in lines:
                for _ in range(4):  # past the head: the engine has begun
                    next(line)
            arrived: list[float] = []

            def wait() -> None:
                with client.stream("POST", CHAT, json=short) as response:
                    next(response.iter_raw())
                    arrived.append(time.perf_counter())

            waiting = threading.Thread(target=wait)
            waiting.start()
            time.sleep(0.5)
            assert not arrived, "it did not have to wait"
            left = time.perf_counter()
            for stream in running:  # it waits at one of them
                stream.close()
            waiting.join()
    return 1e3 * (arrived[0] - left), idle_ms


def main() -> None:
    options = parse_arguments()
    facts: dict[str, Any] = {
        "model": options.model,
        "tokens": options.tokens,
        "load_average": os.getloadavg()[0],
    }
    waiting = {}
    for replicas in (1, 2):
        with deployed(RATE, replicas) as url:
            throughput(url, replicas, 1, 8)
            runs = [
                throughput(url, replicas, 2 * options.requests, options.tokens) for _ in range(options.times)
            ]
            waiting[replicas] = spread(runs)
            print(f"{replicas} engines that wait: {waiting[replicas]['median']:.1f} tok/s", flush=True)
    alone = {}
    for one_core in (True, False):
        with deployed(options.model, 1, one_core) as url:
            throughput(url, 1, 1, 8)
            alone[one_core] = [
                throughput(url, 1, options.requests, options.tokens) for _ in range(options.times)
            ]
        place = "one core" if one_core else "the whole machine"
        print(f"one replica on {place}: {statistics.median(alone[one_core]):.1f} tok/s", flush=True)
    one = alone[False]
    with deployed(options.model, 2) as url:
        throughput(url, 2, 1, 8)
        two = [throughput(url, 2, options.requests, options.tokens) for _ in range(options.times)]
        print(f"two replicas: {statistics.median(two):.1f} tok/s", flush=True)
        share, common = kept(url, True), kept(url, False)
        print(
            f"turns that found their KV: {100 * share:.1f} %, {100 * common:.1f} % with shared instructions",
            flush=True,
        )
        times = [freed_ms(url) for _ in range(5 * options.times)]
    freed, idle = spread([first for first, _ in times]), spread([second for _, second in times])
    print(
        f"answer after a client left: {freed['median']:.1f} ms; with nothing to wait for: {idle['median']:.1f} ms"
    )
    ratio = statistics.median(two) / statistics.median(one)
    core_ratio = statistics.median(two) / statistics.median(alone[True])
    print(f"two against one on the whole machine: {ratio:.2f}x; with one core each: {core_ratio:.2f}x")
    facts |= {
        "waiting_one_tokens_per_second": waiting[1], "waiting_two_tokens_per_second": waiting[2],
        "waiting_two_over_one": waiting[2]["median"] / waiting[1]["median"],
        "one_replica_tokens_per_second": spread(one), "two_replicas_tokens_per_second": spread(two),
        "two_over_one": ratio, "one_replica_on_one_core_tokens_per_second": spread(alone[True]),
        "two_over_one_with_a_core_each": core_ratio,
        "share_of_turns_with_kv": share, "share_of_turns_with_kv_if_instructions_are_common": common,
        "answer_after_leaving_ms": freed, "answer_when_idle_ms": idle,
    }  # fmt: skip
    publish("serve-replicas", facts, save=options.save, measured="server")


if __name__ == "__main__":
    main()
