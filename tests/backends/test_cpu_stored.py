"""Models whose GGUF file stores codes, on the CPU as they are stored: formats by stage, ranks, prompts, tied heads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFReader
from numpy.typing import NDArray

from backends.cpu_cases import PROMPT as LONG
from backends.cpu_cases import cpu, distance, generate, ids, reference
from monotape.backends.cpu.packer import NativePacker
from monotape.errors import CheckpointError
from monotape.models.registry import spec_from_config
from monotape.plan.formats import Format
from monotape.weights.filling import load_tapes
from monotape.weights.open import open_checkpoint
from weights.gguf_models import SHAPES, VOCAB, write_wide_model

PROMPT = tuple(token % VOCAB for token in LONG)
ALIKE = {
    Kind.Q4_0: Format.INT4_G32, Kind.Q4_1: Format.Q4_1, Kind.Q5_0: Format.Q5_0, Kind.Q8_0: Format.Q8,
    Kind.Q4_K: Format.Q4_K, Kind.Q5_K: Format.Q5_K, Kind.Q6_K: Format.Q6_K,
}  # fmt: skip
#: As the files called Q4_K_M and Q4_1 are: stages that mix formats, an embedding in yet another.
MIXED: dict[str, tuple[dict[str, Kind], dict[str, Format]]] = {
    "q4_k_m": (
        {**dict.fromkeys(SHAPES, Kind.Q4_K), "attn_v": Kind.Q6_K, "1.ffn_down": Kind.Q6_K, "token_embd": Kind.Q6_K},
        {
            "qkv": Format.K_MIXED, "output": Format.Q4_K, "gate_up": Format.Q4_K, "down": Format.K_MIXED,
            "head": Format.Q6_K,
        },
    ),
    "narrow": (
        {**dict.fromkeys(SHAPES, Kind.Q5_0), "0.attn_v": Kind.Q8_0, "1.ffn_down": Kind.Q4_0, "token_embd": Kind.Q8_0},
        {"qkv": Format.Q8, "output": Format.Q5_0, "gate_up": Format.Q5_0, "down": Format.Q5_0, "head": Format.Q8},
    ),
    "wide": (
        {**dict.fromkeys(SHAPES, Kind.Q4_1), "attn_v": Kind.Q6_K, "token_embd": Kind.Q4_1},
        {"qkv": Format.WIDE, "output": Format.Q4_1, "gate_up": Format.Q4_1, "down": Format.Q4_1, "head": Format.Q4_1},
    ),
}  # fmt: skip


def all_of(kind: Kind) -> dict[str, Kind]:
    return {**dict.fromkeys(SHAPES, kind), "token_embd": kind}


def middle_distance(got: NDArray[np.float32], exact: NDArray[np.float32]) -> float:
    return float(np.median([distance(*rows) for rows in zip(got, exact, strict=True)]))


def check_against_the_reference(path: Path, tp: int | None = None) -> dict[str, Format]:
    """Within twice what 16-bit weights cost by themselves; returns the formats of the stages.

    Of the rows, the middle one counts: weights of random codes are large, and attention for which two keys tie goes
    either way in any precision.
    """
    slow = reference(path)
    exact = slow.logits(PROMPT, slow.new_sequence())
    with cpu(path, "f16") as rounded:
        honest = rounded.logits(PROMPT, rounded.new_sequence())
    with cpu(path, "auto", tp=tp) as backend:
        got = backend.logits(PROMPT, backend.new_sequence())
        formats = {stage.name: stage.format for stage in backend.plan.ranks[0].stages}
    assert middle_distance(got, exact) <= 2 * middle_distance(honest, exact) + np.finfo(np.float32).eps
    return formats


@pytest.mark.parametrize("kind", ALIKE, ids=lambda kind: kind.name)
def test_a_file_of_one_format_runs_as_it_is_stored(tmp_path: Path, kind: Kind) -> None:
    path = write_wide_model(tmp_path / "m.gguf", all_of(kind))
    assert set(check_against_the_reference(path).values()) == {ALIKE[kind]}


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("tp", [None, 2])
def test_stages_have_formats_of_their_own(tmp_path: Path, name: str, tp: int | None) -> None:
    kinds, formats = MIXED[name]
    assert check_against_the_reference(write_wide_model(tmp_path / "m.gguf", kinds), tp) == formats


@pytest.mark.parametrize("name", MIXED)
def test_bits_depend_on_neither_workers_nor_cuts_nor_instruction_order(tmp_path: Path, name: str) -> None:
    path = write_wide_model(tmp_path / "m.gguf", MIXED[name][0])
    results = []
    for workers, cuts in ((1, [75]), (3, [1] * 75), (7, [3, 1, 40, 31])):
        with cpu(path, "auto", workers) as backend:
            sequence, start, pieces = backend.new_sequence(), 0, []
            for length in cuts:
                pieces.append(backend.logits(PROMPT[start : start + length], sequence))
                start += length
            results.append(np.concatenate(pieces))
    assert all(np.array_equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("kind", [Kind.Q4_1, Kind.Q6_K], ids=lambda kind: kind.name)
def test_greedy_tokens_are_those_of_the_reference(tmp_path: Path, kind: Kind) -> None:
    path = write_wide_model(tmp_path / "m.gguf", all_of(kind))
    expected = ids(generate(reference(path), PROMPT[:9], 40))
    with cpu(path, "auto") as backend:
        assert ids(generate(backend, PROMPT[:9], 40)) == expected


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", [*(kind.name for kind in ALIKE), *MIXED])
def test_blocks_of_the_file_are_packed_as_their_codes_are(
    tmp_path: Path, name: str, tp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Native code that reads the mapped file, against the codes that NumPy takes apart: the same bytes."""
    kinds = MIXED[name][0] if name in MIXED else all_of(Kind[name])
    opened = open_checkpoint(write_wide_model(tmp_path / "m.gguf", kinds))
    spec = spec_from_config(opened.config)
    with cpu(tmp_path / "m.gguf", "auto", tp=tp) as backend:
        plan = backend.plan
    for rank in range(tp):
        found = load_tapes(spec, plan, opened, NativePacker(), rank_index=rank)
        with monkeypatch.context() as without:
            without.setattr(NativePacker, "reads_raw", lambda *_: False)
            expected = load_tapes(spec, plan, opened, NativePacker(), rank_index=rank)
        assert all(np.array_equal(*tapes) for tapes in zip(found, expected, strict=True))
        assert all(tape.any() for tape in found)


def test_a_scale_that_is_not_finite_is_refused_with_its_row(tmp_path: Path) -> None:
    path = write_wide_model(tmp_path / "m.gguf", all_of(Kind.Q4_1))
    reader = GGUFReader(path, "r+")
    tensor = next(each for each in reader.tensors if each.name == "blk.1.ffn_down.weight")
    tensor.data[77, 40:42] = (0, 0x7C)  # the scale of its third block is infinite
    reader.data.flush()
    with pytest.raises(CheckpointError, match=r"down_proj.*row 77"), cpu(path, "auto"):
        pass
