"""How many replicas there are and what each of them gets; the command line derives its flags from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from monotape.errors import UsageError


def _setting(default: Any, text: str, metavar: str = "N") -> Any:
    return field(default=default, metadata={"help": text, "metavar": metavar})


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployConfig:
    """The size of a deployment."""

    replicas: int = _setting(1, "engines, each with its own process and its own GPUs or cores")
    max_replicas: int | None = _setting(
        None, "add replicas up to this many while requests wait, and remove them again (default: never)"
    )
    target_requests: int = _setting(
        2, "requests a replica should have, running and waiting, before another is added"
    )
    upscale_delay: int = _setting(
        5, "seconds for which there must be more requests than that before a replica is added", "SECONDS"
    )
    downscale_delay: int = _setting(
        300, "seconds for which a replica must have been one too many before it is removed", "SECONDS"
    )
    conversation_queue: int | None = _setting(
        None,
        "requests that may wait at a replica before its conversations go to others, which compute them anew "
        "(default: --max-queue)",
    )
    gpus_per_replica: int | None = _setting(
        None,
        "GPUs of each replica; more than one share the model, as --tp does (default: --tp, or 1, where there are GPUs)",
    )
    cpus_per_replica: int | None = _setting(
        None, "cores of each replica (default: all cores, divided by the replicas; 1 beside a GPU)"
    )
    address: str | None = _setting(
        None, "a running Ray cluster: host:port, or auto (default: Ray on this machine alone)", "ADDRESS"
    )

    def __post_init__(self) -> None:
        bounds = {
            "replicas": (1, 1000), "max_replicas": (self.replicas, 1000), "target_requests": (1, 1000),
            "upscale_delay": (0, 86_400), "downscale_delay": (0, 86_400),
            "conversation_queue": (0, 10_000), "gpus_per_replica": (0, 64), "cpus_per_replica": (1, 1024),
        }  # fmt: skip
        for name, (low, high) in bounds.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise UsageError(f"{name} is {value}.", f"It must be from {low} to {high}.")
