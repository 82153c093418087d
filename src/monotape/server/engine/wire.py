"""What the server and the engine process say to each other."""

from __future__ import annotations

from typing import Any

import msgspec

from monotape.engine.sampling_params import SamplingParams
from monotape.server.engine.info import ModelInfo, PhaseTime
from monotape.server.grammar.definition import Grammar

BEAT_S = 0.5  # how often the engine process says that it is alive
PROGRESS_S = 0.05  # between two looks at how much of a prompt has been read


class Generate(msgspec.Struct, tag=True):
    """Run one completion."""

    id: int
    prompt: bytes  # TokenIds as they are in memory: a list of 131,072 numbers takes milliseconds to read
    params: SamplingParams
    index: int = 0  # which of the completions of its request: each but the first has the next seed
    grammar: Grammar | None = None
    interval: int | None = None  # tokens in a message; None: as many as come within a few milliseconds
    special_mark: str = ""  # before the text of each special token
    progress: bool = False  # whether pieces without text say how much of the prompt has been read
    prediction: bytes = b""  # TokenIds, like the prompt: a text that the answer may repeat


class Compile(msgspec.Struct, tag=True):
    """Compile a grammar for a waiting request while a completion runs; Compiled answers."""

    id: int
    grammar: Grammar


class Forget(msgspec.Struct, tag=True):
    """The request that needed this grammar is gone."""

    id: int


class Cancel(msgspec.Struct, tag=True):
    id: int


class Close(msgspec.Struct, tag=True):
    pass


class Phase(msgspec.Struct, tag=True):
    """A phase of the start has ended."""

    phase: PhaseTime


class Ready(msgspec.Struct, tag=True):
    """The model is loaded and has made its first token."""

    info: ModelInfo
    defaults: dict[str, Any]  # the sampling parameters that the model's authors recommend


class LoadFailed(msgspec.Struct, tag=True):
    """The model cannot be loaded; the process ends."""

    message: str
    hint: str
    lasting: bool = True  # another try would end the same way


class Beat(msgspec.Struct, tag=True):
    """Still alive. `progress` counts tokens, of prompts and of answers, so a request that stands still shows."""

    running: int | None
    progress: int
    filled: int = 0  # of the running one's prompt: tokens whose KV is there, cached ones included


class Started(msgspec.Struct, tag=True):
    """The job has begun: how much of its prompt was cached, or why next to nothing was."""

    id: int
    time_ns: int  # this machine's monotonic clock
    cached: int
    miss: str | None
    changed: tuple[int, int] | None = None  # engine/changed_prefix.py: at, again


class Chosen(msgspec.Struct, array_like=True):
    """A token with its log-probability and those of the most likely ones."""

    id: int
    logprob: float
    top: list[tuple[int, float]]


class Piece(msgspec.Struct, tag=True):
    """Text and the tokens it came with."""

    id: int
    text: str
    token_ids: list[int]
    decode_ns: int  # from the first token to the last of these, on the backend's clock
    chosen: list[Chosen] | None = None
    read: int | None = (
        None  # tokens of the prompt, cached ones included, in a piece that comes before any token
    )


class Stats(msgspec.Struct):
    """The figures of one completion, from the backend's clock."""

    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    prefill_ns: int | None  # until the first token
    decode_ns: int
    gaps_ns: tuple[int, int] | None  # median and 99th percentile of the time between tokens
    bytes_per_token: int
    drafted_tokens: int = 0  # drafts that were checked
    accepted_tokens: int = 0  # drafts that are part of the answer


class Done(msgspec.Struct, tag=True):
    """The completion has ended. `text` is what was still held back."""

    id: int
    text: str
    finish_reason: str
    stop_reason: int | str | None
    seed: int
    stats: Stats
    prompt_scores: list[Chosen | None] | None = None


class Compiled(msgspec.Struct, tag=True):
    """A grammar can be used, or why not: `kind` is then that of a Fault."""

    id: int
    kind: str | None = None
    message: str = ""


class Fault(msgspec.Struct, tag=True):
    """The completion cannot go on. Only a "request" fault is the client's."""

    id: int
    kind: str  # "request", "model", "memory"
    message: str


ToEngine = Generate | Cancel | Compile | Forget | Close
FromEngine = Phase | Ready | LoadFailed | Beat | Started | Piece | Done | Compiled | Fault

to_engine = msgspec.msgpack.Decoder(ToEngine)
from_engine = msgspec.msgpack.Decoder(FromEngine)
