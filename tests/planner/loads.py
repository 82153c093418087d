"""Short ways to the planner's objects, for its tests."""

from __future__ import annotations

from typing import Any

from monotape.planner.accounting import shape_from_config
from monotape.planner.box import Box
from monotape.planner.catalogue import find_gpu, find_model
from monotape.planner.load import Load
from monotape.planner.precision import kv_bytes_for, precision_for


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    """A built-in config, with some fields changed; None takes a field away."""
    known = find_model(name)
    assert known is not None
    changed = {**known.config, **changes}
    return {key: value for key, value in changed.items() if key not in changes or changes[key] is not None}


def load_of(name: str, dtype: str = "auto", kv: str = "bf16") -> Load:
    config = config_of(name)
    return Load(shape_from_config(config), precision_for(dtype, config), kv_bytes_for(kv))


def box_of(gpu: str, count: int = 1, **figures: Any) -> Box:
    return Box(find_gpu(gpu), count, **figures)
