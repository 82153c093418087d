"""Whether the engine gives the trainer's logits for trained checkpoints, on any backend, ranks included.

    python bench/lane_logits.py --runs RUNS --corpus CORPUS --backends reference,cpu,cuda --into logits.json

Exact is PyTorch in float64. Honest is PyTorch in float32 for reference and cpu, in bf16 for cuda, where ranks share
the GPU. A backend passes if it is no worse than twice the honest evaluation.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from monotape.engine.loading import load_backend
from monotape.models.registry import spec_from_config
from monotape.training.corpus.prepare import VALIDATION
from monotape.training.export import export
from monotape.training.laneformer import Laneformer
from monotape.training.trainer import RESULT
from monotape.weights.open import open_checkpoint
from report import commit

ULP = float(np.finfo(np.float32).eps)
DTYPES = {"reference": "f32", "cpu": "f32", "cuda": "bf16"}
Logits = NDArray[np.float64]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, required=True, help="a folder of runs, or one run")
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--backends", default="reference,cpu")
    parser.add_argument("--tokens", type=int, default=90)
    parser.add_argument("--workers", type=int, help="threads of the CPU's backend; at least as many as lanes")
    parser.add_argument("--into", type=Path, help="keep the result in this file, beside those of other runs")
    return parser.parse_args()


def distance(got: Logits, want: Logits) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def torch_logits(folder: Path, tokens: list[int], dtype: str) -> Logits:
    import torch

    model = Laneformer.load(folder).to(getattr(torch, dtype))
    with torch.no_grad():
        return np.asarray(model(torch.tensor([tokens]))[0].double().numpy())


def backend_logits(folder: Path, tokens: list[int], name: str, workers: int | None) -> Logits:
    checkpoint = open_checkpoint(folder)
    spec = spec_from_config(checkpoint.config)
    backend = load_backend(
        name, spec, checkpoint, dtype=DTYPES[name], context=spec.context, workers=workers if name == "cpu" else None,
        emulate_ranks=True,
    )  # fmt: skip
    try:
        return np.asarray(backend.logits(tokens, backend.new_sequence()), np.float64)
    finally:
        backend.close()


def judged(
    run: Path, corpus: Path, backends: list[str], count: int, workers: int | None
) -> list[dict[str, Any]]:
    """A row for each backend: its distance to the exact logits, and the bound."""
    rows = []
    with TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        export(run, corpus, folder)
        count = min(count, spec_from_config(open_checkpoint(folder).config).context)
        tokens = np.fromfile(corpus / VALIDATION, "<u2", count=count).astype(int).tolist()
        exact = torch_logits(folder, tokens, "float64")
        kinds = {name: "bfloat16" if name == "cuda" else "float32" for name in backends}
        honest = {
            dtype: distance(torch_logits(folder, tokens, dtype), exact) for dtype in set(kinds.values())
        }
        for name in backends:
            far = distance(backend_logits(folder, tokens, name, workers), exact)
            bound = 2 * honest[kinds[name]] + ULP
            rows.append(
                {
                    "run": run.name, "backend": name, "distance": far, "bound": bound, "passes": far <= bound,
                    **commit(),
                }
            )  # fmt: skip
    return rows


def kept(path: Path, rows: list[dict[str, Any]]) -> None:
    """Writes the rows, and those of other runs and backends that the file has already."""
    before = json.loads(path.read_text()) if path.is_file() else []
    merged = {(row["run"], row["backend"]): row for row in [*before, *rows]}
    path.write_text(json.dumps([merged[key] for key in sorted(merged)], indent=1) + "\n")


def main() -> int:
    options = parse_arguments()
    runs = [options.runs] if (options.runs / RESULT).is_file() else sorted(
        path.parent for path in options.runs.glob(f"*/{RESULT}")
    )  # fmt: skip
    if not runs:
        sys.exit(f"There is no finished run in {options.runs}.")
    rows = []
    for run in runs:
        for row in judged(run, options.corpus, options.backends.split(","), options.tokens, options.workers):
            rows.append(row)
            verdict = "passes" if row["passes"] else "FAILS"
            print(
                f"{row['run']:<22} {row['backend']:<10} {row['distance']:.2e} of at most {row['bound']:.2e}  {verdict}",
                flush=True,
            )
    if options.into is not None:
        kept(options.into, rows)
    return 0 if all(row["passes"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
