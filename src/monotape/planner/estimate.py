"""The planner's answer: one model on one machine at one context, with everything that can be said before buying it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from monotape.errors import UsageError
from monotape.planner.accounting import shape_from_config
from monotape.planner.box import MICRO, Box, Ceiling, Fit, LaunchTax, balance, ceilings, fit, launch_taxes
from monotape.planner.catalogue import find_gpu
from monotape.planner.engines import (
    DEFAULT_ENGINE,
    OWN_ENGINES,
    SUMS_PER_LAYER,
    Engine,
    Pass,
    cpu_engine,
    find_engine,
    share_engine,
)
from monotape.planner.load import Load
from monotape.planner.precision import AUTO, Precision, kv_bytes_for, precision_for, with_head
from monotape.planner.runs import CPU, obstacles
from monotape.planner.shape import ModelShape
from monotape.planner.sources import Source, find_source

DEFAULT_MODEL = "llama-3.1-8b"
DEFAULT_GPU = "h200"
DEFAULT_CONTEXT = 4096  # or the model's own, where that is shorter
MAX_CONTEXT = 1 << 32  # where a config names no limit


@dataclass(frozen=True, slots=True)
class Estimate:
    """What is known of a model on a machine. Everything else is computed from these."""

    source: Source
    load: Load
    box: Box
    context: int
    engine: Engine

    @property
    def shape(self) -> ModelShape:
        return self.load.shape

    @property
    def bytes_by_group(self) -> dict[str, float]:
        return self.load.bytes_by_group(self.context)

    @property
    def token_bytes(self) -> float:
        return self.load.pass_bytes(self.context)

    @property
    def ceilings(self) -> tuple[Ceiling, ...]:
        return ceilings(self.box, self.token_bytes)

    @property
    def fit(self) -> Fit:
        return fit(self.load, self.box, self.context)

    @property
    def launch_taxes(self) -> tuple[LaunchTax, ...]:
        return launch_taxes(self.box, len(self.shape.layers))

    @property
    def obstacles(self) -> tuple[str, ...]:
        """Why Monotape cannot run this; for predictions of other engines it does not matter."""
        return obstacles(self.load, self.box) if self.engine.name in OWN_ENGINES else ()

    @property
    def prediction(self) -> Pass | None:
        """None where the model does not fit, or the latency of the link between devices is unknown.

        Where there are `obstacles` it is what Monotape would do if it ran there.
        """
        if self.fit.fits is False or self.box.link[0] is None:
            return None
        return self.engine.time(self.load, self.box, self.context, 1)

    @property
    def flops_per_byte(self) -> float:
        return self.load.flops(self.context) / self.token_bytes


def estimate(
    model: str = DEFAULT_MODEL,
    *,
    gpu: str = DEFAULT_GPU,
    count: int = 1,
    dtype: str = AUTO,
    head_dtype: str = AUTO,
    kv_dtype: str = "bf16",
    context: int | None = None,
    engine: str = DEFAULT_ENGINE,
    mbu: float | None = None,
    bandwidth_tbs: float | None = None,
    memory_gb: float | None = None,
    link_us: float | None = None,
    launch_us: float | None = None,
    kernels_per_layer: int = 10,
    reports: Path | None = None,
) -> Estimate:
    """How fast `model` can run for one user on `count` x `gpu`. Needs no GPU, reads no weights."""
    box = Box(find_gpu(gpu), count, bandwidth_tbs, memory_gb, link_us, launch_us, kernels_per_layer)
    chosen = _engine(engine, mbu, reports, box)
    source = find_source(model)
    shape = shape_from_config(source.config)
    load = Load(shape, _precision(source, dtype, head_dtype), kv_bytes_for(kv_dtype))
    if context is None:
        context = min(DEFAULT_CONTEXT, shape.context or MAX_CONTEXT)
    check_context(context, shape, source.name, "--context")
    found = Estimate(source, load, box, context, chosen)
    if found.obstacles:
        return replace(found, engine=replace(chosen, title=f"{chosen.title}, if it ran there"))
    return found


def _precision(source: Source, dtype: str, head_dtype: str) -> Precision:
    if dtype != AUTO or source.stored is None:
        return precision_for(dtype, source.config, head_dtype)
    if head_dtype == AUTO:
        return source.stored
    return with_head(source.stored, precision_for(head_dtype, source.config))


def check_context(context: int, shape: ModelShape, model: str, flag: str) -> None:
    """Refuses a context that is negative or longer than the model's."""
    most = shape.context or MAX_CONTEXT
    if context < 0:
        raise UsageError(f"{flag} {context} is negative.", f"Give 0 to {most}, the context of {model}.")
    if context > most:
        raise UsageError(
            f"{flag} asks for {context} tokens, but the context of {model} ends at {most}.",
            f"Give 0 to {most}.",
        )


