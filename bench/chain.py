"""Where a layer's time goes when its bytes cost next to nothing: the chain of stages, from input words to output words.

    python bench/chain.py --save
    python bench/chain_figure.py reports/chain-h200.json docs/figures/chain.svg

Three kernels: a small model, an eighth of a larger one that never talks to its peers, and a shape of which a worker has
a tile or two of every stage: what that takes a layer is the floor of this design. Tokens per second come from kernels
without clocks. The parts of a stage come from a kernel with clocks, which is about a tenth slower. Each part is the
mean over workers and tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from machine_code import evidence
from measuring import short_name
from monotape.backends.cuda.bandwidth import measure_bandwidth
from monotape.backends.cuda.driver import device_name, processors
from monotape.backends.cuda.loading import load_model
from monotape.backends.cuda.rank_view import rank_plan
from monotape.backends.cuda.trace import StageTime, TraceRecords, stage_times, table, token_s
from recipes import BANDWIDTH
from report import publish, spread
from scaling import CONTEXT, Alone, Setup, compile_all
from shapes import RandomCheckpoint

SETUPS = (Setup("qwen2.5-0.5b", 1, "one"), Setup("dense-2b", 8, "silent"), Setup("one-tile", 1, "one"))
#: After the last layer.
ENDING = ("head", "sample")
PARTS = ("waiting", "multiplying", "meeting", "finishing")
TRACED_TOKENS = 16


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--requests", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="keep the result under reports/")
    return parser.parse_args()


def parts_ns(stage: StageTime, layers: int, scale: float = 1) -> dict[str, float]:
    """Of one layer. Waiting for pages is a part of multiplying."""
    found = {part: round(scale * 1e9 * getattr(stage, f"{part}_s") / layers, 1) for part in PARTS}
    return found | {"pages": round(scale * 1e9 * stage.starved_s / layers, 1)}


def chain_of(recorded: TraceRecords, layers: int) -> dict[str, Any]:
    """The stages of a layer and what is between them, and what follows the last layer; ns.

    All are means over all workers. `few` are stages in which few workers take part: the mean over those. The others
    wait for them in the next stage.
    """
    times = stage_times(recorded)
    whole = token_s(recorded)
    workers = max(stage.workers for stage in times)
    between = max(0.0, whole - sum(stage.time_s for stage in times))
    return {
        "traced_token_us": round(1e6 * whole, 2),
        "layer": {stage.stage: parts_ns(stage, layers) for stage in times if stage.stage not in ENDING},
        "few": {
            stage.stage: {"workers": stage.workers, **parts_ns(stage, layers, workers / stage.workers)}
            for stage in times
            if 2 * stage.workers < workers and stage.stage not in ENDING
        },
        "between_ns": round(1e9 * between / layers, 1),
        "ending": {stage.stage: parts_ns(stage, 1) for stage in times if stage.stage in ENDING},
    }


def layer_ns(row: dict[str, Any]) -> float:
    """Of the traced kernel: all stages of a layer, and between them."""
    stages = row["chain"]["layer"].values()
    return float(sum(stage[part] for stage in stages for part in PARTS) + row["chain"]["between_ns"])


def measured(setup: Setup, options: argparse.Namespace, bandwidth: float) -> dict[str, Any]:
    workers, context = processors(), CONTEXT + options.tokens
    plan, spec = setup.plan(workers, context), setup.spec()
    own = rank_plan(plan.plan, 0)
    one = Alone(
        setup, load_model(spec, own, RandomCheckpoint(setup.model, False, **setup.changes)), workers, context
    )
    speeds = one.speeds(0, options.tokens, options.requests)
    recorded = one.record(TRACED_TOKENS)
    one.backend.close()
    print(f"\n{name_of(setup)}:\n{table(recorded, bandwidth)}", flush=True)
    return {
        "model": setup.model, "ranks": setup.ranks, "setting": setup.setting, "layers": spec.layers,
        "bytes_per_token": own.token_bytes(CONTEXT + options.tokens // 2), "tokens_per_second": spread(speeds),
        "chain": chain_of(recorded, spec.layers),
    }  # fmt: skip


def name_of(setup: Setup) -> str:
    return setup.model if setup.ranks == 1 else f"{setup.model}, one of {setup.ranks} ranks, {setup.setting}"


def bars(row: dict[str, Any]) -> dict[str, dict[str, float]]:
    """The stages of a layer with their parts: those of few workers as these have them, and named so."""
    few = row["chain"]["few"]
    return {
        f"{stage} (workers: {few[stage]['workers']})" if stage in few else stage: few.get(stage, parts)
        for stage, parts in row["chain"]["layer"].items()
    }


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """A line a stage: ns of one layer."""
    lines = [f"| shape | stage | {' | '.join(PARTS)} | of it for pages |", "|" + " --- |" * (len(PARTS) + 3)]
    for row in rows:
        name = name_of(Setup(row["model"], row["ranks"], row["setting"]))
        for stage, parts in bars(row).items():
            shown = " | ".join(f"{parts[part]:,.0f}" for part in PARTS)
            lines.append(f"| {name} | {stage} | {shown} | {parts['pages']:,.0f} |")
        ending = f"between stages {row['chain']['between_ns']:,.0f}, a layer {layer_ns(row):,.0f}"
        lines.append(f"| {name} | {ending} |" + " |" * (len(PARTS) + 1))
    return "\n".join(lines)


def main() -> None:
    options = parse_arguments()
    workers, context = processors(), CONTEXT + options.tokens
    recipes = [setup.recipe(workers, context, trace=trace) for setup in SETUPS for trace in (False, True)]
    compile_all(recipes)
    bandwidth = measure_bandwidth()
    rows = [measured(setup, options, bandwidth) for setup in SETUPS]
    print(markdown(rows))
    gpu = short_name(device_name())
    publish(
        f"chain-{gpu}",
        {
            "gpu": gpu, **evidence([*recipes, BANDWIDTH]), "bandwidth": bandwidth, "context": CONTEXT,
            "tokens": options.tokens, "traced_tokens": TRACED_TOKENS, "results": rows,
        },
        save=options.save,
    )  # fmt: skip


if __name__ == "__main__":
    main()
