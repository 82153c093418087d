"""Starts slow background work before the rest of the engine is even imported."""

from __future__ import annotations

from monotape.engine.config import EngineConfig, may_use_gpu


def wake(config: EngineConfig) -> None:
    """Call it as soon as the configuration is known. It returns at once, and does nothing the second time."""
    if may_use_gpu(config.backend, config.dtype, config.workers):
        from monotape.backends.cuda.detection import wake_gpu

        wake_gpu()
