"""Loading onto a fake GPU: every row lands where the plan says, in pieces, and what cannot be loaded is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from backends.fake_cuda import FakeCuda, fake_gpu
from families import BY_NAME, make_checkpoint
from lane_models import make_laneformer
from monotape.backends.cuda import direct, staging
from monotape.backends.cuda import loading as cuda_loading
from monotape.backends.cuda.blocks import first_not_finite, pack_blocks, to_halves
from monotape.backends.cuda.loading import LoadedModel, load_model
from monotape.backends.cuda.memory import MemoryPlan, memory_plan, require_memory
from monotape.compiler.compile import compile_plan
from monotape.compiler.gpu import gpu_plan as lowered_plan
from monotape.errors import CheckpointError, ResourceError
from monotape.models.registry import spec_from_config
from monotape.models.spec import ModelSpec
from monotape.plan.formats import GPU_LAYOUTS, TILE_ROWS, Format
from monotape.plan.types import Machine, Plan, Stage
from monotape.weights.checkpoint import Checkpoint
from monotape.weights.open import open_checkpoint
from weights.test_tapes import original, part_rows

WORKERS = 5
STORED = {Format.BF16: "bfloat16", Format.F16: "float16"}


def gpu_plan(spec: ModelSpec, fmt: Format, alignment: int = 128, ranks: int | None = None) -> Plan:
    machine = Machine("cuda", WORKERS, alignment=alignment, whole_heads=False)
    return compile_plan(spec, machine, fmt, context=48, ranks=ranks)


def widened(fmt: Format, halves: NDArray[np.uint16]) -> NDArray[np.float32]:
    if fmt is Format.F16:
        return halves.view(np.float16).astype(np.float32)
    return (halves.astype(np.uint32) << 16).view(np.float32)


def stage_rows(plan: Plan, stage: Stage, tapes: NDArray[np.uint8], layer: int | None) -> NDArray[np.float32]:
    """All rows of a stage, gathered from where the plan says that they lie."""
    rank, tile_bytes = plan.ranks[0], stage.tile_bytes
    starts = np.cumsum([0, *(tape.bytes for tape in rank.tapes)])
    pieces = []
    for tape, start in zip(rank.tapes, starts, strict=False):
        segments = {segment.stage: segment for segment in (*tape.layer_segments, tape.head_segment)}
        first = int(start) + segments[stage.name].offset + (layer or 0) * tape.layer_bytes
        pieces.append(tapes[first : first + segments[stage.name].bytes].reshape(-1, tile_bytes))
    blocks = np.concatenate(pieces).view(np.uint16).reshape(-1, stage.padded_k // 32, TILE_ROWS, 32)
    return widened(stage.format, blocks.transpose(0, 2, 1, 3).reshape(-1, stage.padded_k))


def read(loaded: LoadedModel, name: str, dtype: Any, *shape: int) -> NDArray[Any]:
    return loaded.memories[name].read(np.empty(shape, dtype))


def check(
    loaded: LoadedModel, spec: ModelSpec, plan: Plan, checkpoint: Checkpoint, rtol: float, atol: float = 0
) -> None:
    tapes = read(loaded, "tapes", np.uint8, plan.tape_bytes)
    rank = plan.ranks[0]
    for layer in range(spec.layers):
        for stage in rank.layer_stages:
            rows = stage_rows(plan, stage, tapes, layer)
            for part in stage.parts:
                want = original(spec, checkpoint, part.role, layer)
                np.testing.assert_allclose(part_rows(stage, rows, part), want, rtol=rtol, atol=atol)
    head = stage_rows(plan, rank.head, tapes, None)
    want = original(spec, checkpoint, rank.head.parts[0].role, None)
    np.testing.assert_allclose(part_rows(rank.head, head, rank.head.parts[0]), want, rtol=rtol, atol=atol)


@pytest.fixture(params=["native", "NumPy"])
def packed_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With a C++ compiler, and without."""
    way: str = request.param
    if way == "NumPy":
        monkeypatch.setattr(direct, "pack_function", lambda: None)
    return way


