"""What drafts are worth: the same requests with and without speculation, in one process, every token compared.

    python bench/editing.py --model Qwen/Qwen2.5-Coder-1.5B-Instruct --backend cuda --save
    python bench/editing.py --prose --backend cuda --save
    python bench/editing.py --sampled --backend cuda --save

By default the model repeats twenty files of the standard library with one function renamed (editing_tasks.py),
greedily. `--prose` asks for fifty short texts that repeat little (prose_prompts.py); `--sampled` for a hundred, each
with a seed of its own. Speeds are from the first token to the last by the backend's clock. The two ways take turns, and
each is the first one every other time. It ends with an error where a token differs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from editing_tasks import Task, tasks
from measuring import await_drafts, kernel_facts, short_name
from monotape.engine.llm import LLM
from monotape.engine.outputs import CompletionOutput
from monotape.engine.sampling_params import SamplingParams
from monotape.errors import MonotapeError
from prose_prompts import PROSE
from report import publish, spread

MODEL = "Qwen/Qwen2.5-Coder-1.5B-Instruct"
SEEDS = 100
TEMPERATURE = 0.8
WARM_UP_TOKENS = 16
MORE_TOKENS = 128  # than the edited file has: an answer may say a word before it


@dataclass(frozen=True, slots=True)
class Asked:
    """One request."""

    name: str
    text: str
    params: SamplingParams
    task: Task | None = None


@dataclass(frozen=True, slots=True)
class Compared:
    """One request in both ways, several times each; those of the same index were made one after the other."""

    asked: Asked
    plain: list[CompletionOutput]
    speculated: list[CompletionOutput]

    @property
    def differs_at(self) -> int | None:
        """The first token that is not the same in all of them."""
        answers = [answer.token_ids for answer in (*self.plain, *self.speculated)]
        if all(ids == answers[0] for ids in answers):
            return None
        same = 0
        while len({tuple(ids[: same + 1]) for ids in answers}) == 1:
            same += 1
        return same

    def row(self) -> dict[str, Any]:
        """What a report says of it. A single token has no speed."""
        first = self.speculated[0]
        row: dict[str, Any] = {
            "task": self.asked.name,
            **_edit_facts(self.asked.task, first.text),
            "tokens": len(first.token_ids),
            "finish_reason": first.finish_reason,
            "differs_at": self.differs_at,
            "drafted": first.stats.drafted_tokens,
            "accepted": first.stats.accepted_tokens,
        }
        pairs = list(zip(self.plain, self.speculated, strict=True))
        if all(_speed(answer) for pair in pairs for answer in pair):
            row |= {
                "plain_tokens_per_second": spread([_speed(plain) for plain, _ in pairs]),
                "tokens_per_second": spread([_speed(drafted) for _, drafted in pairs]),
                "times_as_fast": spread([_speed(drafted) / _speed(plain) for plain, drafted in pairs]),
            }
        return row


def _edit_facts(task: Task | None, answer: str) -> dict[str, Any]:
    if task is None:
        return {}
    facts = {"function": task.function, "new_name": task.new_name, "lines": task.lines, "sha256": task.sha256}
    return {**facts, "right": task.is_done_by(answer)}


def _speed(answer: CompletionOutput) -> float:
    return answer.stats.decode_tokens_per_second or 0.0


def edits(llm: LLM, chosen: Sequence[Task]) -> list[Asked]:
    assert llm.tokenizer is not None
    asked = []
    for task in chosen:
        room = len(llm.tokenizer.encode(task.edited, add_special=False)) + MORE_TOKENS
        asked.append(Asked(task.module, task.request, SamplingParams(temperature=0, max_tokens=room), task))
    return asked


def prose(max_tokens: int) -> list[Asked]:
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    return [Asked(text, text, params) for text in PROSE]


def sampled(max_tokens: int) -> list[Asked]:
    """Short texts and seeds: what is chosen depends on the noise of each position."""
    found = []
    for seed in range(SEEDS):
        text = PROSE[seed % len(PROSE)]
        params = SamplingParams(temperature=TEMPERATURE, seed=seed, max_tokens=max_tokens)
        found.append(Asked(f"seed {seed}", text, params))
    return found


def answered(llm: LLM, asked: Asked, *, speculation: bool) -> CompletionOutput:
    messages = [{"role": "user", "content": asked.text}]
    with llm.stream_chat(messages, asked.params, speculation=speculation) as stream:
        for _ in stream:
            pass
        return stream.completion


def compare(llm: LLM, asked: Asked, runs: int, number: int = 0) -> Compared:
    """Both ways meet the same machine: they take turns, and each begins every other time.

    The prompt is answered once before. From then on its KV is kept, and all begin with the same.
    """
    found = Compared(asked, [], [])
    answered(llm, replace(asked, params=replace(asked.params, max_tokens=1)), speculation=False)
    for run in range(runs):
        order = (False, True) if (number + run) % 2 == 0 else (True, False)
        for speculation in order:
            kept = found.speculated if speculation else found.plain
            kept.append(answered(llm, asked, speculation=speculation))
    return found


def over_all(compared: Sequence[Compared]) -> dict[str, Any]:
    """All requests together: tokens after each first one over the time they took, for every run."""
    runs = range(len(compared[0].plain))
    plain = [_speed_of([one.plain[run] for one in compared]) for run in runs]
    drafted = [_speed_of([one.speculated[run] for one in compared]) for run in runs]
    row = {
        "task": "all",
        "tokens": sum(len(one.speculated[0].token_ids) for one in compared),
        "different": sum(one.differs_at is not None for one in compared),
        "drafted": sum(one.speculated[0].stats.drafted_tokens for one in compared),
        "accepted": sum(one.speculated[0].stats.accepted_tokens for one in compared),
    }
    edited = [one for one in compared if one.asked.task is not None]
    if edited:
        row["right"] = sum(one.row()["right"] for one in edited)
    if all(plain) and all(drafted):
        row |= {
            "plain_tokens_per_second": spread(plain),
            "tokens_per_second": spread(drafted),
            "times_as_fast": spread([fast / slow for fast, slow in zip(drafted, plain, strict=True)]),
        }
    return row


def _speed_of(answers: Sequence[CompletionOutput]) -> float:
    seconds = sum(answer.stats.decode_s for answer in answers)
    return sum(len(answer.token_ids) - 1 for answer in answers) / seconds if seconds else 0.0


def measure(llm: LLM, asked: Sequence[Asked], runs: int) -> list[dict[str, Any]]:
    """The rows of a report, the sum first; one line each as they come. A few tokens wake the machine up."""
    await_drafts(llm.backend)
    short = replace(asked[0], params=replace(asked[0].params, max_tokens=WARM_UP_TOKENS))
    for speculation in (True, False):
        answered(llm, short, speculation=speculation)
    compared = []
    for number, one in enumerate(asked):
        compared.append(compare(llm, one, runs, number))
        print(line(compared[-1].row()), file=sys.stderr, flush=True)
    total = over_all(compared)
    print(line(total), file=sys.stderr, flush=True)
    return [total, *(one.row() for one in compared)]


def line(row: dict[str, Any]) -> str:
    speeds = ""
    if "times_as_fast" in row:
        names = ("plain_tokens_per_second", "tokens_per_second", "times_as_fast")
        plain, drafted, times = (row[name]["median"] for name in names)
        speeds = f"{plain:8.1f} -> {drafted:8.1f} tok/s, {times:5.2f}x"
    differs = row.get("differs_at") is not None or row.get("different", 0) > 0
    counts = f"{row['tokens']:6} tokens  drafts {row['drafted']:6}, accepted {row['accepted']:6}"
    return f"{row['task'][:34]:34} {counts}  {speeds}{'  DIFFERENT' if differs else ''}"


def gpu_facts(llm: LLM, model: str) -> dict[str, Any]:
    """What a report of a GPU must hold; nothing on a CPU."""
    if llm.backend.name != "cuda":
        return {}
    from monotape.backends.cuda.driver import device_name
    from monotape.weights.hub import resolve

    facts = kernel_facts(llm.backend, Path(model).name, resolve(model), ceiling=False)
    return {"gpu": short_name(device_name()), **facts}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--model", default=MODEL, help="any that `monotape run` takes (default: %(default)s)")
    made.add_argument("--backend", default="auto", help="default: %(default)s")
    made.add_argument("--dtype", default="auto", help="default: %(default)s")
    kind = made.add_mutually_exclusive_group()
    kind.add_argument("--prose", action="store_true", help=f"{len(PROSE)} texts that repeat little, greedy")
    kind.add_argument(
        "--sampled", action="store_true", help=f"{SEEDS} seeds at temperature {TEMPERATURE}, short texts"
    )
    made.add_argument(
        "--runs", type=int, default=3, help="of each request in each way (default: %(default)s)"
    )
    made.add_argument("--tasks", type=int, help="only so many, from the first on")
    made.add_argument("--max-tokens", type=int, default=128, help="of prose (default: %(default)s)")
    made.add_argument("--max-model-len", type=int, default=8192, help="default: %(default)s")
    made.add_argument("--save", action="store_true", help="keep the result under reports/")
    return made


def requests_of(options: argparse.Namespace, llm: LLM) -> tuple[str, list[Asked]]:
    """What is asked for, and what the report is called after."""
    if options.prose:
        kind, asked = "prose", prose(options.max_tokens)
    elif options.sampled:
        kind, asked = "sampled", sampled(options.max_tokens)
    else:
        kind, asked = "editing", edits(llm, tasks())
    return kind, asked[: options.tasks]


def run(options: argparse.Namespace) -> bool:
    """True if every token was the same."""
    with LLM(
        options.model, backend=options.backend, dtype=options.dtype, max_model_len=options.max_model_len
    ) as llm:
        kind, asked = requests_of(options, llm)
        results = measure(llm, asked, options.runs)
        facts = gpu_facts(llm, options.model)
        dtype = llm.backend.plan.formats
    model = Path(options.model).name
    name = f"{kind}-{facts.get('gpu', 'cpu')}-{model.lower().removesuffix('.gguf')}"
    settings = {"model": model, "dtype": dtype, "kind": kind, "runs": options.runs}
    publish(name, {**facts, **settings, "results": results}, save=options.save)
    return not results[0]["different"]


def main() -> int:
    try:
        same = run(parser().parse_args())
    except MonotapeError as error:
        print(f"{error.message} {error.hint}".strip(), file=sys.stderr)
        return 2
    if not same:
        print("Tokens differ with and without speculation.", file=sys.stderr)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
