"""Serve a model over HTTP: OpenAI's and Anthropic's interfaces, and the playground."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from monotape.cli.options import add_setting, engine_config, integer, names, real
from monotape.cli.parser import Parser
from monotape.config import api_key
from monotape.engine.config import DEFAULT_MODEL, DEFAULT_MODEL_TEXT, EngineConfig
from monotape.errors import UsageError

if TYPE_CHECKING:
    from monotape.server.config import ServerConfig

#: Flags of `vllm serve` that ask for behaviour that is so anyway, and the value with which they do.
AS_IT_IS: dict[str, tuple[Any, str]] = {
    "tensor_parallel_size": (1, "ranks are asked for with --tp"),
    "pipeline_parallel_size": (1, "one device answers a request"),
    "data_parallel_size": (1, "start one server a device instead"),
    "max_num_seqs": (1, "one request at a time has the whole memory bandwidth; others wait (--max-queue)"),
}
_NO_FLAG = {"model", "progress", "seed", "kv_bytes", "max_sequences"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from monotape.server.config import ServerConfig

    parser.add_argument(
        "positional_model",
        nargs="?",
        metavar="MODEL",
        help=f"a name, a Hugging Face id, a folder or a GGUF file (default: {DEFAULT_MODEL_TEXT})",
    )
    parser.add_argument("--model", "-m", metavar="MODEL", help="the same")
    parser.add_argument(
        "--config", metavar="FILE", help="a TOML file with settings by the names of these flags; flags win"
    )
    for field in dataclasses.fields(ServerConfig):
        flag, default = "--" + field.name.replace("_", "-"), field.default
        if isinstance(default, bool):
            parser.add_argument(flag, action="store_true", help=field.metadata["help"])
            continue
        kind: Any = names if isinstance(default, tuple) else integer if "int" in str(field.type) else str
        parser.add_argument(
            flag,
            default=default,
            type=kind,
            metavar=field.metadata.get("metavar", "NAME"),
            help=field.metadata["help"],
        )
    _add_engine_flags(parser)
    _add_vllm_flags(parser)


def _add_engine_flags(parser: argparse.ArgumentParser) -> None:
    for field in dataclasses.fields(EngineConfig):
        if field.name not in _NO_FLAG:
            add_setting(parser, field)
    parser.add_argument(
        "--seed", type=integer, metavar="N", help="makes the seeds drawn for requests repeatable"
    )
    parser.add_argument(
        "--kv-bytes",
        type=integer,
        metavar="BYTES",
        help="memory for the KV of kept conversations (default: a quarter of this machine's)",
    )
    parser.add_argument(
        "--max-sequences",
        type=integer,
        default=64,
        metavar="N",
        help="conversations whose KV is kept for the next turn, as far as its memory goes (default: 64)",
    )


def _add_vllm_flags(parser: argparse.ArgumentParser) -> None:
    for name, (value, why) in AS_IT_IS.items():
        parser.add_argument(
            "--" + name.replace("_", "-"),
            type=integer,
            default=value,
            metavar="N",
            help=f"only {value}: {why}",
        )
    parser.add_argument("--quantization", "-q", metavar="NAME", help="q8, fp8 or int4: the same as --dtype")
    parser.add_argument("--kv-cache-dtype", default="auto", metavar="TYPE", help="the same as --kv-dtype")
    parser.add_argument(
        "--gpu-memory-utilization",
        type=real,
        metavar="SHARE",
        help="accepted; only what the model and its KV need is taken",
    )
    parser.add_argument("--enable-auto-tool-choice", action="store_true", help="accepted; always on")
    parser.add_argument(
        "--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True, help="always on"
    )
    parser.add_argument(
        "--speculative-config",
        type=_json,
        metavar="JSON",
        help="not supported: --speculation needs no settings",
    )
    parser.add_argument(
        "--uvicorn-log-level",
        "--log-level",
        default="info",
        metavar="LEVEL",
        choices=("debug", "info", "warning", "error"),
        help="what is logged: debug, info, warning, error",
    )


def main(options: argparse.Namespace) -> int:
    try:
        from monotape.server.run import serve
    except ImportError as error:
        raise UsageError(
            f"The server needs the package '{error.name}'.", "pip install 'monotape[serve]'"
        ) from None
    options = with_file(options, "monotape serve", add_arguments)
    config, engine = configurations(options)
    _check_files(engine.model)
    return serve(config, engine)


def configurations(options: argparse.Namespace) -> tuple[ServerConfig, EngineConfig]:
    """The flags as the settings of a server and its engine; the log is set up on the way."""
    from monotape.server.config import ServerConfig

    options.model = _model(options)
    _check(options)
    _check_name(options.model)
    if options.quantization:
        options.dtype = options.quantization
    if options.kv_cache_dtype not in ("auto", "float16"):
        options.kv_dtype = options.kv_cache_dtype
    logging.basicConfig(
        level=options.uvicorn_log_level.upper(), format="%(asctime)s %(levelname)s %(message)s"
    )
    options.api_key = options.api_key or api_key()
    config = ServerConfig(
        **{field.name: getattr(options, field.name) for field in dataclasses.fields(ServerConfig)}
    )
    return config, dataclasses.replace(engine_config(options), seed=options.seed, progress=False)


def with_file(
    options: argparse.Namespace, prog: str, add: Callable[[argparse.ArgumentParser], None]
) -> argparse.Namespace:
    """The flags read once more, with the settings of the file as their defaults, where a file is given."""
    if options.config is None:
        return options
    from monotape.cli.serve_file import read_settings

    parser = Parser(prog=prog, allow_abbrev=False)
    add(parser)
    allowed = [action for name, action in parser.settings.items() if name != "config"]
    settings = read_settings(options.config, allowed)
    if options.positional_model is not None:
        settings.pop("model", None)
    parser.set_defaults(**settings)
    return parser.parse_args(options.arguments)


def _model(options: argparse.Namespace) -> str:
    named, flag = options.positional_model, options.model
    if named is not None and flag is not None and named != flag:
        raise UsageError(f"Two models are asked for: {named} and {flag}.", "Give one of them.")
    model: str = flag or named or DEFAULT_MODEL
    return model


def _check_name(model: str) -> None:
    """A name that cannot be is refused here, before there is a server that would say it among its logs."""
    from monotape.weights import embedded
    from monotape.weights.hub import hub_name
    from monotape.weights.paths import local_path

    if local_path(model) is None and model not in (DEFAULT_MODEL, embedded.NAME):
        hub_name(model)


def _check_files(model: str) -> None:
    """Files that are no model, or none that runs here, are refused as `run` refuses them, before there is a server
    that would have to end. Only headers are read.
    """
    from monotape.models.registry import spec_from_config
    from monotape.weights.check import check_tensors
    from monotape.weights.open import open_checkpoint
    from monotape.weights.paths import local_path

    if (path := local_path(model)) is not None:
        checkpoint = open_checkpoint(path)
        check_tensors(spec_from_config(checkpoint.config), checkpoint)


def _check(options: argparse.Namespace) -> None:
    """Refuses what vLLM can and this server cannot, with the reason."""
    for name, (value, why) in AS_IT_IS.items():
        if getattr(options, name) != value:
            flag = "--" + name.replace("_", "-")
            raise UsageError(
                f"{flag} {getattr(options, name)} is not supported: {why}.", f"Leave it out or use {value}."
            )
    if options.quantization not in (None, "q8", "int8", "fp8", "int4"):
        raise UsageError(
            f"--quantization {options.quantization} is not supported.",
            "Use fp8, int4 or q8 to quantise a 16-bit model, or leave it out: files say what they hold.",
        )
    if options.quantization and options.dtype not in ("auto", options.quantization):
        raise UsageError("--quantization and --dtype contradict each other.", "Give one of them.")
    if options.kv_cache_dtype not in ("auto", "float16", "fp8"):
        raise UsageError(f"--kv-cache-dtype {options.kv_cache_dtype} is not supported.", "Use auto or fp8.")
    if options.kv_cache_dtype == "fp8" and options.kv_dtype not in ("auto", "fp8"):
        raise UsageError("--kv-cache-dtype and --kv-dtype contradict each other.", "Give one of them.")
    if options.speculative_config is not None:
        raise UsageError(
            "--speculative-config is not supported.",
            "Leave it out: drafts are looked up in prompt and answer. --no-speculation turns that off.",
        )
    if not options.enable_prefix_caching:
        raise UsageError("Prefix caching cannot be switched off.", "Leave out --no-enable-prefix-caching.")


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise UsageError(f"'{text}' is not JSON.", 'Write it like {"method": "ngram"}.') from None
