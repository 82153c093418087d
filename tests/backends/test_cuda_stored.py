"""Native packing of stored formats: NumPy's bits, in every order of rows and columns, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

from families import Case, make_checkpoint
from monotape.backends.cuda import direct, packing, stored, tiles
from monotape.backends.cuda.cuts import Cut, head_cuts, layer_cuts
from monotape.backends.cuda.direct import packing_for
from monotape.backends.cuda.loading import _empty_scales
from monotape.backends.cuda.native_tiles import FORMATS
from monotape.backends.cuda.packing import AnyPacking, Layers
from monotape.backends.cuda.rank_view import rank_plan
from monotape.backends.cuda.stored import StoredPacking, round_rows
from monotape.compiler.compile import compile_plan
from monotape.engine.asked import Asked, formats_for
from monotape.errors import CheckpointError
from monotape.models.registry import spec_from_config
from monotape.models.spec import ModelSpec
from monotape.plan.formats import Format
from monotape.plan.types import Machine, Plan
from monotape.weights.checkpoint import Checkpoint
from monotape.weights.open import open_checkpoint
from monotape.weights.rounded import WAYS, RoundedCheckpoint
from weights.gguf_models import SHAPES, WIDTH, write_wide_model

STAGES = ("qkv", "output", "gate_up", "down")


def plan_of(spec: ModelSpec, stages: dict[str, Format], ranks: int = 1) -> Plan:
    machine = Machine("cuda", 3, alignment=1024, whole_heads=False)
    return compile_plan(spec, machine, Format.BF16, context=48, ranks=ranks, stage_formats=stages)


def pieces(plan: Plan, layers: int) -> Iterator[tuple[Cut, Layers]]:
    """All cuts, some of several layers."""
    for tape in plan.ranks[0].tapes:
        for cut in layer_cuts(plan, tape, 20_000):
            yield cut, range(layers)
            yield cut, range(1, 2)
        for cut in head_cuts(plan, tape, 20_000):
            yield cut, (None,)


def packed(
    spec: ModelSpec, plan: Plan, checkpoint: Checkpoint, kind: type
) -> tuple[list[NDArray[np.uint8]], dict[str, NDArray[np.float32]]]:
    scales = _empty_scales(plan)
    rank = plan.ranks[0]
    of_layers = packing_for(spec, checkpoint, rank.layer_stages, range(spec.layers), scales)
    of_head = packing_for(spec, checkpoint, (rank.head,), (None,), scales)
    assert type(of_layers) is kind
    found = []
    for cut, layers in pieces(plan, spec.layers):
        out = np.full(len(layers) * cut.bytes, 0xA5, np.uint8)
        (of_head if layers[0] is None else of_layers).of_cut(cut)(layers, out)
        found.append(out)
    return found, dict(scales)


def check(spec: ModelSpec, plan: Plan, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in range(len(plan.ranks)):
        own = rank_plan(plan, rank)
        native, scales = packed(spec, own, checkpoint, StoredPacking)
        with monkeypatch.context() as patched:
            for module in (direct, stored):
                patched.setattr(module, "pack_function", lambda: None)
            patched.setattr(packing, "pack", tiles.pack)
            plain, wanted = packed(spec, own, checkpoint, AnyPacking)
        assert len(native) > 6
        for ours, theirs in zip(native, plain, strict=True):
            np.testing.assert_array_equal(ours, theirs)
        for name, numbers in scales.items():
            np.testing.assert_array_equal(numbers, wanted[name], name)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("kind", "fmt"),
    [
        (Kind.Q4_0, Format.INT4_G32), (Kind.Q4_0, Format.INT4_G32Z), (Kind.Q4_0, Format.Q5_0), (Kind.Q4_0, Format.Q8),
        (Kind.Q4_0, Format.WIDE), (Kind.Q4_1, Format.Q4_1), (Kind.Q4_1, Format.WIDE), (Kind.Q5_0, Format.Q5_0),
        (Kind.Q5_0, Format.Q8), (Kind.Q5_0, Format.WIDE), (Kind.Q8_0, Format.Q8), (Kind.Q8_0, Format.WIDE),
        (Kind.MXFP4, Format.MXFP4), (Kind.MXFP4, Format.WIDE), (Kind.Q4_K, Format.Q4_K), (Kind.Q4_K, Format.Q5_K),
        (Kind.Q4_K, Format.K_MIXED), (Kind.Q4_K, Format.WIDE), (Kind.Q5_K, Format.Q5_K), (Kind.Q5_K, Format.K_MIXED),
        (Kind.Q5_K, Format.WIDE), (Kind.Q6_K, Format.Q6_K), (Kind.Q6_K, Format.K_MIXED), (Kind.Q6_K, Format.WIDE),
    ],
    ids=lambda value: value.name,
)  # fmt: skip
def test_blocks_of_a_file_become_numpys_tiles(
    tmp_path: Path, kind: Kind, fmt: Format, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads whose pairs lie side by side, ranks with half of the columns, tiles that alternate, a 16-bit stage."""
    kinds = dict.fromkeys(SHAPES, kind) | {"attn_output": Kind.BF16}
    opened = open_checkpoint(write_wide_model(tmp_path / "m.gguf", kinds, default=Kind.BF16))
    spec = spec_from_config(opened.config)
    plan = plan_of(spec, {name: fmt for name in STAGES if name != "output"}, ranks)
    check(spec, plan, opened, monkeypatch)


