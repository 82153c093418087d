"""What is packed onto tapes comes off them again, row by row."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

from families import CASES
from lane_models import make_laneformer
from monotape.backends.cpu.packer import NativePacker
from monotape.compiler.compile import compile_plan
from monotape.models.registry import spec_from_config
from monotape.models.spec import ModelSpec
from monotape.plan.formats import CPU_LAYOUTS, TILE_ROWS, Format
from monotape.plan.types import Machine, Part, Plan, Stage
from monotape.weights.checkpoint import Checkpoint
from monotape.weights.filling import holds_codes, load_tapes
from monotape.weights.open import open_checkpoint
from monotape.weights.tapes import source_of, tensor_name
from weights.gguf_files import LAYERS, write_model
from weights.tiles import unpack_tiles

ROUNDED = [fmt for fmt in CPU_LAYOUTS if not holds_codes(fmt)]
Folder = Callable[[str], Path]
Floats = NDArray[np.float32]


def stage_rows(
    plan: Plan, stage: Stage, tapes: list[NDArray[np.uint8]], layer: int | None, rank_index: int = 0
) -> Floats:
    """All tiles of a stage, gathered from every worker's tape."""
    rank, tile_bytes, pieces = plan.ranks[rank_index], stage.layout.tile_bytes(stage.padded_k), []
    for tape, data in zip(rank.tapes, tapes, strict=True):
        segments = {segment.stage: segment for segment in (*tape.layer_segments, tape.head_segment)}
        start = segments[stage.name].offset + (layer or 0) * tape.layer_bytes
        pieces.append(data[start : start + segments[stage.name].bytes].reshape(-1, tile_bytes))
    return unpack_tiles(plan.format, np.concatenate(pieces), stage.padded_k)


