"""What the embedded model writes: the examples of the README, made anew.

    python bench/embedded_examples.py

Greedy, as it comes, up to the next blank line or 40 tokens.
"""

from __future__ import annotations

from pathlib import Path

from monotape.engine.llm import LLM
from monotape.engine.sampling_params import SamplingParams
from monotape.weights import embedded

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- examples: python bench/embedded_examples.py -->\n", "<!-- end of examples -->"
PROMPTS = (
    "def is_even(number):\n    return",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "import json\n\n\ndef load(path):\n    with open(path) as file:\n",
    "class Point:\n    def __init__(self, x, y):\n",
    "import logging\n\nlogger =",
)
PARAMS = SamplingParams(temperature=0, max_tokens=40, stop=["\n\n"])
MARK = "▸"  # where the model begins


def completions() -> list[str]:
    """The model's text after each prompt."""
    with LLM(embedded.NAME, backend="cpu", progress=False) as llm:
        return [output.outputs[0].text for output in llm.generate(list(PROMPTS), PARAMS)]


def shown(prompt: str, text: str) -> str:
    """Prompt and text as one piece of code."""
    return f"```text\n{prompt}{MARK}{text}\n```\n"


def section(texts: list[str]) -> str:
    return "\n" + "\n".join(shown(*example) for example in zip(PROMPTS, texts, strict=True)) + "\n"


def main() -> None:
    before, found, rest = README.read_text().partition(BEGIN)
    _, closed, after = rest.partition(END)
    if not found or not closed:
        raise SystemExit(f"README.md has no place for examples: {BEGIN.strip()} ... {END}")
    README.write_text(f"{before}{BEGIN}{section(completions())}{END}{after}")


if __name__ == "__main__":
    main()
