"""Answer one prompt."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import Any

from monotape.cli.answer_printer import AnswerPrinter
from monotape.cli.interrupts import INTERRUPTED, INTERRUPTS
from monotape.cli.options import (
    add_engine_arguments,
    add_sampling_arguments,
    engine_config,
    sampling_settings,
    token_ids,
    utf8,
)  # fmt: skip
from monotape.cli.standard_input import piped, read_text
from monotape.cli.statistics import loaded, sampling_line, sampling_object, stats_line, stats_object
from monotape.engine.wake import wake
from monotape.errors import ContextOverflow, UsageError

DEFAULT_MAX_TOKENS = 256
QUESTION = "Why is the sky blue?"  # the example of a model that chats


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "prompt",
        nargs="?",
        type=utf8,
        metavar="PROMPT",
        help="the prompt; text that is piped in is the prompt without one, and stands before it with one",
    )
    parser.add_argument(
        "--prompt-ids", type=token_ids, metavar="IDS", help="token ids instead of text, like 1,2,3"
    )
    parser.add_argument(
        "--raw", action="store_true", help="continue the text as it is, without the chat template"
    )
    parser.add_argument("--system", type=utf8, metavar="TEXT", help="a system message before the prompt")
    parser.add_argument(
        "--example", action="store_true", help="a prompt that suits the model, shown with its answer"
    )
    parser.add_argument("--json", action="store_true", help="print one object with text, token_ids and stats")
    parser.add_argument(
        "--stats", action="store_true", help="print speed and the share of the memory bandwidth"
    )
    add_sampling_arguments(parser)
    add_engine_arguments(parser)


def main(options: argparse.Namespace) -> int:
    if options.prompt is not None and options.prompt_ids is not None:
        raise UsageError("There must be one prompt.", "Give a PROMPT, or --prompt-ids 1,2,3.")
    if options.system and (options.raw or options.prompt_ids is not None):
        raise UsageError(
            "--system needs a chat.", "Leave out --raw and --prompt-ids, or put the text into the prompt."
        )
    if options.example and (options.prompt is not None or options.prompt_ids is not None):
        raise UsageError("--example is a prompt itself.", "Leave out the other one.")
    prompt = None if options.prompt_ids is not None or options.example else _prompt(options.prompt)
    config = engine_config(options)
    wake(config)
    from monotape.engine.llm import LLM

    with LLM.from_config(config) as llm:
        defaults = dataclasses.replace(llm.default_sampling_params, max_tokens=DEFAULT_MAX_TOKENS)
        given = sampling_settings(options)
        params = dataclasses.replace(defaults, **given)
        if options.example:
            prompt, params = _example(llm.config.model, params)
            if not options.json:
                print(prompt, end="" if prompt.endswith("\n") else "\n", flush=True)
        try:
            stream = _start(llm, prompt, options, params)
        except ContextOverflow:
            if "max_tokens" in given:
                raise
            params = dataclasses.replace(params, max_tokens=None)  # the context ends before the default does
            stream = _start(llm, prompt, options, params)
        interrupted = _play(stream, shown=not options.json)
        completion = stream.completion
        if options.json:
            print(json.dumps(_object(completion, llm, params), ensure_ascii=False))
            return INTERRUPTED if interrupted else 0
        if len(completion.token_ids) == params.max_tokens and "max_tokens" not in given:
            print(
                f"monotape: stopped after {params.max_tokens} tokens; --max-tokens N allows more.",
                file=sys.stderr,
            )
        if options.stats:
            print(stats_line(completion.stats, llm.backend), file=sys.stderr)
            chosen = sampling_line(params, given, llm.default_sampling.source)
            print(f"{chosen}, seed {completion.seed} · {loaded(llm)}", file=sys.stderr)
    return INTERRUPTED if interrupted else 0


def _prompt(given: str | None) -> str:
    """The prompt of the command line after the text that is piped in: a question comes after its subject."""
    text = read_text() if given == "-" or piped() else ""
    if given is None:
        text = text.removesuffix("\n")  # echo and editors add one; after - it is meant
    elif given != "-":
        if piped() and not text.strip():
            print("monotape: standard input is empty; the prompt stands alone.", file=sys.stderr)
        text = f"{text.rstrip()}\n\n{given}" if text.strip() else given
    if not text:
        raise UsageError(
            "There must be one prompt.", "Give a PROMPT, pipe text in, or give --prompt-ids 1,2,3."
        )
    return text


def _example(model: str, params: Any) -> tuple[str, Any]:
    from monotape.weights import embedded

    if model != embedded.NAME:
        return QUESTION, params
    return embedded.EXAMPLE, dataclasses.replace(params, stop=[embedded.EXAMPLE_END])


def _start(llm: Any, prompt: str | None, options: argparse.Namespace, params: Any) -> Any:
    if options.prompt_ids is not None:
        return llm.stream({"prompt_token_ids": options.prompt_ids}, params)
    if options.raw or not llm.has_chat_template:
        if options.system:
            raise UsageError(
                "--system needs a chat, and this model has no chat template.",
                "Give one with --chat-template.",
            )
        return llm.stream(prompt, params)
    system = [{"role": "system", "content": options.system}] if options.system else []
    return llm.stream_chat([*system, {"role": "user", "content": prompt}], params)


def _play(stream: Any, *, shown: bool) -> bool:
    """Prints text as it comes. True: Ctrl-C ended it; what was said until then is kept."""
    printer = AnswerPrinter()
    try:
        for delta in stream:
            if shown:
                printer.show(delta)
    except KeyboardInterrupt:
        stream.close()
        INTERRUPTS.answered()
        return True
    finally:
        if shown:
            printer.end_thoughts()
            completion = stream.completion
            silent = not printer.has_words and not completion.reasoning
            print(",".join(map(str, completion.token_ids)) if silent else "")
    return False


def _object(completion: Any, llm: Any, params: Any) -> dict[str, Any]:
    return {
        "model": {"name": llm.config.model, "loaded": llm.source},
        "text": completion.text,
        "reasoning": completion.reasoning,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "seed": completion.seed,
        "sampling": sampling_object(params, llm.default_sampling.source),
        "stats": stats_object(completion.stats, llm.backend),
    }
