"""What one GPU of several does for a token: one rank's whole share on all of this GPU, its peers' words looped back.

    python bench/scaling.py --models dense-2b,llama-3.1-8b --ranks 1,2,4,8 --delays 0,1,2,3,5 --save

An emulation. One rank runs alone, with its own part of the weights, of the KV and of the vocabulary. What it would send
to its peers it sends to itself, a word for each peer, and a word counts only so many microseconds after it was sent, by
the GPU's own clock. `python bench/scaling_figure.py` draws the saved report.

tp is plain tensor parallelism: two sums a layer, each waited for. dtp folds each sum two modules (one layer) later and
reads the mean of all lanes in the head. silent never talks but in the head and the choice: no method can be faster.
--settings measures others: dtp1 folds one module later, -sum waits for the sums of the early modules, ladder folds
whole sums one module later. `python bench/lane_table.py` puts them beside the quality of trained models:

    python bench/scaling.py --models laneformer-32m --ranks 4,8 --delays 0,2 --settings all --name lanes --save
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

from machine_code import evidence
from measuring import integers, prompt_of, run_request, short_name
from monotape.backends.cuda.backend import CudaBackend
from monotape.backends.cuda.bandwidth import measure_bandwidth
from monotape.backends.cuda.driver import compile_kernel, device_name, processors
from monotape.backends.cuda.loading import LoadedModel, load_model
from monotape.backends.cuda.rank_view import rank_plan
from monotape.backends.cuda.trace import TraceRecords, stage_times, table
from monotape.errors import BackendError
from monotape.models.lanes import Lanes, delayed, ladder, silent
from monotape.models.spec import ModelSpec
from monotape.plan.gpu import GpuPlan
from recipes import BANDWIDTH, Recipe
from report import publish, spread
from shapes import SHAPES, RandomCheckpoint, all_shapes

CONTEXT = 32
DELAY_MODULES = 2
SETTINGS = ("tp", "dtp", "silent")
#: How the lanes of a setting talk, by their number; those of tp do not differ.
LANES: dict[str, Callable[[int], Lanes | None]] = {
    "one": lambda ranks: None,
    "tp": lambda ranks: None,
    "dtp": lambda ranks: delayed(ranks, DELAY_MODULES),
    "dtp2-sum": lambda ranks: delayed(ranks, 2, "sum"),
    "dtp1": lambda ranks: delayed(ranks, 1),
    "dtp1-sum": lambda ranks: delayed(ranks, 1, "sum"),
    "ladder": ladder,
    "silent": silent,
}
ALL_SETTINGS = tuple(name for name in LANES if name != "one")
ASSUMPTIONS = (
    "one rank alone on the GPU; its peers answer exactly as fast as it does itself",
    "a word arrives a fixed time after it was sent; sending takes stores into this GPU's memory, no link's bandwidth",
    "rank 0's share; where heads do not divide by the ranks it is padded to whole heads, which is more than fair",
    "random weights; greedy; prompts, whose rows are looped back too, are not measured",
)


@dataclass(frozen=True, slots=True)
class Setup:
    """A shape on so many ranks in a setting of LANES; of one rank there is one, "one"."""

    model: str
    ranks: int
    setting: str

    @property
    def changes(self) -> dict[str, int]:
        """Heads that every rank has alike: 20 of them become 24 for eight ranks."""
        config = all_shapes()[self.model]
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        if heads % self.ranks == 0:
            return {}
        own = -(-heads // self.ranks)
        return {
            "num_attention_heads": own * self.ranks,
            "num_key_value_heads": max(1, kv_heads // self.ranks) * self.ranks,
        }

    @property
    def lanes(self) -> Lanes | None:
        return LANES[self.setting](self.ranks)

    def recipe(self, workers: int, context: int, *, trace: bool = False) -> Recipe:
        """Facts of rank 0, whose kernel is measured."""
        return Recipe(
            shape=self.model, config=self.changes, workers=workers, context=context, ranks=self.ranks, lanes=self.lanes,
            link_delay=self.ranks > 1, trace=trace,
        )  # fmt: skip

    def spec(self) -> ModelSpec:
        return self.recipe(0, 0).spec()

    def plan(self, workers: int, context: int) -> GpuPlan:
        return self.recipe(workers, context).plan()

    def header(self, workers: int, context: int) -> str:
        return self.recipe(workers, context).header()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="dense-2b,llama-3.1-8b", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--ranks", type=integers, default=[1, 2, 4, 8])
    parser.add_argument("--delays", type=integers, default=[0, 1, 2, 3, 5], help="of the link, microseconds")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--requests", type=int, default=5)
    parser.add_argument(
        "--settings", type=settings, default=SETTINGS, help=f"all, or of {', '.join(ALL_SETTINGS)}"
    )
    parser.add_argument("--name", default="scaling", help="of the report")
    parser.add_argument("--save", action="store_true", help="keep the result under reports/")
    return parser.parse_args()


def settings(text: str) -> tuple[str, ...]:
    names = ALL_SETTINGS if text == "all" else tuple(text.split(","))
    if unknown := [name for name in names if name not in ALL_SETTINGS]:
        raise argparse.ArgumentTypeError(f"there is no setting {unknown[0]!r}")
    return names


def setups(models: Sequence[str], ranks: Sequence[int], chosen: Sequence[str] = SETTINGS) -> list[Setup]:
    return [
        Setup(model, count, setting)
        for model in models
        for count in ranks
        for setting in (("one",) if count == 1 else chosen)
    ]


def recipes(wanted: Sequence[Setup], workers: int, context: int) -> list[Recipe]:
    """All kernels of the study. Of the most ranks there is a trace too, but of the silent ones."""
    most = max(setup.ranks for setup in wanted)
    traced = [setup for setup in wanted if setup.ranks == most > 1 and setup.setting != "silent"]
    return [
        *(setup.recipe(workers, context) for setup in wanted),
        *(setup.recipe(workers, context, trace=True) for setup in traced),
    ]


def compile_all(wanted: Sequence[Recipe]) -> None:
    """Into the cache, on all cores: a kernel takes some ten seconds."""
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_kernel, [recipe.header() for recipe in wanted]))


class Alone:
    """One rank on the whole GPU. The settings of a shape share its weights."""

    def __init__(self, setup: Setup, model: LoadedModel, workers: int, context: int) -> None:
        spec, plan = setup.spec(), setup.plan(workers, context)
        cubin = compile_kernel(setup.header(workers, context))
        self.setup = setup
        self.backend = CudaBackend(spec, plan, model, cubin)
        if setup.ranks > 1:
            self.backend.loop_back()
        self._sequence = self.backend.new_sequence()
        self._prompt = prompt_of(CONTEXT, spec.vocab)

    def speeds(self, delay_us: int, tokens: int, requests: int) -> list[float]:
        """Tokens per second of each request, by the GPU's clock."""
        if self.setup.ranks > 1:
            self.backend.delay_links(1000 * delay_us)
        found = []
        for _ in range(requests + 1):  # the first warms up
            cached = CONTEXT - 1 if self._sequence.length >= CONTEXT - 1 else 0
            timed = run_request(self.backend, self._sequence, self._prompt, cached, tokens)
            found.append(timed.tokens_per_second)
        return found[1:]

    def record(self, tokens: int) -> TraceRecords:
        """What each worker did when, by a kernel with clocks."""
        return self.backend.trace(self._prompt, tokens)

    def limits(self, delay_us: int, bandwidth: float) -> dict[str, Any]:
        """Where a token's time goes at this delay, by a few recorded tokens."""
        self.backend.delay_links(1000 * delay_us)
        recorded = self.record(4)
        print(f"\n{self.setup.model}, {self.setup.ranks} ranks, {self.setup.setting}, {delay_us} us:")
        print(table(recorded, bandwidth))
        times = {
            stage.stage: {
                "us": round(1e6 * stage.time_s, 2), "waiting_us": round(1e6 * stage.waiting_s, 2),
                "streaming_us": round(1e6 * stage.streaming_s(bandwidth), 2),
            }
            for stage in stage_times(recorded)
        }  # fmt: skip
        longest = max(times, key=lambda name: times[name]["us"] - times[name]["streaming_us"])
        return {"delay_us": delay_us, "stages": times, "limited_by": longest}


