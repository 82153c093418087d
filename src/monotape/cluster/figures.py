"""The figures of all replicas as one text for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

_LATEST = ("monotape_decode_tokens_per_second",)  # of which the sum would mean nothing
_FRONT = ("vllm:num_requests_running", "vllm:num_requests_waiting")  # the front knows them at any time


class Figures:
    """The last figures of each replica, with those that are gone: counters must not go back."""

    def __init__(self) -> None:
        self._texts: dict[str, bytes] = {}

    def put(self, replica: str, text: bytes) -> None:
        self._texts.pop(replica, None)
        self._texts[replica] = text  # the latest stands last

    def text(self, own: bytes) -> bytes:
        """All of them together with the front's own."""
        registry = CollectorRegistry()
        registry.register(_Combined([*self._texts.values(), own]))
        return generate_latest(registry)


class _Combined:
    def __init__(self, texts: Iterable[bytes]) -> None:
        self._families: dict[str, Metric] = {}
        self._values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
        for text in texts:
            for family in text_string_to_metric_families(text.decode()):
                if not family.name.endswith("_created"):
                    self._add(family)

    def _add(self, family: Metric) -> None:
        self._families[family.name] = family
        values = self._values.setdefault(family.name, {})
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            replaced = family.name in _FRONT or (family.name in _LATEST and sample.value)
            values[key] = sample.value if replaced else values.get(key, 0.0) + sample.value

    def collect(self) -> Iterable[Metric]:
        for name, family in self._families.items():
            made = Metric(name, family.documentation, family.type)
            for (sample, labels), value in self._values[name].items():
                made.add_sample(sample, dict(labels), value)
            yield made
