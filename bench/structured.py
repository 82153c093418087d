"""Structured output against free decoding, through the server with the real `openai` client.

    python bench/structured.py --model Qwen/Qwen2.5-Coder-1.5B-Instruct --save

Each kind of structured answer is asked for several times, greedily, and each time the same messages without a grammar
for exactly as many tokens. `engine` is the speed from the first token to the last by the backend's clock; `client`
counts all that the client waits for, the prompt included. The grammar has been compiled before.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai

from measuring import kernel_facts, short_name
from monotape.backends.cuda.driver import device_name
from monotape.engine.llm import LLM
from monotape.weights.hub import resolve
from report import publish, spread
from serving import served_by

_LAUNCH = """
import sys
from monotape.engine.config import EngineConfig
from monotape.server.config import ServerConfig
from monotape.server.run import serve
model, backend, dtype = sys.argv[1:]
sys.exit(serve(ServerConfig(port=0), EngineConfig(model=model, backend=backend, dtype=dtype, progress=False)))
"""
_TEXT = {"type": "string", "minLength": 20, "maxLength": 60}
_KEYS = (
    "full_name_of_the_customer_as_it_is_written_in_the_contract",
    "postal_address_to_which_the_replacement_is_to_be_delivered",
    "description_of_the_defect_in_the_words_of_the_customer",
    "number_of_days_since_the_product_was_delivered",
    "whether_the_customer_has_asked_for_a_refund_before",
    "category_of_the_product_according_to_the_catalogue",
    "next_step_that_the_support_team_has_promised",
)
_FIELDS: dict[str, Any] = {
    **dict.fromkeys(_KEYS, _TEXT),
    _KEYS[3]: {"type": "integer", "minimum": 0, "maximum": 999},
    _KEYS[4]: {"type": "boolean"},
    _KEYS[5]: {"enum": ["kitchen appliance", "garden tool", "consumer electronics"]},
}
_RECORD = {
    "type": "object",
    "properties": _FIELDS,
    "required": list(_FIELDS),
    "additionalProperties": False,
}
SCHEMA = {
    "type": "object",
    "properties": {"complaints": {"type": "array", "items": _RECORD, "minItems": 2, "maxItems": 2}},
    "required": ["complaints"],
    "additionalProperties": False,
}
MESSAGES: list[Any] = [
    {
        "role": "user",
        "content": "Mrs Ada Byron of 12 Mill Lane, Ely, says that the kettle she got nine days ago leaks and trips the "
        "fuse. Mr Carl Benz of 3 Wharf Road, Hull, says that his lawn mower, delivered in May, does not start. "
        "Write both complaints down as JSON.",
    }
]
TOOL = {
    "type": "function",
    "function": {"name": "record_complaints", "description": "Keeps complaints.", "parameters": SCHEMA},
}
KINDS: dict[str, dict[str, Any]] = {
    "json schema": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "complaints", "schema": SCHEMA, "strict": True},
        }
    },
    "forced tool call": {
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "record_complaints"}},
    },
}


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer as the client got it."""

    text: str
    tokens: int
    seconds: float
    engine: float  # tokens a second


def ask(client: openai.OpenAI, **asked: Any) -> Answer:
    before = time.perf_counter()
    answer = client.chat.completions.create(
        model=client.models.list().data[0].id, messages=MESSAGES, temperature=0, **asked
    )
    seconds = time.perf_counter() - before
    message = answer.choices[0].message
    calls: list[Any] = message.tool_calls or []
    text = calls[0].function.arguments if calls else message.content or ""
    metrics = (answer.model_extra or {})["metrics"]
    assert answer.usage is not None
    return Answer(text, answer.usage.completion_tokens, seconds, metrics["decode_tokens_per_second"])


def check(answer: Answer) -> None:
    """The answer is what was asked for, not only fast."""
    records = json.loads(answer.text)["complaints"]
    assert len(records) == 2 and all(list(record) == list(_FIELDS) for record in records), answer.text


def measure(client: openai.OpenAI, kind: str, runs: int, most_tokens: int) -> dict[str, Any]:
    """A kind of structured answer and free ones of the same length, in turns: both meet the same machine."""
    guided: list[Answer] = []
    free: list[Answer] = []
    check(ask(client, max_tokens=most_tokens, **KINDS[kind]))  # compiles the grammar
    for _ in range(runs):
        guided.append(ask(client, max_tokens=most_tokens, **KINDS[kind]))
        tokens = guided[-1].tokens
        # The tools stay in the prompt, so that both prompts are as long.
        given = {"tools": [TOOL], "tool_choice": "none"} if "tools" in KINDS[kind] else {}
        free.append(ask(client, max_tokens=tokens, extra_body={"ignore_eos": True}, **given))
        assert free[-1].tokens == tokens, f"{free[-1].tokens} free tokens instead of {tokens}"
    assert len({answer.text for answer in guided}) == 1, "greedy answers differ"
    pairs = list(zip(guided, free, strict=True))
    return {
        "kind": kind,
        "tokens": guided[0].tokens,
        "engine_tokens_per_second": spread([answer.engine for answer in guided]),
        "free_engine_tokens_per_second": spread([answer.engine for answer in free]),
        "engine_share": spread([one.engine / other.engine for one, other in pairs]),
        "client_tokens_per_second": spread([answer.tokens / answer.seconds for answer in guided]),
        "free_client_tokens_per_second": spread([answer.tokens / answer.seconds for answer in free]),
        "client_share": spread([other.seconds / one.seconds for one, other in pairs]),
    }


def gpu_facts(model: str, backend: str, dtype: str) -> dict[str, Any]:
    """What a report of a GPU must hold; nothing on a CPU. Loads the model once more, when the server has ended."""
    with LLM(model, backend=backend, dtype=dtype, progress=False) as llm:
        if llm.backend.name != "cuda":
            return {}
        facts: dict[str, Any] = kernel_facts(llm.backend, Path(model).name, resolve(model), ceiling=False)
        return {"gpu": short_name(device_name()), **facts}


def print_table(results: list[dict[str, Any]]) -> None:
    print(
        f"{'kind':<18}{'tokens':>7}{'tok/s':>9}{'free':>9}{'share':>8}{'client share':>14}", file=sys.stderr
    )
    for row in results:
        speeds = [
            row[name]["median"] for name in ("engine_tokens_per_second", "free_engine_tokens_per_second")
        ]
        shares = [row[name]["median"] for name in ("engine_share", "client_share")]
        print(
            f"{row['kind']:<18}{row['tokens']:>7}{speeds[0]:>9.0f}{speeds[1]:>9.0f}{shares[0]:>8.1%}{shares[1]:>14.1%}",
            file=sys.stderr,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="as `monotape serve` takes it")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=1024, help="more than a structured answer needs")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--save", action="store_true", help="keep the result under reports/")
    options = parser.parse_args()
    with (
        served_by(_LAUNCH, options.model, options.backend, options.dtype) as (address, _),
        openai.OpenAI(base_url=f"{address}/v1", api_key="none") as client,
    ):
        results = [measure(client, kind, options.runs, options.max_tokens) for kind in options.kinds]
    print_table(results)
    facts = gpu_facts(options.model, options.backend, options.dtype)
    model = Path(options.model).name.lower().removesuffix(".gguf")
    name = f"structured-{facts.get('gpu', 'cpu')}-{model}"
    publish(
        name, {**facts, "client": "openai", "model": Path(options.model).name, "results": results},
        save=options.save,
    )  # fmt: skip


if __name__ == "__main__":
    main()
