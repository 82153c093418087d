"""The trainer's command line; its flags are the fields of Settings and Preparation."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from monotape.errors import MonotapeError, UsageError
from monotape.training.corpus.prepare import Preparation
from monotape.training.settings import Settings, from_saved


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; a failure that a user can meet is one sentence and exit code 2."""
    options = build_parser().parse_args(arguments)
    try:
        result: int = options.handler(options)
        return result
    except MonotapeError as error:
        print(f"monotape: {error.message}", file=sys.stderr, flush=True)
        if error.hint:
            print(f"  hint: {error.hint}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("monotape: interrupted; what was trained is saved, the same command goes on.", file=sys.stderr)
        return 130


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m monotape.training", description=__doc__, allow_abbrev=False
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_corpus(commands)
    _add_train(commands)
    _add_probe(commands)
    _add_table(commands)
    _add_export(commands)
    return parser


def _command(commands: Any, name: str, handler: Any) -> argparse.ArgumentParser:
    summary = (handler.__doc__ or "").split("\n")[0]
    made: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=summary, allow_abbrev=False
    )
    made.set_defaults(handler=handler)
    return made


def _add_fields(parser: argparse.ArgumentParser, kind: type, leave_out: Sequence[str] = ()) -> None:
    """A flag for every field of a dataclass of settings."""
    for field in fields(kind):
        if field.name not in leave_out:
            assert field.default is not MISSING
            parse = _truth if isinstance(field.default, bool) else type(field.default)
            parser.add_argument(f"--{field.name.replace('_', '-')}", type=parse, metavar="VALUE",
                                help=f"default: {field.default}")  # fmt: skip


def _truth(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text.lower() == "true"


def _fields_of(options: argparse.Namespace, kind: type, **given: Any) -> Any:
    """The dataclass of a command line: its flags over `given`, over the defaults."""
    told = {field.name: getattr(options, field.name, None) for field in fields(kind)}
    return kind(**{**given, **{name: value for name, value in told.items() if value is not None}})


def _add_corpus(commands: Any) -> None:
    parts = commands.add_parser("corpus", help="fetch, prepare, pack and unpack a corpus").add_subparsers(
        required=True, metavar="STEP"
    )
    fetch = _command(parts, "fetch", fetch_corpus)
    fetch.add_argument(
        "--packages",
        type=Path,
        required=True,
        help="a file with a package on each line: its name, or name==version",
    )
    fetch.add_argument("--into", type=Path, required=True)
    prepare = _command(parts, "prepare", prepare_corpus)
    prepare.add_argument("--packages", type=Path, required=True, help="the folder of wheels")
    prepare.add_argument(
        "--tokenizer", type=Path, required=True, help="a tokenizer.json with fill-in-the-middle marks"
    )
    prepare.add_argument("--into", type=Path, required=True)
    _add_fields(prepare, Preparation)
    packed = _command(parts, "pack", pack_corpus)
    packed.add_argument("--corpus", type=Path, required=True)
    packed.add_argument("--into", type=Path, required=True)
    unpacked = _command(parts, "unpack", unpack_corpus)
    unpacked.add_argument("--pieces", type=Path, nargs="+", required=True, help="folders of pieces")
    unpacked.add_argument("--into", type=Path, required=True)


def fetch_corpus(options: argparse.Namespace) -> int:
    """Download the wheels of the packages in a list, with pip: the newest, or the version that is given."""
    from monotape.training.corpus.packages import fetch

    if not options.packages.is_file():
        raise UsageError(f"{options.packages} is not a file.", "Give a list of packages, one on each line.")
    names = [line.strip() for line in options.packages.read_text("utf-8").splitlines() if line.strip()]
    without = fetch(names, options.into)
    print(f"{len(names) - len(without)} of {len(names)} packages are in {options.into}.")
    if without:
        print(f"No wheel of: {', '.join(without)}.")
    return 0


def prepare_corpus(options: argparse.Namespace) -> int:
    """Turn packages into sequences of tokens: deduplicated, capped, with packages held out."""
    from monotape.training.corpus.prepare import prepare

    record = prepare(options.packages, options.tokenizer, options.into, _fields_of(options, Preparation))
    print(json.dumps(record["files"]))
    return 0


def pack_corpus(options: argparse.Namespace) -> int:
    """Compress a prepared corpus into pieces of at most 50 MB."""
    from monotape.training.corpus.pieces import pack

    index = pack(options.corpus, options.into)
    print(f"{len(index['pieces'])} pieces in {options.into}.")
    return 0


def unpack_corpus(options: argparse.Namespace) -> int:
    """Put the pieces of a corpus together again."""
    from monotape.training.corpus.pieces import unpack

    unpack(options.pieces, options.into)
    return 0


def _add_train(commands: Any) -> None:
    parser = _command(commands, "train", train)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument(
        "--into", type=Path, required=True, help="the run's folder; a checkpoint there is gone on with"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--save-every", type=float, default=120.0, help="seconds")
    parser.add_argument(
        "--until", type=float, default=math.inf, help="seconds since the epoch: save and stop then"
    )
    parser.add_argument("--turn", type=Path, help="a file that one training process at a time holds")
    parser.add_argument(
        "--keep-trunk",
        action="store_true",
        help="keep a checkpoint of the step where the rate begins to fall",
    )
    parser.add_argument("--trunk", type=Path, help="start from a shorter run's trunk")
    parser.add_argument(
        "--like", type=Path, help="the folder of a finished run, whose settings are the defaults"
    )
    _add_fields(parser, Settings)


def train(options: argparse.Namespace) -> int:
    """Train one run, or go on with it."""
    from monotape.training.data import Corpus
    from monotape.training.machine import chosen_device, repeatable
    from monotape.training.trainer import Conduct, Trainer

    like = _settings_of(options.like) if options.like is not None else {}
    settings = _fields_of(options, Settings, **like)
    device = chosen_device(options.device)
    repeatable(device)
    conduct = Conduct(
        save_every_s=options.save_every, until=options.until, turn=options.turn, keep_trunk=options.keep_trunk,
        trunk=options.trunk, say=lambda line: print(line, flush=True),
    )  # fmt: skip
    Trainer(settings, Corpus.load(options.corpus, device), options.into, device, conduct).run()
    return 0


def _settings_of(run: Path) -> dict[str, Any]:
    """The settings of a finished run."""
    from monotape.training.trainer import RESULT

    try:
        saved: dict[str, Any] = json.loads((run / RESULT).read_text("utf-8"))["settings"]
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(
            f"{run} is not a finished run ({error!r}).", f"Its {RESULT} is what is read."
        ) from None
    return from_saved(saved).saved()


def _add_probe(commands: Any) -> None:
    parser = _command(commands, "probe", probe)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--into", type=Path, required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seconds", type=float, default=540.0, help="that this call may train")
    _add_fields(parser, Settings, leave_out=("arm", "seed"))


def probe(options: argparse.Namespace) -> int:
    """Try half and twice the rates on short runs; `table --rates` takes the best."""
    from monotape.training import table as comparison

    tokens = options.tokens or comparison.PROBE_TOKENS
    runs = comparison.probes(_fields_of(options, Settings), tokens)
    outcome = comparison.train_table(
        runs, options.corpus, options.into, seconds=options.seconds, device=options.device
    )
    if outcome.left:
        raise UsageError(
            f"Probes are not finished: {', '.join(outcome.left)}.", "Give the same command again."
        )
    print(json.dumps(comparison.best_rates(options.into)))
    return 0


def _add_table(commands: Any) -> None:
    parser = _command(commands, "table", table)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--into", type=Path, required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seconds", type=float, default=540.0, help="that this call may train")
    parser.add_argument("--save-every", type=float, default=120.0, help="seconds")
    parser.add_argument("--first", type=int, help="only so many runs, in order")
    parser.add_argument("--rates", type=Path, help="the folder of a probe, whose best rates are taken")
    parser.add_argument(
        "--predict", action="store_true", help="say how long an H200 is expected to take, and stop"
    )
    _add_fields(parser, Settings, leave_out=("arm", "lanes", "seed"))