def measure(options: argparse.Namespace, bandwidth: float) -> list[dict[str, Any]]:
    workers, context = processors(), CONTEXT + options.tokens
    models = options.models.split(",")
    wanted = setups(models, options.ranks, options.settings)
    compile_all(recipes(wanted, workers, context))
    rows = []
    for model in models:
        for ranks in options.ranks:
            same = [setup for setup in wanted if (setup.model, setup.ranks) == (model, ranks)]
            plan = same[0].plan(workers, context)
            loaded = load_model(
                same[0].spec(), rank_plan(plan.plan, 0), RandomCheckpoint(model, False, **same[0].changes)
            )
            alone = [Alone(setup, loaded, workers, context) for setup in same]
            for one in alone:
                rows.append(measured(one, plan, options, bandwidth))
                print_row(rows[-1], options.delays)
            for one in alone:
                one.backend.close()
    return rows


def measured(one: Alone, plan: GpuPlan, options: argparse.Namespace, bandwidth: float) -> dict[str, Any]:
    """A fault of one setup is reported in its row; the others are measured all the same."""
    setup, speeds, fault = one.setup, {}, None
    try:
        for delay in options.delays if setup.ranks > 1 else [0]:
            speeds[delay] = one.speeds(delay, options.tokens, options.requests)
    except BackendError as error:
        fault = str(error)
    bytes_per_token = rank_plan(plan.plan, 0).token_bytes(CONTEXT + options.tokens // 2)
    found: dict[str, Any] = {
        "model": setup.model, "ranks": setup.ranks, "setting": setup.setting, "padded_heads": setup.changes,
        "bytes_per_token": bytes_per_token, "ceiling_tokens_per_second": bandwidth / bytes_per_token,
        "tokens_per_second": {str(delay): spread(values) for delay, values in speeds.items()},
    }  # fmt: skip
    if fault:
        found["fault"] = fault
    elif setup.ranks == max(options.ranks) > 1 and setup.setting != "silent":
        found["trace"] = one.limits(2 if 2 in options.delays else options.delays[-1], bandwidth)
    return found


def loss(row: dict[str, Any], delay: int) -> float:
    """What a delay costs, as a share of the speed without."""
    speeds = row["tokens_per_second"]
    return float(1 - speeds[str(delay)]["median"] / speeds["0"]["median"])


def print_table(rows: Sequence[dict[str, Any]], delays: Sequence[int]) -> None:
    heads = "".join(f"{f'{delay} us':>9}" for delay in delays)
    print(
        f"\ntokens per second, by the link's delay\n{'model':<14} {'ranks':>5} {'':<7}{heads} {'ceiling':>9}"
    )
    for row in rows:
        print_row(row, delays)
    print("\nAn emulation: " + ";\n  ".join(ASSUMPTIONS) + ".")


def print_row(row: dict[str, Any], delays: Sequence[int]) -> None:
    speeds = row["tokens_per_second"]
    shown = "".join(
        f"{speeds[str(delay)]['median']:>9.0f}" if str(delay) in speeds else f"{'':>9}" for delay in delays
    )
    lost = f"  loses {100 * loss(row, 2):.1f} % at 2 us" if {"0", "2"} <= set(speeds) else ""
    ceiling = row["ceiling_tokens_per_second"]
    print(
        f"{row['model']:<14} {row['ranks']:>5} {row['setting']:<7}{shown} {ceiling:>9.0f}{lost}", flush=True
    )
    if "trace" in row:
        print(f"{'':<20} limited by {row['trace']['limited_by']} at {row['trace']['delay_us']} us")
    if "fault" in row:
        print(f"{'':<20} {row['fault']}")


def main() -> None:
    options = parse_arguments()
    before = measure_bandwidth()
    rows = measure(options, before)
    print_table(rows, options.delays)
    gpu = short_name(device_name())
    wanted = setups(options.models.split(","), options.ranks, options.settings)
    kernels = evidence([*recipes(wanted, processors(), CONTEXT + options.tokens), BANDWIDTH])
    publish(
        f"{options.name}-{gpu}",
        {
            "gpu": gpu, **kernels, "emulation": list(ASSUMPTIONS), "bandwidth_of_one_gpu": before, "context": CONTEXT,
            "tokens": options.tokens, "delay_modules": DELAY_MODULES,
            "results": rows,
        },
        save=options.save,
    )  # fmt: skip


if __name__ == "__main__":
    main()