def test_layers_of_several_formats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = dict.fromkeys(SHAPES, Kind.Q4_K) | {
        "1.ffn_down": Kind.Q6_K,
        "0.attn_v": Kind.Q5_K,
        "token_embd": Kind.Q6_K,
    }
    opened = open_checkpoint(write_wide_model(tmp_path / "m.gguf", kinds, architecture="qwen2"))
    spec = spec_from_config(opened.config)
    stages = dict.fromkeys(STAGES, Format.K_MIXED) | {"head": Format.Q6_K, "gate_up": Format.Q4_K}
    check(spec, plan_of(spec, stages), opened, monkeypatch)


#: k of 150 is no whole group; two ranks begin at column 96 of output and at 160 of down.
ODD = {
    "hidden_size": 150,
    "intermediate_size": 320,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("dtype", ["fp8", "q8", "int4"])
@pytest.mark.parametrize("source", ["bfloat16", "float16"])
def test_rounded_weights_are_numpys(
    tmp_path: Path, dtype: str, source: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fp8 and q8 bit for bit; of int4, sums of another order may find another scale that is as good."""
    opened = open_checkpoint(make_checkpoint(Case("odd", "llama", ODD), tmp_path, source))
    spec = spec_from_config(opened.config)
    costs = []
    for numpy in (False, True):
        with monkeypatch.context() as patched:
            if numpy:
                patched.setattr(stored, "pack_function", lambda: None)
                patched.setattr(stored, "round_rows", lambda fmt, values: None)
            rounded, chosen = formats_for("cuda", Asked(dtype, "fp8"), spec, opened, ranks)
            assert isinstance(rounded, RoundedCheckpoint)
            plan = rank_plan(plan_of(spec, chosen.of_stages, ranks), ranks - 1)
            found, scales = packed(spec, plan, rounded, AnyPacking if numpy else StoredPacking)
        costs.append((found, scales, rounded.costs))
    (ours, scales, cost), (theirs, wanted, exact) = costs
    for left, right in zip(ours, theirs, strict=True):
        assert np.mean(left == right) > (0.98 if dtype == "int4" else 1 - 1e-9)
    for name, numbers in scales.items():
        np.testing.assert_array_equal(numbers, wanted[name], name)
    for fmt, of_format in cost.items():
        if ranks == 1:
            assert (of_format.values, of_format.bits) == (exact[fmt].values, exact[fmt].bits)
            assert of_format.relative_error == pytest.approx(exact[fmt].relative_error, rel=1e-4)


def test_a_scale_that_is_no_number_is_refused_with_its_row(tmp_path: Path) -> None:
    path = write_wide_model(tmp_path / "m.gguf", dict.fromkeys(SHAPES, Kind.Q4_K))
    opened = open_checkpoint(path)
    raw = opened.raw_matrix("model.layers.1.mlp.down_proj.weight")
    assert raw is not None
    data = bytearray(path.read_bytes())
    at = data.find(raw.rows[17].tobytes())
    assert at > 0
    data[at : at + 2] = np.array([np.inf], np.float16).tobytes()
    path.write_bytes(data)
    opened = open_checkpoint(path)
    spec = spec_from_config(opened.config)
    plan = plan_of(spec, dict.fromkeys(STAGES, Format.Q4_K))
    with pytest.raises(CheckpointError, match=r"down_proj\.weight (has scales of|holds) .*in row 17"):
        packed(spec, plan, opened, StoredPacking)


@pytest.mark.parametrize("fmt", [Format.BF16, Format.F16])
@pytest.mark.parametrize(
    "kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q8_0, Kind.MXFP4, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K]
)
def test_an_embedding_becomes_numpys_halves(tmp_path: Path, kind: Kind, fmt: Format) -> None:
    opened = open_checkpoint(write_wide_model(tmp_path / "m.gguf", {"token_embd": kind}))
    spec = spec_from_config(opened.config)
    ours, theirs = (np.full(2 * 21 * WIDTH, 0xA5, np.uint8) for _ in range(2))
    for pack, out in ((stored.pack_table, ours), (stored.plain_table, theirs)):
        pack(spec, fmt, opened, 7, 28, out)
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("columns", [1, 31, 128, 300])
@pytest.mark.parametrize("fmt", [Format.FP8, Format.Q8, Format.INT4_G128])
def test_rounding_is_numpys(fmt: Format, columns: int) -> None:
    random = np.random.default_rng(columns)
    exact = random.standard_normal((40, columns)).astype(np.float32)
    exact *= np.float32(10.0) ** random.integers(-5, 3, (40, 1))
    exact[3] = 0
    found = round_rows(fmt, exact)
    assert found is not None
    codes, scales = WAYS[fmt].round(exact)
    assert found[0].shape == codes.shape and found[1].dtype == scales.dtype
    if fmt is not Format.INT4_G128:
        np.testing.assert_array_equal(found[1], scales)
        np.testing.assert_array_equal(found[0], codes)
    else:
        assert np.mean(found[1] == scales) > 0.95 and np.mean(found[0] == codes) > 0.98


def test_formats_are_numbered_as_in_native_code() -> None:
    text = (Path(stored.__file__).parent / "native" / "tile.h").read_text()
    names = text.split("enum class Format : int64_t {")[1].split("}")[0].replace("\n", " ").split(",")
    listed = [name.strip() for name in names if name.strip()]
    assert listed == ["half", *(fmt.value.replace("-", "_") for fmt in FORMATS)]


@pytest.mark.parametrize("fmt", FORMATS)
def test_native_code_and_the_plan_agree_on_the_bytes_of_a_block(fmt: Format) -> None:
    assert stored.knows_layout(fmt)
