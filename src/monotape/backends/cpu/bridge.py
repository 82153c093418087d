"""The native library as Python sees it: the structures of abi.h, and a library that is found, built or refused."""

from __future__ import annotations

import ctypes
import logging
from ctypes import POINTER, Structure, c_char_p, c_double, c_float, c_int32, c_int64, c_uint64, c_void_p
from functools import cache
from pathlib import Path

from monotape.backends.cpu.build import BuildError, build, find_compiler, library_name
from monotape.config import cache_dir, cxx_compiler, forced_isa
from monotape.errors import BackendUnavailable
from monotape.plan.formats import Format

#: abi.h: Format.
FORMAT_CODES = {
    Format.F32: 0, Format.F16: 1, Format.BF16: 2, Format.Q8: 3,
    Format.INT4_G32: 4, Format.INT4_G64: 5, Format.INT4_G128: 6,
    Format.INT4_G32Z: 7, Format.INT4_G64Z: 8, Format.INT4_G128Z: 9,
    Format.Q4_1: 10, Format.Q5_0: 11, Format.Q4_K: 12, Format.Q5_K: 13, Format.Q6_K: 14, Format.K_MIXED: 15,
    Format.WIDE: 16, Format.MXFP4: 17,
}  # fmt: skip
STAGE_NAMES = ("qkv", "output", "router", "gate_up", "down", "head")  # abi.h: Stage
FINISH_RUNNING, FINISH_STOP, FINISH_LENGTH, FINISH_CANCELLED = range(4)
FINISH_NUMERICAL, FINISH_DEADLINE, FINISH_MASK = range(4, 7)
MASKS_AHEAD = 64  # masks.h: kMasksAhead
KIND_GENERATE, KIND_LOGITS = 0, 1
HEAD_INPUTS = {"own": 0, "mean": 1, "sum": 2, "concatenate": 3}


class SpanStruct(Structure):
    _fields_ = (("first", c_int32), ("count", c_int32), ("offset", c_int64))


class StepStruct(Structure):
    _fields_ = (("own", c_float), ("sends", c_int32), ("folds", c_int32), ("whole", c_int32))


class GroupStruct(Structure):
    _fields_ = (
        *((name, c_int32) for name in ("ranks", "steps", "slots", "vocab", "head_input")),
        ("schedule", c_void_p),
    )


class ModelStruct(Structure):
    _fields_ = (
        *((name, c_int32) for name in ("layers", "width", "heads", "kv_heads", "head_dim", "ffn", "vocab")),
        *((name, c_int32) for name in ("rope_dims", "context", "chunk", "kv_block", "workers")),
        *((name, c_int32) for name in ("experts", "chosen", "softmax_over_all")),
        ("formats", c_int32 * len(STAGE_NAMES)), ("embedding_format", c_int32), ("kv_format", c_int32),
        *((name, c_float) for name in ("norm_eps", "attention_scale", "gate_alpha", "gate_limit", "gate_shift")),
        ("rank", c_int32), ("first_word", c_int32), ("deadline_us", c_int64),
        *((name, c_void_p) for name in ("windows", "cosines", "sines", "attention_norm", "ffn_norm", "final_norm")),
        *((name, c_void_p) for name in ("qkv_bias", "q_norm", "k_norm", "embedding")),
        *((name, c_void_p) for name in ("tapes", "layer_bytes", "spans", "sinks", "output_bias", "router_bias")),
        *((name, c_void_p) for name in ("gate_bias", "up_bias", "down_bias", "library")),
        ("expert_bytes", c_int64),
    )  # fmt: skip