def part_rows(stage: Stage, rows: Floats, part: Part) -> Floats:
    """The rows of one part, without the padding of its groups and of k."""
    tiles = rows.reshape(-1, TILE_ROWS, rows.shape[1])
    if stage.interleaved:
        mine = tiles[stage.parts.index(part) :: len(stage.parts)]
    else:
        start = sum(other.tiles for other in stage.parts[: stage.parts.index(part)])
        mine = tiles[start : start + part.tiles]
    groups = mine.reshape(part.rows // part.group, -1, rows.shape[1])[:, : part.group, : stage.k]
    return groups.reshape(part.rows, stage.k)


def original(spec: ModelSpec, checkpoint: Checkpoint, role: str, layer: int | None) -> Floats:
    source = source_of(spec, role, layer)
    start, stop = source.rows or (0, spec.shape_of(role)[0])
    return checkpoint.rows(tensor_name(source, layer), start, stop)


def assert_close(fmt: Format, got: Floats, want: Floats) -> None:
    if fmt is Format.F32:
        assert np.array_equal(got, want)
    elif fmt is Format.Q8:
        padded = np.zeros((want.shape[0], -(-want.shape[1] // 32) * 32), np.float32)
        padded[:, : want.shape[1]] = want
        largest = np.abs(padded.reshape(want.shape[0], -1, 32)).max(axis=2, keepdims=True).repeat(32, axis=2)
        step = largest.reshape(padded.shape)[:, : want.shape[1]] / 127
        assert (np.abs(got - want) <= 0.51 * step + 1e-7).all()
    else:
        np.testing.assert_allclose(got, want, rtol=2**-8 if fmt is Format.BF16 else 2**-11, atol=1e-7)


@pytest.mark.parametrize("fmt", ROUNDED)
@pytest.mark.parametrize("case", [case.name for case in CASES if case.name in ("llama", "qwen2", "phi3")])
def test_every_row_of_every_matrix_is_on_a_tape(checkpoint: Folder, case: str, fmt: Format) -> None:
    opened = open_checkpoint(checkpoint(case))
    spec = spec_from_config(opened.config)
    plan = compile_plan(spec, Machine("cpu", 3), fmt, context=64)
    tapes = load_tapes(spec, plan, opened, NativePacker())
    rank = plan.ranks[0]
    for layer in range(spec.layers):
        for stage in rank.layer_stages:
            rows = stage_rows(plan, stage, tapes, layer)
            for part in stage.parts:
                assert_close(fmt, part_rows(stage, rows, part), original(spec, opened, part.role, layer))
    head = stage_rows(plan, rank.head, tapes, None)
    part = rank.head.parts[0]
    assert_close(fmt, part_rows(rank.head, head, part), original(spec, opened, part.role, None))


def rank_matrices(
    spec: ModelSpec, plan: Plan, opened: Checkpoint, rank: int, layer: int
) -> dict[str, Floats]:
    """What a rank's tapes hold of a layer, by role."""
    tapes = load_tapes(spec, plan, opened, NativePacker(), rank_index=rank)
    found = {}
    for stage in plan.ranks[rank].layer_stages:
        rows = stage_rows(plan, stage, tapes, layer, rank)
        found |= {part.role: part_rows(stage, rows, part) for part in stage.parts}
    return found


@pytest.mark.parametrize("fmt", [Format.F32, Format.Q8])
def test_ranks_have_their_shares_and_nothing_else(checkpoint: Folder, fmt: Format) -> None:
    opened = open_checkpoint(checkpoint("qwen2"))
    spec = spec_from_config(opened.config)
    plan = compile_plan(spec, Machine("cpu", 3), fmt, context=64, ranks=2)
    for rank in (0, 1):
        found = rank_matrices(spec, plan, opened, rank, 1)
        for stage in plan.ranks[rank].layer_stages:
            for part in stage.parts:
                whole = original(spec, opened, part.role, 1)
                rows = slice(part.first, part.first + part.rows)
                want = whole[rows, stage.first_k : stage.first_k + stage.k]
                assert_close(fmt, found[part.role], np.ascontiguousarray(want))


def test_integers_of_a_file_stay_as_they_are_on_every_rank(tmp_path: Path) -> None:
    """Columns are shared in whole blocks of 32, so that no scale has to be made anew."""
    kinds = {f"blk.{layer}.ffn_down.weight": Kind.Q8_0 for layer in range(LAYERS)}
    opened = open_checkpoint(write_model(tmp_path / "model.gguf", "qwen2", kinds=kinds))
    spec = spec_from_config(opened.config)
    plan = compile_plan(spec, Machine("cpu", 2), Format.Q8, context=64, ranks=2)
    down = original(spec, opened, "down", 2)
    for rank in (0, 1):
        stage = plan.ranks[rank].layer_stages[3]
        found = rank_matrices(spec, plan, opened, rank, 2)
        assert np.array_equal(found["down"], down[:, stage.first_k : stage.first_k + stage.k])
        assert found["down"].shape == (spec.width, (64, 96)[rank])


def test_lanes_come_off_their_own_matrices_in_the_order_of_the_kernels(tmp_path: Path) -> None:
    model = make_laneformer(tmp_path)
    opened = open_checkpoint(tmp_path)
    spec = spec_from_config(opened.config)
    plan = compile_plan(spec, Machine("cpu", 2), Format.F32, context=64)
    tensors = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    for lane in (0, 3):
        found = rank_matrices(spec, plan, opened, lane, 2)
        of = {"q": "attention.wq", "v": "attention.wv", "output": "attention.wo", "gate": "feed_forward.w1",
              "down": "feed_forward.w2", "up": "feed_forward.w3"}  # fmt: skip
        want = {role: tensors[f"model.layers.2.{name}.weight"][lane] for role, name in of.items()}
        for role in ("v", "output", "gate", "down", "up"):
            assert np.array_equal(found[role], want[role])
        heads = want["q"].reshape(2, 6, 48)  # pairs (2 i, 2 i + 1) become (i, i + half)
        assert np.array_equal(found["q"].reshape(2, 6, 48), heads[:, [0, 2, 4, 1, 3, 5]])


def test_integers_are_packed_without_rounding() -> None:
    generator = np.random.default_rng(1)
    integers = generator.integers(-128, 128, (24, 96)).astype(np.int8)
    scales = generator.uniform(0.001, 2, (24, 3)).astype(np.float16)
    out = np.empty((3, CPU_LAYOUTS[Format.Q8].tile_bytes(96)), np.uint8)
    assert NativePacker().pack_integers(integers, scales, out) == -1
    expected = integers.astype(np.float32) * scales.astype(np.float32).repeat(32, axis=1)
    assert np.array_equal(unpack_tiles(Format.Q8, out, 96), expected)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("fmt", ROUNDED)
def test_what_is_not_finite_is_found_with_its_row(fmt: Format, bad: float) -> None:
    rows = np.ones((16, 64), np.float32)
    rows[11, 33] = bad
    assert NativePacker().pack(fmt, rows, np.empty((2, CPU_LAYOUTS[fmt].tile_bytes(64)), np.uint8)) == 11


def test_a_value_too_large_for_half_precision_is_refused_there_and_nowhere_else() -> None:
    rows = np.full((8, 32), 70000.0, np.float32)
    for fmt in ROUNDED:
        expected = 0 if fmt is Format.F16 else -1
        assert (
            NativePacker().pack(fmt, rows, np.empty((1, CPU_LAYOUTS[fmt].tile_bytes(32)), np.uint8))
            == expected
        )


def test_scales_that_are_not_finite_are_refused() -> None:
    scales = np.ones((8, 1), np.float16)
    scales[5] = np.inf
    out = np.empty((1, CPU_LAYOUTS[Format.Q8].tile_bytes(32)), np.uint8)
    assert NativePacker().pack_integers(np.ones((8, 32), np.int8), scales, out) == 5


def test_tiny_blocks_keep_their_sign_and_size() -> None:
    """Scales below the smallest normal half must not clip what they scale."""
    values = np.linspace(-1e-4, 1e-4, 256, dtype=np.float32).reshape(8, 32)
    out = np.empty((1, CPU_LAYOUTS[Format.Q8].tile_bytes(32)), np.uint8)
    assert NativePacker().pack(Format.Q8, values, out) == -1
    assert np.abs(unpack_tiles(Format.Q8, out, 32) - values).max() < 1e-6
