"""The figures of several replicas as one."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from monotape.cluster.figures import Figures
from monotape.cluster.replica import Replica
from monotape.server.engine import wire
from monotape.server.service import metrics as service_metrics
from monotape.server.service.metrics import Metrics

STATS = wire.Stats(100, 40, 11, 5_000_000, 10_000_000, None, 7)


def measured(completions: int, running: int = 0) -> Metrics:
    metrics = Metrics()
    metrics.watch(running=lambda: running, waiting=lambda: 0, restarts=lambda: 1)
    for _ in range(completions):
        metrics.completed(STATS, "stop")
    return metrics


def values(text: bytes) -> dict[str, float]:
    lines = [line for line in text.decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def test_counters_and_histograms_add_up() -> None:
    figures = Figures()
    figures.put("a", 0, measured(2).samples())
    figures.put("b", 0, measured(1).samples())
    found = values(figures.text(measured(0, running=2)))
    assert found["vllm:prompt_tokens_total"] == 300
    assert found['vllm:request_success_total{finished_reason="stop"}'] == 3
    assert found["vllm:request_prefill_time_seconds_count"] == 3
    assert found['vllm:request_prefill_time_seconds_bucket{le="0.005"}'] == 3
    assert found["monotape_engine_restarts"] == 3
    assert found["vllm:num_requests_running"] == 2  # the front's
    assert found["monotape_decode_tokens_per_second"] == 1000  # not the sum of two


def test_a_client_that_leaves_counts_once() -> None:
    figures, replica, front = Figures(), measured(1), measured(0)
    replica.cancelled.inc()
    front.cancelled.inc(2)  # one of them before a replica had its request
    figures.put("a", 0, replica.samples())
    assert values(figures.text(front))["monotape_disconnects_total"] == 2


def test_the_latest_figures_of_a_replica_take_the_place_of_earlier_ones() -> None:
    figures = Figures()
    for count in (1, 2, 3):
        figures.put("a", count, measured(count).samples())
    assert values(figures.text(measured(0)))["vllm:prompt_tokens_total"] == 300


def test_figures_that_arrive_late_do_not_take_counters_back() -> None:
    figures = Figures()
    for count in (1, 3, 2):
        figures.put("a", count, measured(count).samples())
    assert values(figures.text(measured(0)))["vllm:prompt_tokens_total"] == 300


def test_every_series_of_a_single_server_is_there() -> None:
    figures = Figures()
    figures.put("a", 0, measured(1).samples())
    single = {name for name in values(measured(1).text()) if "_created" not in name}
    assert single <= set(values(figures.text(measured(0))))


def test_a_replica_writes_no_text_for_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_metrics, "generate_latest", None)
    service: Any = SimpleNamespace(metrics=measured(3))
    replica = Replica.__new__(Replica)
    replica._service, replica._name, replica._numbers = service, "a", itertools.count()
    figures = Figures()
    message = replica.figures()
    figures.put(message["replica"], message["number"], message["samples"])
    assert values(figures.text(measured(0)))["vllm:prompt_tokens_total"] == 300


def test_labels_and_kinds_stay() -> None:
    single, figures = measured(2), Figures()
    single.missed("nothing is kept yet")
    figures.put("a", 0, single.samples())
    alone = [line for line in single.text().decode().splitlines() if "_created" not in line]
    together = figures.text(measured(0)).decode().splitlines()
    assert [line for line in alone if line not in together] == [
        "monotape_engine_restarts 1.0"  # of two
    ]
