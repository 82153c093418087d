"""The figures of all replicas as one text for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric

from monotape.server.service.metrics import Metrics, Samples

_LATEST = ("monotape_decode_tokens_per_second",)  # of which the sum would mean nothing
#: The front knows them at any time, and a client that leaves has left the front and its replica.
_FRONT = ("vllm:num_requests_running", "vllm:num_requests_waiting", "monotape_disconnects")


class Figures:
    """The last figures of each replica, with those that are gone: counters must not go back."""

    def __init__(self) -> None:
        self._replicas: dict[str, tuple[int, Samples]] = {}

    def put(self, replica: str, number: int, samples: Samples) -> None:
        """`number` counts a replica's messages: each answer brings them by a way of its own, so a later one can
        overtake an earlier one, which then holds less.
        """
        latest, _ = self._replicas.get(replica, (-1, {}))
        if number > latest:
            self._replicas.pop(replica, None)
            self._replicas[replica] = number, samples  # the latest stands last

    def text(self, own: Metrics) -> bytes:
        """All of them together with the front's own."""
        registry = CollectorRegistry()
        replicas = [samples for _, samples in self._replicas.values()]
        registry.register(_Combined(own, [*replicas, own.samples()]))
        return generate_latest(registry)


class _Combined:
    """The families of one server, with the samples of several."""

    def __init__(self, server: Metrics, replicas: Iterable[Samples]) -> None:
        self._server = server
        self._values: dict[str, Samples] = {}
        for samples in replicas:
            for key, value in samples.items():
                self._add(key, value)

    def _add(self, key: tuple[str, str, tuple[tuple[str, str], ...]], value: float) -> None:
        family = key[0]
        values = self._values.setdefault(family, {})
        replaced = family in _FRONT or (family in _LATEST and value)
        values[key] = value if replaced else values.get(key, 0.0) + value

    def collect(self) -> Iterable[Metric]:
        for family in self._server.registry.collect():
            made = Metric(family.name, family.documentation, family.type)
            for (_, sample, labels), value in self._values.get(family.name, {}).items():
                made.add_sample(sample, dict(labels), value)
            yield made