class SamplingStruct(Structure):
    _fields_ = (
        *((name, c_float) for name in ("temperature", "top_p", "min_p")),
        *((name, c_float) for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")),
        ("top_k", c_int32), ("bias_count", c_int32), ("bias_ids", c_void_p), ("bias_values", c_void_p),
        ("seed", c_uint64),
    )  # fmt: skip


class JobStruct(Structure):
    _fields_ = (
        *((name, c_int32) for name in ("kind", "prompt_length", "cached", "max_tokens", "min_tokens")),
        *((name, c_int32) for name in ("stop_count", "top_logprobs", "history_length", "masked")),
        *((name, c_void_p) for name in ("prompt", "stop_ids", "history", "keys", "values")),
        ("kv_capacity", c_int64), ("sampling", SamplingStruct),
        *((name, c_void_p) for name in ("logits", "ids", "times_ns", "logprobs", "top_ids", "top_values")),
    )  # fmt: skip


class StatusStruct(Structure):
    _fields_ = (
        *((name, c_int32) for name in ("finish", "tokens", "filled", "fault_worker", "fault_stage")),
        *((name, c_int32) for name in ("fault_position", "fault_waited_for", "fault_rank", "fault_waited_rank")),
        *((name, c_int32) for name in ("drafted", "accepted")),
        ("start_ns", c_int64),
    )  # fmt: skip


_SIGNATURES = {
    "monotape_size_of": (c_int32, [c_int32]),
    "monotape_isa": (c_char_p, [c_char_p]),
    "monotape_open": (c_void_p, [POINTER(ModelStruct), POINTER(GroupStruct), c_char_p]),
    "monotape_close": (None, [c_void_p]),
    "monotape_start": (c_int32, [c_void_p, POINTER(JobStruct)]),
    "monotape_cancel": (None, [c_void_p]),
    "monotape_allow": (None, [c_void_p, c_void_p]),
    "monotape_force": (c_int32, [c_void_p, c_void_p, c_int32]),
    "monotape_complete": (None, [c_void_p]),
    "monotape_await": (c_int32, [c_void_p, c_int32, c_int32]),
    "monotape_mask_deadline": (None, [c_void_p, c_int64]),
    "monotape_cancel_at": (None, [c_void_p, c_int64]),
    "monotape_looks": (c_int64, [c_void_p]),
    "monotape_check_all_drafts": (None, [c_void_p, c_int32]),
    "monotape_pass_times": (None, [c_void_p, POINTER(c_int64)]),
    "monotape_gate": (None, [c_int32, c_void_p, c_void_p, c_int32, c_int64, c_int64, c_void_p]),
    "monotape_delay_words": (None, [c_void_p, c_int64, c_uint64]),
    "monotape_stop_rank": (None, [c_void_p, c_int32, c_int32, c_int64]),
    "monotape_wait": (None, [c_void_p, c_int32, c_int32, POINTER(StatusStruct)]),
    "monotape_pack_tiles": (c_int64, [c_int32, c_void_p, c_int64, c_int32, c_void_p]),
    "monotape_pack_q8_tiles": (c_int64, [c_void_p, c_void_p, c_int64, c_int32, c_void_p]),
    "monotape_pack_codes": (c_int64, [c_int32, c_int64, c_int32, *[c_void_p] * 8]),
    "monotape_pack_raw": (
        c_int64,
        [c_int32, c_int64, c_void_p, c_int64, c_void_p, c_int64, c_int32, c_int32, c_int32, c_void_p],
    ),
    "monotape_products": (
        c_int32,
        [c_char_p, c_int32, c_void_p, c_int32, c_int32, c_void_p, c_int32, c_int32, c_void_p],
    ),
    "monotape_unpack": (c_int32, [c_char_p, c_int32, c_void_p, c_int32, c_int32, c_void_p]),
    "monotape_read_bandwidth": (c_double, [c_void_p, c_int64, c_int32, c_int32]),
}


@cache
def library() -> ctypes.CDLL:
    """The native library, built first if need be. Raises BackendUnavailable with the cause and the cure."""
    try:
        loaded = ctypes.CDLL(str(_locate()))
    except (BuildError, OSError) as error:
        raise BackendUnavailable(
            f"The native CPU library cannot be used: {error}.",
            "Install a C++ compiler (for example the package g++ or the Xcode command line tools) and try again, "
            "or use the slow reference with --backend reference.",
        ) from error
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    structures = (SpanStruct, ModelStruct, SamplingStruct, JobStruct, StatusStruct, StepStruct, GroupStruct)
    for code, structure in enumerate(structures):
        assert loaded.monotape_size_of(code) == ctypes.sizeof(structure), structure.__name__
    return loaded


def _locate() -> Path:
    name = library_name()
    cached = cache_dir() / "native" / name
    for candidate in (Path(__file__).parent / name, cached):
        if candidate.exists():
            return candidate
    return _build(cached.parent)


def _build(folder: Path) -> Path:
    compiler = find_compiler(cxx_compiler())
    if compiler is not None:
        logging.getLogger("monotape").warning(
            "Compiling the CPU's kernels, once for this version: about a minute on two cores."
        )
    try:
        return build(folder, compiler)
    except OSError as error:
        raise BackendUnavailable(
            f"The native CPU library cannot be written into {folder}: {error.strerror}.",
            "MONOTAPE_CACHE names another place.",
        ) from error


def isa_name() -> str:
    """The instruction set whose kernels will run; MONOTAPE_ISA can ask for another than the best."""
    wanted = forced_isa() or ""
    found = library().monotape_isa(wanted.encode())
    if found is None:
        raise BackendUnavailable(
            f"This machine or build has no '{wanted}' kernels.",
            "Unset MONOTAPE_ISA, or set it to portable, neon, avx2, avxvnni or avx512.",
        )
    return str(found.decode())
