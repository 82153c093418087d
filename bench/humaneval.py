"""HumanEval: how many functions a model completes on Monotape, and on transformers with the same weights.

    python bench/humaneval.py --engine both --dtype f32 q8 --save

Prompts are continued as they are, without a chat template: greedy, one sample a problem, until a stop string
(see completions.py), the end of the text or --max-tokens. The 40 problems of the default are spread evenly
over all 164. Each completed function runs against its test in a process of its own (see sandbox.py).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from completions import STOPS, Completion, Engine, monotape_engine, tokenizer_of, transformers_engine
from humaneval_problems import PROBLEMS, Problem, sample
from machine_code import evidence
from measuring import short_name
from monotape.backends.cuda.driver import device_name
from monotape.config import cache_dir
from monotape.errors import MonotapeError, UsageError
from monotape.weights.hub import resolve
from recipes import Recipe
from report import publish, sources_hash
from sandbox import Limits, Verdict, run_program

MODEL = "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF:qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"


@dataclass(frozen=True, slots=True)
class Run:
    """All problems on one engine."""

    engine: str
    completions: dict[str, Completion]
    verdicts: dict[str, Verdict]

    @property
    def passed(self) -> int:
        return sum(verdict == "passed" for verdict in self.verdicts.values())

    @property
    def tokens(self) -> int:
        return sum(len(completion.token_ids) for completion in self.completions.values())

    @property
    def seconds(self) -> float:
        """Generating only: prompts included, tests not."""
        return sum(completion.seconds for completion in self.completions.values())

    def results(self) -> dict[str, Any]:
        return {
            "engine": self.engine,
            "passed": self.passed,
            "total": len(self.verdicts),
            "seconds": round(self.seconds, 1),
            "tokens": self.tokens,
            "tokens_per_second": round(self.tokens / self.seconds, 2),
            "problems": {
                task: {
                    "verdict": self.verdicts[task],
                    "tokens": len(each.token_ids),
                    "end": each.end,
                    "text": each.text,
                }
                for task, each in self.completions.items()
            },
        }


def run_engine(engine: Engine, problems: Sequence[Problem], prompts: Sequence[Sequence[int]]) -> Run:
    """Continues and tests one problem after another, and prints a line for each."""
    run = Run(engine.name, {}, {})
    for number, (problem, prompt) in enumerate(zip(problems, prompts, strict=True), start=1):
        completion = engine.complete(prompt)
        verdict = run_program(problem.program(completion.text))
        run.completions[problem.task_id], run.verdicts[problem.task_id] = completion, verdict
        print(
            f"{engine.name}  [{number:3}/{len(problems)}]  {problem.task_id:14} {verdict:9}  "
            f"{len(completion.token_ids):3} tokens in {completion.seconds:5.1f} s  {run.passed} passed",
            file=sys.stderr, flush=True,
        )  # fmt: skip
    return run


def compare(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """What differs between the last run (transformers, when it is one of several) and each of the others."""
    return [
        {
            "engines": [run.engine, runs[-1].engine],
            "same_tokens": sum(
                completion.token_ids == runs[-1].completions[task].token_ids
                for task, completion in run.completions.items()
            ),
            "different_verdicts": {
                task: [verdict, runs[-1].verdicts[task]]
                for task, verdict in run.verdicts.items()
                if verdict != runs[-1].verdicts[task]
            },
        }
        for run in runs[:-1]
    ]


def print_table(runs: Sequence[Run]) -> None:
    print(f"{'engine':24} {'passed':>9} {'seconds':>9} {'tokens':>8} {'tokens/s':>9}")
    for run in runs:
        score = f"{run.passed}/{len(run.verdicts)}"
        speed = run.tokens / run.seconds
        print(f"{run.engine:24} {score:>9} {run.seconds:9.1f} {run.tokens:8} {speed:9.2f}")
    for difference in compare(runs):
        same, verdicts = difference["same_tokens"], difference["different_verdicts"]
        shown = ", ".join(f"{task} ({ours} / {theirs})" for task, (ours, theirs) in verdicts.items())
        print(
            f"{' / '.join(difference['engines'])}: the same tokens in {same} of {len(runs[-1].verdicts)}; ",
            end="",
        )
        print(f"different verdicts: {shown or 'none'}")


def find_model(name: str) -> Path:
    """A path or a name as everywhere in Monotape; a file of that name in its cache saves the download."""
    file = name.rpartition(":")[2]  # org/name:file.gguf
    cached = cache_dir() / "models" / file
    return cached if Path(file).name == file and cached.is_file() else resolve(name)


def engines(
    arguments: argparse.Namespace, model: Path, context: int, prompts: Sequence[Sequence[int]]
) -> Iterator[Callable[[], Engine]]:
    """What loads each engine that was asked for, to be called when the one before it is gone."""
    if arguments.engine in ("monotape", "both"):
        for dtype in arguments.dtype:
            load = partial(monotape_engine, model, arguments.backend, dtype, context, arguments.max_tokens)
            yield load
            if arguments.both_ways:
                yield partial(load, speculation=False)
    if arguments.engine in ("transformers", "both"):
        together = prompts if arguments.transformers_together else ()
        yield partial(
            transformers_engine, model, arguments.max_tokens, arguments.transformers_device, together
        )


def all_sources() -> list[str]:
    return [sources_hash(measured) for measured in ("cpu", "cuda")]


def measure(arguments: argparse.Namespace) -> None:
    problems, sources = sample(arguments.problems), all_sources()
    model = find_model(arguments.model)
    tokenizer = tokenizer_of(model)
    prompts = [tokenizer.encode(problem.prompt) for problem in problems]
    context = max(map(len, prompts)) + arguments.max_tokens
    runs: list[Run] = []
    recipes: list[Recipe] = []
    for load in engines(arguments, model, context, prompts):
        engine = load()
        try:
            runs.append(run_engine(engine, problems, prompts))
            recipes += engine.recipes
        finally:
            engine.close()
            del engine  # one model in memory at a time
    print_table(runs)
    results = {
        "model": model.name,
        "problems": len(problems),
        "max_tokens": arguments.max_tokens,
        "stops": STOPS,
        "sandbox_seconds": Limits().seconds,
        "runs": [run.results() for run in runs],
        "differences": compare(runs),
    }
    if arguments.save and all_sources() != sources:
        # Minutes have passed. The report names the sources as they are now, which must be those that ran.
        raise UsageError("The sources changed during the run, so it cannot be saved.", "Run it again.")
    name = f"{model.stem}-{len(problems)}"
    if recipes:
        gpu = short_name(device_name())
        results, name = {"gpu": gpu, **evidence(recipes), **results}, f"{gpu}-{name}"
    publish(f"humaneval-{name}", results, save=arguments.save)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument(
        "--model",
        default=MODEL,
        help="a path, a hub id, or a file's name in Monotape's cache (default: %(default)s)",
    )
    made.add_argument("--backend", default="auto", help="Monotape's backend (default: %(default)s)")
    made.add_argument(
        "--dtype",
        nargs="+",
        default=["f32"],
        metavar="TYPE",
        help="Monotape's weights in memory, one run each (default: f32, the numbers that transformers has)",
    )
    made.add_argument(
        "--both-ways", action="store_true", help="Monotape once more without speculation; tokens are compared"
    )
    made.add_argument("--problems", type=int, default=40, help=f"1 to {PROBLEMS} (default: %(default)s)")
    made.add_argument("--max-tokens", type=int, default=320, help="a completion (default: %(default)s)")
    made.add_argument("--engine", choices=("monotape", "transformers", "both"), default="monotape")
    made.add_argument("--transformers-device", default="cpu", help="cpu in float32, or cuda in bfloat16")
    made.add_argument(
        "--transformers-together", action="store_true", help="all problems as one batch, in float32"
    )
    made.add_argument("--save", action="store_true", help="keep the results under reports/")
    return made


def main() -> int:
    try:
        measure(parser().parse_args())
    except MonotapeError as error:
        print(f"{error.message} {error.hint}".strip(), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
