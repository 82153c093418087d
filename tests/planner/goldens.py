"""Plans whose text is committed, so that a change of the planner's figures or words is a reviewable diff.

    PYTHONPATH=src python tests/planner/goldens.py    # writes them anew

Every path of the text appears in one of them.
"""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

from monotape.cli.main import main

GOLDEN = Path(__file__).parent / "golden"
COMMANDS = {
    "llama-3.2-1b-h200": ["llama-3.2-1b"],
    "llama-3.1-8b-request-and-agent": [
        "--request", "prompt=8000,cached=7000,output=2000", "--price", "3.5", "--agent",
    ],
    "gpt-oss-120b-8x-h200": ["gpt-oss-120b", "--gpu", "h200", "--count", "8"],
    "kimi-k2.5-8x-mi300x-mbu": ["kimi-k2.5", "--gpu", "MI300X", "--count", "8", "--mbu", "0.36", "--context", "0"],
    "deepseek-v4-pro-8x-rubin": ["deepseek-v4-pro", "--gpu", "rubin", "--count", "8", "--context", "1000000"],
    "llama-3.1-70b-2x-rtx-4090": ["llama-3.1-70b", "--gpu", "rtx-4090", "--count", "2", "--dtype", "int4"],
    "llama-3.1-70b-does-not-fit": [
        "llama-3.1-70b", "--gpu", "rtx-4090", "--request", "prompt=5,output=5", "--agent",
    ],
    "qwen2.5-coder-0.5b-cpu": ["qwen2.5-coder-0.5b", "--gpu", "cpu", "--bandwidth", "0.04", "--dtype", "q8"],
    "qwen3-0.6b-m4-max-q8": ["qwen3-0.6b", "--gpu", "m4-max", "--dtype", "q8", "--kv-dtype", "fp8"],
    "qwen3-coder-next-cpu": [
        "qwen3-coder-next", "--gpu", "cpu", "--bandwidth", "0.4", "--dtype", "mxfp4", "--engine", "vllm",
    ],
    "projections": ["--projections"],
    "list": ["--list"],
    "json-llama-3.2-1b": [
        "llama-3.2-1b", "--json", "--request", "prompt=500,output=37", "--price", "2", "--concurrency", "3", "--agent",
    ],
}  # fmt: skip


def output_of(arguments: list[str]) -> str:
    """What `monotape plan` prints; it must succeed."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(["plan", *arguments]) == 0
    return printed.getvalue()


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name, arguments in COMMANDS.items():
        (GOLDEN / f"{name}.txt").write_text(output_of(arguments), "utf-8")
        print("wrote", name)