def _engine(name: str, mbu: float | None, reports: Path | None, box: Box) -> Engine:
    if mbu is not None and name not in (DEFAULT_ENGINE, "share"):
        raise UsageError(f"--mbu and --engine {name} contradict each other.", "Give one of them.")
    if name == "share" and mbu is None:
        raise UsageError("--engine share needs a share.", "Give --mbu, like --mbu 0.36.")
    if mbu is not None:
        return share_engine(mbu)
    if name == "cpu" and box.gpu.name != CPU:
        raise UsageError(
            f"--engine cpu says nothing about {box.gpu.label}.",
            "Give --gpu cpu, and --bandwidth as `monotape doctor` measures it.",
        )
    if name == "cpu" or (name == DEFAULT_ENGINE and box.gpu.name == CPU):
        from monotape.planner.reports import built_in_points, cpu_shares, load_reports, own_points

        points = built_in_points() if reports is None else own_points(load_reports(reports))
        return cpu_engine(*cpu_shares(points))
    return find_engine(name)


def as_json(found: Estimate) -> dict[str, Any]:
    """The estimate as one object for programs. Bytes are bytes, speeds are tokens a second."""
    shape, room, prediction = found.shape, found.fit, found.prediction
    link_us, link_source = found.box.link
    return {
        "model": found.source.name,
        "config": found.source.origin,
        "architecture": shape.architecture,
        "notes": list(shape.notes),
        "gpu": found.box.gpu.name,
        "count": found.box.count,
        "context": found.context,
        "parameters": {"total": shape.total, "active": shape.active},
        "precision": {"weights": found.load.precision.name, "note": found.load.precision.note},
        "weight_bytes": found.load.weight_bytes,
        "kv_value_bytes": found.load.kv_value_bytes,
        "bytes_per_token": {**found.bytes_by_group, "total": found.token_bytes},
        "ceilings": {
            one.name: {
                "terabytes_per_second": one.terabytes_per_second,
                "tokens_per_second": one.tokens_per_second,
                "source": one.source,
            }
            for one in found.ceilings
        },
        "flops_per_byte": {
            "token": found.flops_per_byte,
            "device_bf16": balance(found.box),
            "device_fp8": balance(found.box, fp8=True),
        },
        "memory_per_device": {
            "weights": room.weights, "kv": room.kv, "memory": room.memory, "share": room.share, "fits": room.fits,
        },
        "launch_tax": [
            {
                "kernels_per_layer": tax.kernels_per_layer, "layers": tax.layers, "launch_us": tax.launch_us,
                "token_us": tax.token_us, "most_tokens_per_second": tax.most_tokens_per_second, "source": tax.where,
            }
            for tax in found.launch_taxes
        ],
        "link": {"sum_us": link_us, "sums_per_layer": SUMS_PER_LAYER, "source": link_source},
        "prediction": None if prediction is None else _prediction(found, prediction),
    }  # fmt: skip


def _prediction(found: Estimate, prediction: Pass) -> dict[str, Any]:
    without_link = prediction.stream_us + prediction.exposed_us
    speed, runs = 1 / (prediction.total_us * MICRO), not found.obstacles
    return {
        "engine": found.engine.name,
        "runs": runs,
        "obstacles": list(found.obstacles),
        "tokens_per_second": speed if runs else None,
        "tokens_per_second_if_it_ran": speed,
        "tokens_per_second_if_links_hide": 1 / (without_link * MICRO),
        "token_us": prediction.total_us,
        "stream_us": prediction.stream_us,
        "exposed_us": prediction.exposed_us,
        "link_us": prediction.link_us,
        "share_of_streaming": prediction.stream_us / prediction.total_us,
        "assumption": found.engine.assumption(found.load, found.box),
    }
