"""A request under way: its place in the queue, and what it cost under the names that vLLM and llama.cpp give it.

info.py documents the objects.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from monotape.server.engine import wire
from monotape.server.service.gate import Turn


@dataclass(slots=True)
class Clock:
    """The times of one request: those before the engine on the server's clock, the rest on the backend's."""

    arrived_ns: int = field(default_factory=time.monotonic_ns)
    render_ns: int = 0
    tokenize_ns: int = 0
    queued_ns: int = 0  # how long it waited
    reserved_ns: int = 0  # when it began to wait
    started_ns: int = 0  # when the engine began
    answers: int = 1  # to each prompt
    miss: str | None = None  # why nothing of the prompt was cached, or next to nothing
    changed: tuple[int, int] | None = None  # engine/changed_prefix.py: at, again
    done: list[wire.Stats] = field(default_factory=list)
    turn: Turn | None = None  # its place in the queue, once it has one
    on_start: Callable[[], None] = lambda: None  # called when the engine begins with its first completion

    def started(self, time_ns: int) -> None:
        if not self.started_ns:
            self.started_ns = time_ns
            self.on_start()

    def leave(self) -> None:
        """The request has ended, in whatever way: its place is free."""
        if self.turn is not None:
            self.turn.leave()

    def reserved(self) -> None:
        self.reserved_ns = time.monotonic_ns()

    def entered(self) -> None:
        self.queued_ns = time.monotonic_ns() - self.reserved_ns

    def summary(self) -> str:
        """For the log: tokens, the time to the first of them as the client has seen it, and the speed of the rest."""
        prompts = self.done[:: self.answers]
        cached = sum(part.cached_tokens for part in prompts)
        why = f" ({self.miss})" if self.miss else ""
        if self.changed is not None:
            at, again = self.changed
            why = f" (an earlier prompt changed at token {at}; {again} tokens after it are the same)"
        figures = self.metrics()
        parts = [
            f"prompt {sum(part.prompt_tokens for part in prompts)}",
            f"cached {cached}{why}",
            f"answer {sum(part.new_tokens for part in self.done)} tokens",
        ]
        if drafted := sum(part.drafted_tokens for part in self.done):
            parts.append(f"drafts {drafted}, accepted {sum(part.accepted_tokens for part in self.done)}")
        if (first_ms := figures["time_to_first_token_ms"]) is not None:
            parts.append(
                f"first after {first_ms:.0f} ms"
                if first_ms < 10_000
                else f"first after {first_ms / 1000:.0f} s"
            )
        if (speed := figures["decode_tokens_per_second"] or figures["tokens_per_second"]) is not None:
            parts.append(f"{speed:.1f} tok/s")
        return ", ".join(parts)

    def metrics(self) -> dict[str, Any]:
        """vLLM's names, and the decode speed by itself."""
        total = _summed(self.done)
        first_ns = None
        if total.prefill_ns is not None and self.started_ns:
            first_ns = self.started_ns - self.arrived_ns + total.prefill_ns
        generation_ns = (total.prefill_ns or 0) + total.decode_ns
        between = sum(max(0, part.new_tokens - 1) for part in self.done)
        return {
            "time_to_first_token_ms": _ms(first_ns),
            "generation_time_ms": _ms(generation_ns),
            "queue_time_ms": _ms(self.queued_ns),
            "mean_itl_ms": _ms(total.decode_ns / between) if between else None,
            "tokens_per_second": _rate(total.new_tokens, generation_ns),
            "decode_tokens_per_second": _rate(between, total.decode_ns),
        }

    def timings(self) -> dict[str, Any]:
        """llama.cpp's names, the spread between tokens and the phases of the request."""
        total = _summed(self.done)
        computed = total.prompt_tokens - total.cached_tokens
        between = sum(max(0, part.new_tokens - 1) for part in self.done)
        gaps = self.done[0].gaps_ns if self.done else None
        return {
            "cache_n": total.cached_tokens,
            "prompt_n": computed,
            "prompt_ms": _ms(total.prefill_ns),
            "prompt_per_token_ms": _ms(total.prefill_ns / computed)
            if total.prefill_ns and computed
            else None,
            "prompt_per_second": _rate(computed, total.prefill_ns or 0),
            "predicted_n": total.new_tokens,
            "predicted_ms": _ms(total.decode_ns),
            "predicted_per_token_ms": _ms(total.decode_ns / between) if between else None,
            "predicted_per_second": _rate(between, total.decode_ns),
            "itl_p50_ms": _ms(gaps[0]) if gaps else None,
            "itl_p99_ms": _ms(gaps[1]) if gaps else None,
            "bytes_per_token": total.bytes_per_token,
            "draft_n": total.drafted_tokens,
            "draft_n_accepted": total.accepted_tokens,
            "phases": self._phases(total),
        }

    def _phases(self, total: wire.Stats) -> list[dict[str, Any]]:
        began_ns = self.started_ns - self.arrived_ns
        tokenized_ns = self.reserved_ns - self.arrived_ns - self.tokenize_ns
        phases = [
            ("render", tokenized_ns - self.render_ns, self.render_ns),
            ("tokenize", tokenized_ns, self.tokenize_ns),
            ("queue", self.reserved_ns - self.arrived_ns, self.queued_ns),
            ("prefill", began_ns, total.prefill_ns or 0),
            ("decode", began_ns + (total.prefill_ns or 0), total.decode_ns),
        ]
        return [
            {"phase": name, "start_ms": _ms(max(0, start)), "ms": _ms(took)} for name, start, took in phases
        ]


def so_far(tokens: int, decode_ns: int) -> dict[str, Any]:
    """`timings` of a chunk in the middle of a stream."""
    return {"predicted_n": tokens, "predicted_ms": _ms(decode_ns)}


def _summed(parts: Sequence[wire.Stats]) -> wire.Stats:
    """Several completions of one request: tokens and times add up, the prompt and its time are the first one's."""
    if not parts:
        return wire.Stats(0, 0, 0, None, 0, None, 0)
    first = parts[0]
    return wire.Stats(
        prompt_tokens=first.prompt_tokens,
        cached_tokens=first.cached_tokens,
        new_tokens=sum(part.new_tokens for part in parts),
        prefill_ns=first.prefill_ns,
        decode_ns=sum(part.decode_ns for part in parts),
        gaps_ns=first.gaps_ns,
        bytes_per_token=sum(part.bytes_per_token for part in parts) // len(parts),
        drafted_tokens=sum(part.drafted_tokens for part in parts),
        accepted_tokens=sum(part.accepted_tokens for part in parts),
    )


def _ms(nanoseconds: float | None) -> float | None:
    return None if nanoseconds is None else round(nanoseconds / 1e6, 3)


def _rate(count: int, nanoseconds: float) -> float | None:
    return round(count / nanoseconds * 1e9, 3) if count > 0 and nanoseconds > 0 else None