@pytest.mark.parametrize("layers_a_piece", [3, 2, 0])
@pytest.mark.parametrize("fmt", STORED)
@pytest.mark.parametrize("case", ["llama", "qwen2", "phi3"])
def test_every_row_lands_where_the_plan_says(
    tmp_path: Path,
    case: str,
    fmt: Format,
    layers_a_piece: int,
    packed_by: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stored as it will lie on the tapes: bit for bit, whether a piece holds several layers or a few tiles."""
    checkpoint = open_checkpoint(make_checkpoint(BY_NAME[case], tmp_path, STORED[fmt]))
    spec = spec_from_config(checkpoint.config)
    plan = gpu_plan(spec, fmt, alignment=1024)  # gaps between stages
    longest = max(tape.layer_bytes for tape in plan.ranks[0].tapes)
    slot_bytes = layers_a_piece * longest or 4000
    for module in (staging, cuda_loading):
        monkeypatch.setattr(module, "SLOT_BYTES", slot_bytes)
    seen: list[tuple[str, int, int]] = []
    with fake_gpu(FakeCuda()):
        loaded = load_model(spec, plan, checkpoint, lambda *progress: seen.append(progress))
        check(loaded, spec, plan, checkpoint, rtol=0)
        starts = read(loaded, "tape_start", np.int64, WORKERS)
        assert starts.tolist() == [sum(t.bytes for t in plan.ranks[0].tapes[:i]) for i in range(WORKERS)]
        if not spec.tied:
            table = widened(fmt, read(loaded, "embedding", np.uint16, spec.vocab, spec.width))
            assert np.array_equal(table, original(spec, checkpoint, "embedding", None))
        assert ("q_norm" in loaded.memories, "qkv_bias" in loaded.memories) == (spec.qk_norm, spec.qkv_bias)
        assert read(loaded, "cosines", np.float32, plan.context, spec.rope.dims // 2)[0].tolist() == [1.0] * (
            spec.rope.dims // 2
        )
        assert loaded.bytes <= plan.weight_bytes + 4096
    assert seen[-1] == ("weights", len(seen), len(seen))
    if layers_a_piece:
        groups = -(-spec.layers // layers_a_piece)
        table_bytes = 0 if spec.tied else 2 * spec.vocab * spec.width
        assert len(seen) == WORKERS * (groups + 1) + -(-table_bytes // slot_bytes)
    else:
        assert len(seen) >= 70


@pytest.mark.parametrize("fmt", STORED)
def test_wider_weights_are_rounded(checkpoint: Callable[[str], Path], fmt: Format) -> None:
    opened = open_checkpoint(checkpoint("qwen3"))
    spec = spec_from_config(opened.config)
    plan = gpu_plan(spec, fmt)
    with fake_gpu(FakeCuda()):
        rtol, atol = (2**-8, 0.0) if fmt is Format.BF16 else (2**-10, 2**-24)
        check(load_model(spec, plan, opened), spec, plan, opened, rtol, atol)


def layer_parts(loaded: LoadedModel, plan: Plan, layer: int) -> dict[str, NDArray[np.float32]]:
    """What the tapes hold of a layer, by role."""
    tapes, found = read(loaded, "tapes", np.uint8, plan.tape_bytes), {}
    for stage in plan.ranks[0].layer_stages:
        rows = stage_rows(plan, stage, tapes, layer)
        found |= {part.role: part_rows(stage, rows, part) for part in stage.parts}
    return found


@pytest.mark.parametrize("stored", ["bfloat16", "float32"])
@pytest.mark.parametrize("case", ["qwen2", "phi3"])
def test_a_rank_has_its_share_and_nothing_else(
    tmp_path: Path, case: str, stored: str, packed_by: str
) -> None:
    checkpoint = open_checkpoint(make_checkpoint(BY_NAME[case], tmp_path, stored))
    spec = spec_from_config(checkpoint.config)
    whole = gpu_plan(spec, Format.BF16, ranks=2)
    for rank in whole.ranks:
        plan = replace(whole, ranks=(rank,))
        with fake_gpu(FakeCuda()):
            found = layer_parts(load_model(spec, plan, checkpoint), plan, 1)
        for stage in rank.layer_stages:
            for part in stage.parts:
                want = original(spec, checkpoint, part.role, 1)[part.first : part.first + part.rows]
                want = want[:, stage.first_k : stage.first_k + stage.k]
                np.testing.assert_allclose(found[part.role], want, rtol=0 if stored == "bfloat16" else 2**-8)


@pytest.mark.parametrize("lanes", [1, 4])
def test_lanes_come_off_their_own_matrices_in_the_order_of_the_kernels(tmp_path: Path, lanes: int) -> None:
    model = make_laneformer(tmp_path, num_lanes=lanes, replicated_rmsn_scale=False)
    checkpoint = open_checkpoint(tmp_path)
    spec = spec_from_config(checkpoint.config)
    whole = gpu_plan(spec, Format.BF16)
    tensors = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    names = {"q": "attention.wq", "k": "attention.wk", "v": "attention.wv", "output": "attention.wo",
             "gate": "feed_forward.w1", "down": "feed_forward.w2", "up": "feed_forward.w3"}  # fmt: skip
    for lane in {0, lanes - 1}:
        plan = replace(whole, ranks=(whole.ranks[lane],))
        with fake_gpu(FakeCuda()):
            loaded = load_model(spec, plan, checkpoint)
            found = layer_parts(loaded, plan, 2)
            gains = read(loaded, "attention_norm", np.float32, spec.layers, spec.width)
            table = widened(Format.BF16, read(loaded, "embedding", np.uint16, spec.vocab, spec.width))
        for role, name in names.items():
            want = tensors[f"model.layers.2.{name}.weight"][lane]
            if role in ("q", "k"):  # pairs (2 i, 2 i + 1) become (i, i + half)
                want = want.reshape(-1, 6, 48)[:, [0, 2, 4, 1, 3, 5]].reshape(want.shape)
            np.testing.assert_allclose(found[role], want, rtol=2**-8)
        assert np.array_equal(gains[2], tensors["model.layers.2.attention_norm.scale"][lane])
        np.testing.assert_allclose(table, tensors["model.tok_embeddings.weight"], rtol=2**-8)


def test_pinned_memory_is_given_back_and_no_tape_is_kept(checkpoint: Callable[[str], Path]) -> None:
    opened = open_checkpoint(checkpoint("llama-tied"))
    spec = spec_from_config(opened.config)
    plan = gpu_plan(spec, Format.BF16)
    with fake_gpu(FakeCuda()) as gpu:
        loaded = load_model(spec, plan, opened)
        assert gpu.used == sum(max(16, memory.bytes) for memory in loaded.memories.values())


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_no_number_is_refused_with_its_row(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, bad: float
) -> None:
    opened = open_checkpoint(checkpoint("llama-tied"))
    spec = spec_from_config(opened.config)
    rows = opened.rows

    def damaged(name: str, start: int, stop: int) -> NDArray[np.float32]:
        found = rows(name, start, stop)
        if "layers.1.mlp.down" in name and start <= 21 < stop:
            found[21 - start, 5] = bad
        return found

    monkeypatch.setattr(opened, "rows", damaged)
    with (
        fake_gpu(FakeCuda()) as gpu,
        pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.down_proj\.weight holds a value near row 21 "),
    ):
        load_model(spec, gpu_plan(spec, Format.BF16), opened)
    assert gpu.used == 0


@pytest.mark.parametrize("fmt", STORED)
def test_blocks_come_apart_again_also_where_tiles_alternate(fmt: Format) -> None:
    halves = np.random.default_rng(3).integers(0, 1 << 16, (24, 96)).astype(np.uint16)
    out = np.zeros((6, GPU_LAYOUTS[fmt].tile_bytes(96)), np.uint8)
    pack_blocks(halves, out[1::2])
    blocks = np.ascontiguousarray(out[1::2]).view(np.uint16).reshape(3, 3, TILE_ROWS, 32)
    assert np.array_equal(blocks.transpose(0, 2, 1, 3).reshape(24, 96), halves)
    assert not out[::2].any()


@pytest.mark.parametrize(
    ("fmt", "largest", "infinite"), [(Format.BF16, 0x7F7F, 0x7F80), (Format.F16, 0x7BFF, 0x7C00)]
)
@pytest.mark.parametrize("sign", [0, 0x8000])
def test_infinities_and_nans_of_either_sign_are_found(
    fmt: Format, largest: int, infinite: int, sign: int
) -> None:
    halves = np.full((16, 64), sign + largest, np.uint16)
    assert first_not_finite(fmt, halves) == -1
    for bits in (infinite, infinite + 1, 0x7FFF):
        broken = halves.copy()
        broken[11, 63] = sign + bits
        assert first_not_finite(fmt, broken) == 11


def test_halves_are_rounded_to_nearest_even() -> None:
    values = np.array([[1 + 2**-8, 1 + 3 * 2**-8, -3.0e38, 1e-30]], np.float32)
    assert widened(Format.BF16, to_halves(Format.BF16, values))[0, :2].tolist() == [1.0, 1 + 2**-6]
    assert first_not_finite(Format.BF16, to_halves(Format.BF16, values)) == -1
    assert first_not_finite(Format.F16, to_halves(Format.F16, values)) == 0
    for fmt in STORED:
        for bad in (np.nan, -np.nan, np.inf, 3.4e38 if fmt is Format.BF16 else 65520.0):
            assert first_not_finite(fmt, to_halves(fmt, np.array([[bad]], np.float32))) == 0


def test_memory_is_planned_from_the_plan() -> None:
    from shapes import SHAPES

    spec = spec_from_config(SHAPES["llama-3.2-1b"])
    needed = memory_plan(lowered_plan(spec, 132, 1000))
    assert needed.kv_per_position == 2 * 16 * 8 * 64 * 2
    assert needed.kv == 1024 * needed.kv_per_position  # whole units of 32 positions
    assert needed.total == needed.weights + needed.kv + needed.exchange + needed.other
    assert 2.4e9 < needed.weights < 2.6e9
    assert needed.total <= 1.05 * (needed.weights + needed.kv) + (1 << 30)


def test_kv_is_counted_as_it_lies_in_memory() -> None:
    """Keys of 80 values take blocks of 96, values of 80 take just that."""
    from shapes import SHAPES

    spec = spec_from_config({**SHAPES["llama-3.2-1b"], "head_dim": 80})
    needed = memory_plan(lowered_plan(spec, 132, 1000))
    assert needed.kv_per_position == 16 * 8 * (96 + 80) * 2


def test_too_little_memory_names_the_context_that_would_fit() -> None:
    needed = MemoryPlan(
        weights=10 * 10**9, kv_per_position=10**6, kv=8192 * 10**6, context=8192, exchange=10**8, other=10**8
    )
    require_memory(needed, needed.total)
    with pytest.raises(ResourceError) as caught:
        require_memory(needed, needed.total - 10**9)
    assert "17.39 GB free" in caught.value.message
    assert "needs 18.39 GB: weights 10.00, KV of 8,192 positions 8.19" in caught.value.message
    assert "--max-model-len 7168" in caught.value.hint
    with pytest.raises(ResourceError, match="Use a smaller model"):
        require_memory(needed, 5 * 10**9)