def table(options: argparse.Namespace) -> int:
    """Train all runs of the comparison, or go on with it; exit code 3: call again."""
    from monotape.training import table as comparison

    rates = comparison.best_rates(options.rates) if options.rates is not None else {}
    runs = comparison.planned(_fields_of(options, Settings, **rates), comparison.ORDER[: options.first])
    if options.predict:
        tokens, seconds = runs[0].settings.tokens, comparison.predicted_s(runs)
        print(f"{len(runs)} runs of {tokens / 1e6:.0f}M tokens: about {seconds:.0f} s.")
        return 0
    outcome = comparison.train_table(
        runs, options.corpus, options.into, seconds=options.seconds, device=options.device,
        save_every_s=options.save_every, keep_trunks=[run.name for run in runs[:2]],
    )  # fmt: skip
    results = json.loads((options.into / comparison.RESULTS).read_text("utf-8"))
    if any(result["settings"]["arm"] == "tp" for result in results.values()):
        print(comparison.text(results))
    if outcome.failed:
        raise UsageError(
            f"{len(outcome.failed)} of {len(runs)} runs failed: {', '.join(outcome.failed)}.",
            "Their log.txt says why.",
        )
    if outcome.left:
        print(f"{len(outcome.done)} of {len(runs)} runs are done; give the same command again.")
    return 3 if outcome.left else 0


def _add_export(commands: Any) -> None:
    exported = _command(commands, "export", export_run)
    exported.add_argument("--run", type=Path, required=True)
    exported.add_argument("--corpus", type=Path, required=True)
    exported.add_argument("--into", type=Path, required=True)
    exported.add_argument("--one-lane", action="store_true", help="a run of tp as a model for one device")
    packed = _command(commands, "pack", pack_model)
    packed.add_argument("--model", type=Path, required=True, help="an exported folder")
    packed.add_argument("--into", type=Path, required=True, help="the packed file")
    packed.add_argument("--embedding-bits", type=int, choices=(4, 8), default=8)
    packed.add_argument("--corpus", type=Path, help="measure bits per byte of the packed model")
    packed.add_argument("--device", default="auto")


def export_run(options: argparse.Namespace) -> int:
    """Write a run's model as a folder that the engine opens."""
    from monotape.training.export import export

    export(options.run, options.corpus, options.into, one_lane=options.one_lane)
    return 0


def pack_model(options: argparse.Namespace) -> int:
    """Pack an exported model into 4 and 8 bits, one file of at most 24 MB."""
    from monotape.training.export import pack, packed_quality

    size = pack(options.model, options.into, options.embedding_bits)
    print(f"{options.into}: {size:,} bytes")
    if options.corpus is not None:
        import torch

        from monotape.training.data import Corpus
        from monotape.training.machine import chosen_device

        device = chosen_device(options.device)
        compute = torch.bfloat16 if device.type == "cuda" else torch.float32
        found = packed_quality(options.into, Corpus.load(options.corpus, device), 64, compute)
        print(f"{found['bits_per_byte']:.4f} bits per byte (standard error {found['standard_error']:.4f})")
    return 0
