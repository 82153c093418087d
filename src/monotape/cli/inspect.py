"""Show what a model is and how this machine would run it: the whole plan, without loading a weight."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from monotape.cli.options import add_setting, integer
from monotape.engine.config import EngineConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a name, a Hugging Face id, a folder or a GGUF file")
    fields = {field.name: field for field in dataclasses.fields(EngineConfig)}
    for name in ("dtype", "head_dtype", "kv_dtype", "speculation"):
        add_setting(parser, fields[name])
    parser.add_argument(
        "--backend",
        default="auto",
        metavar="NAME",
        help="plan for: auto (a Hopper GPU, else the CPU), cpu, cuda, hip (an MI300X, never run on hardware)",
    )
    parser.add_argument(
        "--workers", type=integer, metavar="N", help="plan for this many threads or multiprocessors"
    )
    parser.add_argument("--tp", type=integer, metavar="N", help="plan for this many ranks")
    parser.add_argument("--max-model-len", type=integer, metavar="N", help="plan for this context")
    parser.add_argument("--json", action="store_true", help="print one object")


def main(options: argparse.Namespace) -> int:
    from monotape.compiler.gpu import drafting_plan
    from monotape.engine.kv_room import room_in_memory
    from monotape.engine.loading import planned
    from monotape.engine.startup import context_for
    from monotape.models.registry import spec_from_config
    from monotape.plan.gpu import GpuPlan
    from monotape.plan.gpu_text import dump_gpu
    from monotape.plan.text import dump
    from monotape.weights.check import check_tensors
    from monotape.weights.formats import stored_formats
    from monotape.weights.hub import resolve
    from monotape.weights.open import open_checkpoint

    checkpoint = open_checkpoint(resolve(options.model, True))
    spec = spec_from_config(checkpoint.config)
    check_tensors(spec, checkpoint)
    config = EngineConfig(
        model=options.model, max_model_len=options.max_model_len, workers=options.workers, tp=options.tp
    )
    context = context_for(config, spec, room_in_memory(config, spec))
    plan = planned(
        options.backend, spec, checkpoint,
        dtype=options.dtype, head_dtype=options.head_dtype, kv_dtype=options.kv_dtype, context=context,
        workers=options.workers, tp=options.tp,
    )  # fmt: skip
    drafting = drafting_plan(spec, plan) if options.speculation and isinstance(plan, GpuPlan) else None
    memory = _memory(plan, drafting)
    if options.json:
        facts: dict[str, Any] = {
            "model": {**_facts(spec), "stored_as": stored_formats(checkpoint)},
            "plan": {"digest": plan.digest, **_plain(plan)},
        }
        if drafting:
            facts["drafts"] = {"rows_a_pass": drafting.ranks[0].rows_a_pass}
        print(json.dumps({**facts, **({"memory": dataclasses.asdict(memory)} if memory else {})}))
        return 0
    for name, value in _facts(spec).items():
        print(f"{name:<16} {_shown(value)}")
    shares = (f"{name} {100 * share:.1f} %" for name, share in stored_formats(checkpoint).items())
    print(f"{'stored as':<16} {', '.join(shares)}{_packed(checkpoint.source)}")
    print()
    print(dump_gpu(plan) if isinstance(plan, GpuPlan) else dump(plan), end="")
    if drafting:
        rows = drafting.ranks[0].rows_a_pass
        print(f"\nDrafts           a second kernel for the same tapes, with passes of up to {rows} rows")
    if memory:
        print(f"\nGPU memory       {memory}" + (" (a rank)" if len(plan.ranks) > 1 else ""))
    return 0


def _packed(source: str) -> str:
    """The embedded model is kept in fewer bits than the files that it is loaded from."""
    from monotape.weights import embedded

    if not embedded.is_embedded(source):
        return ""
    return f", unpacked from {embedded.PACKED.stat().st_size / 1e6:.1f} MB in 4 and 8 bits"


def _memory(plan: Any, drafting: Any) -> Any:
    """What the GPU of the first rank must have; None for other machines, which need the weights and little else."""
    from monotape.plan.gpu import GpuPlan

    if not isinstance(plan, GpuPlan):
        return None
    from monotape.backends.cuda.memory import memory_plan

    return memory_plan(plan, drafting=drafting)


def _facts(spec: Any) -> dict[str, Any]:
    rope = spec.rope.rule if spec.rope.rule != "none" else "plain"
    windows = sorted({window for window in spec.windows if window}, reverse=True)
    return {
        "architecture": spec.architecture, "family": spec.family, "parameters": spec.parameters,
        "active_per_token": spec.active_parameters,
        "layers": spec.layers, "width": spec.width, "heads": spec.heads, "kv_heads": spec.kv_heads,
        "head_dim": spec.head_dim, "ffn": spec.ffn, "vocab": spec.vocab, "context": spec.context,
        "rope": rope, "sliding_windows": windows, "qkv_bias": spec.qkv_bias, "qk_norm": spec.qk_norm,
        "experts": _experts(spec), "sinks": spec.sinks, "tied_embedding": spec.tied,
        "lanes": _lanes(spec), "notes": list(spec.notes),
    }  # fmt: skip


def _experts(spec: Any) -> str:
    experts = spec.experts
    if experts is None:
        return "none"
    over = "the chosen ones" if experts.softmax.value == "chosen" else "all"
    return f"{experts.chosen} of {experts.count}, weighed by a softmax over {over}"


def _lanes(spec: Any) -> str:
    lanes = spec.lanes
    if lanes is None:
        return "none"
    delay = "never summed" if lanes.delay is None else f"summed {lanes.delay} modules late"
    return f"{lanes.count}, {delay}, head reads their {lanes.head}"


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return "; ".join(map(str, value)) or "none"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _plain(plan: Any) -> dict[str, Any]:
    """The plan as JSON can hold it: enumerations by their value."""
    text = json.dumps(dataclasses.asdict(plan), default=lambda value: value.value)
    plain: dict[str, Any] = json.loads(text)
    return plain
