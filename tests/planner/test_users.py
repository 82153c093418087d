"""Replicas for users: the formula against textbook values and the simulation, and the table that is made of both."""

from __future__ import annotations

import json
import random
import statistics
from pathlib import Path

import pytest

from monotape.cli.main import main
from monotape.errors import UsageError
from monotape.planner.queue_simulation import Simulation
from monotape.planner.users import Served, measured, size
from monotape.planner.waiting import Traffic, mean_wait_s, open_wait_s, waits

Captured = pytest.CaptureFixture[str]
_RANDOM = random.Random(5)
SHAPES = {
    "equal": (2.0,),
    "exponential": tuple(_RANDOM.expovariate(0.5) for _ in range(4000)),
    "long tail": tuple(_RANDOM.lognormvariate(0.2, 1.0) for _ in range(4000)),
}


def test_one_replica_waits_as_often_as_it_is_busy() -> None:
    assert waits(1, 0.3, 2.0) == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("replicas", "load", "share"), [(2, 1.0, 1 / 3), (3, 2.0, 4 / 9), (5, 4.0, 0.554113)]
)
def test_erlangs_c_is_that_of_textbooks(replicas: int, load: float, share: float) -> None:
    assert waits(replicas, load, 1.0) == pytest.approx(share, abs=1e-6)


def test_one_replica_is_pollaczek_and_khinchine() -> None:
    """Exact for M/G/1: rate * E[S^2] / (2 (1 - load))."""
    rate, mean, variation = 0.3, 2.0, 1.7
    second_moment = mean**2 * (1 + variation)
    assert open_wait_s(1, rate, mean, variation) == pytest.approx(
        rate * second_moment / (2 * (1 - rate * mean))
    )


def test_more_than_all_replicas_can_do_has_no_end() -> None:
    assert open_wait_s(2, 1.0, 2.0, 1.0) == float("inf")
    assert waits(2, 5.0, 2.0) == 1.0


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("users", "replicas"), [(60, 4), (100, 8), (200, 16)])
def test_the_formula_agrees_with_the_simulation(shape: str, users: int, replicas: int) -> None:
    """Within a quarter, or a twentieth of the service time: how variation counts is an approximation."""
    service = SHAPES[shape]
    think_s = statistics.fmean(service) * (users / (0.8 * replicas) - 1)  # about 80 % busy
    traffic = Traffic(users, think_s, service)
    simulated = Simulation(traffic, replicas, None).run(60_000)
    found = mean_wait_s(traffic, replicas)
    assert simulated.busy_share == pytest.approx(0.8, abs=0.05)
    assert found == pytest.approx(statistics.fmean(simulated.waits_s), rel=0.25, abs=0.05 * traffic.mean_s)


def test_many_users_are_like_requests_that_come_by_themselves() -> None:
    traffic = Traffic(5000, 5000 / 2.0 - 1.0, (1.0,))  # two a second, three replicas
    assert mean_wait_s(traffic, 3) == pytest.approx(open_wait_s(3, 2.0, 1.0, 0.0), rel=0.02)


def test_users_who_never_think_share_the_replicas() -> None:
    assert mean_wait_s(Traffic(6, 0.0, (1.0, 3.0)), 2) == pytest.approx(4.0)
    assert mean_wait_s(Traffic(6, 1e-9, (1.0, 3.0)), 2) == pytest.approx(4.0)
    assert mean_wait_s(Traffic(2, 0.0, (1.0, 3.0)), 2) == 0


def test_a_conversation_that_stays_waits_longer_than_one_that_goes_anywhere() -> None:
    traffic = Traffic(40, 20.0, SHAPES["exponential"])
    queues: tuple[int | None, ...] = (None, 0, 2, 16)
    means = [statistics.fmean(Simulation(traffic, 5, queue).run().waits_s) for queue in queues]
    assert means == sorted(means)
    assert means[-1] > 2 * means[0]


def test_a_user_of_her_own_replica_never_waits() -> None:
    for queue in (None, 16):
        assert max(Simulation(Traffic(3, 5.0, (1.0,)), 3, queue).run(1000).waits_s) == 0


def test_the_smallest_number_that_is_enough_is_found() -> None:
    served = Served("test", SHAPES["exponential"], (100,) * 4000)
    sizing = size(served, users=40, think_s=20, target_s=2, price=3.6, queue=1)
    by_count = {one.replicas: one for one in sizing.sizes}
    assert sizing.enough is not None
    assert by_count[sizing.enough].p95_s <= 2 < by_count[sizing.enough - 1].p95_s
    assert by_count[sizing.enough + 1].million_dollars > by_count[sizing.enough].million_dollars  # type: ignore[operator]


def test_a_million_tokens_cost_the_hours_they_take() -> None:
    """One user who never thinks, a second and 100 tokens a request, a dollar a second."""
    sizing = size(Served("test", (1.0,), (100,)), users=1, think_s=0, target_s=1, price=3600)
    assert sizing.enough == 1
    assert sizing.sizes[0].million_dollars == pytest.approx(10_000, rel=0.01)


def test_the_command_prints_a_table_and_an_object(capsys: Captured, tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    path.write_text(json.dumps({"service_s": [1.0, 2.0, 3.0], "output_tokens": [100, 200, 300]}))
    command = ["plan", "llama-3.2-1b", "--users", "20", "--service-times", str(path), "--price", "3"]
    assert main(command) == 0
    assert "replicas: nineteen of twenty requests wait 2.0 s at most" in capsys.readouterr().out
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["users"]
    assert found["service"]["mean_s"] == 2.0
    assert found["replicas"] in {one["replicas"] for one in found["sizes"]}
    assert (
        main(["plan", "llama-3.2-1b", "--users", "20", "--request", "prompt=800,output=100", "--json"]) == 0
    )
    assert json.loads(capsys.readouterr().out)["users"]["service"]["source"] == "predicted for --request"


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--users", "0"], "--users 0 makes no sense."),
        (["--users", "1000000"], "--users 1,000,000 makes no sense."),
        (["--users", "5", "--think", "-1"], "--think -1 makes no sense."),
        (["--users", "5", "--conversation-queue", "-1"], "--conversation-queue -1 makes no sense."),
        (["--users", "5", "--service-times", "missing.json"], "missing.json cannot be read"),
    ],
)
def test_bad_input_gets_a_sentence(capsys: Captured, flags: list[str], sentence: str) -> None:
    assert main(["plan", "llama-3.2-1b", *flags]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"service_s": [1]}',
     '{"service_s": [0], "output_tokens": [1]}', '{"service_s": [], "output_tokens": []}',
     '{"service_s": [1, 2], "output_tokens": [1]}', '{"service_s": ["x"], "output_tokens": [1]}'],
)  # fmt: skip
def test_a_file_without_times_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "times.json"
    path.write_text(text)
    with pytest.raises(UsageError, match="service times"):
        measured(str(path))
