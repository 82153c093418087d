"""Runs lm-eval's `local-completions` against a server: 320 scored continuations and 80 generated ones.

    pip install 'lm_eval[api]'
    python bench/lm_eval_capitals.py --url http://127.0.0.1:8000 --model smollm2

The task is made here, so that nothing has to be downloaded: capitals, each among four. Tokens come from the server.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

CAPITALS = {
    "France": "Paris", "Norway": "Oslo", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo", "Egypt": "Cairo",
    "Greece": "Athens", "Peru": "Lima", "Cuba": "Havana", "Kenya": "Nairobi",
}  # fmt: skip
ROUNDS = 8
_TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
"""
_SCORED = """
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: 0
metric_list: [{metric: acc}]
"""
_WRITTEN = """
output_type: generate_until
doc_to_target: " {{choices[0]}}"
generation_kwargs: {until: [".", ","], max_gen_toks: 6}
metric_list: [{metric: exact_match, ignore_case: true}]
"""


def questions() -> list[dict[str, object]]:
    """Every country `ROUNDS` times, with other wrong answers each time; the right one is the first."""
    cities = list(CAPITALS.values())
    made: list[dict[str, object]] = []
    for turn in range(1, ROUNDS + 1):
        for index, (country, capital) in enumerate(CAPITALS.items()):
            others = [
                cities[(index + turn * step + offset) % 10] for offset in (0, 1) for step in (1, 2, 3, 4)
            ]
            wrong = list(dict.fromkeys(city for city in others if city != capital))[:3]
            made.append({"question": f"The capital of {country} is", "choices": [capital, *wrong]})
    return made


def write_tasks(folder: Path) -> None:
    data = folder / "capitals.jsonl"
    data.write_text("\n".join(map(json.dumps, questions())))
    for name, kind in (("capitals_scored", _SCORED), ("capitals_written", _WRITTEN)):
        (folder / f"{name}.yaml").write_text(_TASK.format(name=name, data=data) + kind)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", required=True, help="a name that the server knows")
    parser.add_argument("--concurrent", type=int, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_tasks(Path(folder))
        arguments = {
            "model": options.model, "base_url": f"{options.url}/v1/completions", "tokenizer_backend": "remote",
            "tokenized_requests": True, "num_concurrent": options.concurrent, "max_retries": 5,
        }  # fmt: skip
        given = ",".join(f"{name}={value}" for name, value in arguments.items())
        command = [sys.executable, "-m", "lm_eval", "--model", "local-completions", "--model_args", given]
        return subprocess.run(
            [*command, "--tasks", "capitals_scored,capitals_written", "--include_path", folder]
        ).returncode


if __name__ == "__main__":
    sys.exit(main())
