"""Counters for Prometheus, under vLLM's names where it has one, so that existing dashboards work."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from monotape.server.engine import wire

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_BETWEEN = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1)


#: Values by family, name and labels.
Samples = dict[tuple[str, str, tuple[tuple[str, str], ...]], float]


class Metrics:
    """One server's figures."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "monotape_http_requests", "Answers by route and status.", ["route", "status"], registry=registry
        )
        self.finished = Counter(
            "vllm:request_success", "Whole completions by the reason for which they ended. Of those whose client left, "
            "only the tokens are counted.", ["finished_reason"], registry=registry,
        )  # fmt: skip
        self.prompt_tokens = Counter(
            "vllm:prompt_tokens", "Tokens of the prompts that the engine began, even if the client left.",
            registry=registry,
        )  # fmt: skip
        self.new_tokens = Counter(
            "vllm:generation_tokens", "Tokens made, even if the client left.", registry=registry
        )
        self.cached_tokens = Counter(
            "vllm:prefix_cache_hits",
            "Those of vllm:prompt_tokens found in the KV of earlier requests.",
            registry=registry,
        )
        self.misses = Counter(
            "monotape_prefix_cache_misses",
            "Prompts of which nothing was cached but the template's own tokens.",
            ["reason"],
            registry=registry,
        )
        self.changed_prompts = Counter(
            "monotape_changed_prefixes", "Prompts that repeat an earlier one after a change within it.",
            registry=registry,
        )  # fmt: skip
        self.changed_tokens = Counter(
            "monotape_changed_prefix_tokens", "Prompt tokens computed again because of a change before them.",
            registry=registry,
        )  # fmt: skip
        self.drafted_tokens = Counter(
            "vllm:spec_decode_num_draft_tokens", "Drafts that were checked.", registry=registry
        )
        self.accepted_tokens = Counter(
            "vllm:spec_decode_num_accepted_tokens", "Drafts that are part of an answer.", registry=registry
        )
        self.refused = Counter("monotape_queue_full", "Requests answered with 429.", registry=registry)
        self.cancelled = Counter("monotape_disconnects", "Requests whose client left.", registry=registry)
        self.prefill = Histogram(
            "vllm:request_prefill_time_seconds", "From the start of a job to its first token.",
            buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self.between = Histogram(
            "vllm:time_per_output_token_seconds", "Mean time between the tokens of an answer.",
            buckets=_BETWEEN, registry=registry,
        )  # fmt: skip
        self.decode_speed = Gauge(
            "monotape_decode_tokens_per_second", "Decode speed of the last completion.", registry=registry
        )

    def watch(
        self, *, running: Callable[[], int], waiting: Callable[[], int], restarts: Callable[[], int]
    ) -> None:
        """Figures that are read when a client requests them."""
        for name, text, read in (
            ("vllm:num_requests_running", "Requests that are being answered.", running),
            ("vllm:num_requests_waiting", "Requests in the queue.", waiting),
            ("monotape_engine_restarts", "How often the engine process was started again.", restarts),
        ):
            Gauge(name, text, registry=self.registry).set_function(read)

    def completed(self, stats: wire.Stats, reason: str) -> None:
        """A whole completion has been given to its client."""
        self.finished.labels(reason).inc()
        self.computed(stats)

    def computed(self, stats: wire.Stats) -> None:
        """What the engine has done for a completion, whether or not its client is still there."""
        self.prompt_tokens.inc(stats.prompt_tokens)
        self.cached_tokens.inc(stats.cached_tokens)
        self.new_tokens.inc(stats.new_tokens)
        self.drafted_tokens.inc(stats.drafted_tokens)
        self.accepted_tokens.inc(stats.accepted_tokens)
        if stats.prefill_ns is not None:
            self.prefill.observe(stats.prefill_ns / 1e9)
        if stats.new_tokens > 1 and stats.decode_ns:
            self.between.observe(stats.decode_ns / 1e9 / (stats.new_tokens - 1))
            self.decode_speed.set((stats.new_tokens - 1) / stats.decode_ns * 1e9)

    def missed(self, reason: str, *, changed: bool = False) -> None:
        """Reasons hold numbers; their first words are enough to count them by. `changed` is the better reason."""
        kinds = {"nothing": "first", "no": "different", "the": "scored"}
        kind = "changed" if changed else kinds.get(reason.split()[0], "dropped")
        self.misses.labels(kind).inc()

    def changed(self, at: int, again: int) -> None:
        self.changed_prompts.inc()
        self.changed_tokens.inc(again)

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def samples(self) -> Samples:
        """Every value, in a third of the time that their text takes."""
        return {
            (family.name, sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in self.registry.collect()
            for sample in family.samples
            if not sample.name.endswith("_created")
        }
