"""Packing straight from the mapped file: when it is done, that it gives NumPy's bits, and what it refuses."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from backends.fake_cuda import FakeCuda, fake_gpu
from backends.test_cuda_loading import STORED, gpu_plan
from families import BY_NAME, make_checkpoint
from lane_models import make_laneformer
from monotape.backends.cpu.build import BuildError
from monotape.backends.cuda import direct, library
from monotape.backends.cuda.blocks import EXPONENT, pack_blocks
from monotape.backends.cuda.direct import DirectPacking, pack_function, packing_for
from monotape.backends.cuda.loading import load_model
from monotape.backends.cuda.packing import AnyPacking
from monotape.errors import CheckpointError
from monotape.models.registry import spec_from_config
from monotape.plan.formats import GPU_LAYOUTS, TILE_ROWS, Format
from monotape.weights.mapped import MappedFile
from monotape.weights.open import open_checkpoint
from monotape.weights.safetensors_header import read_header


@pytest.fixture
def forgetful() -> Iterator[None]:
    """Looks for the native function anew, and again afterwards."""
    pack_function.cache_clear()
    yield
    pack_function.cache_clear()


@pytest.mark.parametrize(("rows", "k"), [(8, 32), (13, 70), (24, 96), (1, 1), (17, 33)])
@pytest.mark.parametrize("layers", [1, 3])
def test_native_blocks_are_those_of_numpy(rows: int, k: int, layers: int) -> None:
    """Rows that begin anywhere, between others, in tiles that alternate with those of another run."""
    random = np.random.default_rng(rows * k)
    columns, tiles, padded_k = k + 5, -(-rows // TILE_ROWS), -(-k // 32) * 32
    tensors = [random.integers(0, 0x7F80, (rows + 4, columns)).astype(np.uint16) for _ in range(layers)]
    tile_bytes = GPU_LAYOUTS[Format.BF16].tile_bytes(padded_k)
    got = np.full((layers, 2 * tiles + 1, tile_bytes), 0xA5, np.uint8)
    want = got.copy()
    run = np.array(
        [[0, 2 * (3 * columns + 2), 2 * columns, rows, k, padded_k, tile_bytes, 2 * tile_bytes]], np.int64
    )
    addresses = np.array([tensor.ctypes.data for tensor in tensors], np.int64)
    row = ctypes.c_int64()
    bad = pack_function()(
        run.ctypes.data, 1, addresses.ctypes.data, 1, layers, got[0].nbytes, EXPONENT[Format.BF16], got.ctypes.data,
        ctypes.byref(row),
    )  # fmt: skip
    for tensor, out in zip(tensors, want, strict=True):
        padded = np.zeros((tiles * TILE_ROWS, padded_k), np.uint16)
        padded[:rows, :k] = tensor[3 : 3 + rows, 2 : 2 + k]
        pack_blocks(padded, out[1::2])
    assert bad == -1
    assert np.array_equal(got, want)


def test_weights_that_lie_as_they_will_are_packed_directly(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_checkpoint(BY_NAME["qwen2"], tmp_path, "bfloat16"))
    spec = spec_from_config(checkpoint.config)
    for fmt, kind in ((Format.BF16, DirectPacking), (Format.F16, AnyPacking)):
        rank = gpu_plan(spec, fmt).ranks[0]
        layers = packing_for(spec, checkpoint, rank.layer_stages, range(spec.layers))
        heads = packing_for(spec, checkpoint, (rank.head,), (None,))
        assert type(layers) is type(heads) is kind


def test_rows_and_columns_that_lie_elsewhere_are_put_in_order_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lane model: pairs of a head lie side by side, and lanes share columns. Its 16-bit words alone would do."""
    make_laneformer(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    spec = spec_from_config(checkpoint.config)
    monkeypatch.setattr(checkpoint, "stored_as", lambda name: "bf16")
    halves = {
        name: np.zeros((int(np.prod(checkpoint.shape(name)[:-1])), checkpoint.shape(name)[-1]), np.uint16)
        for name in checkpoint.names
    }
    monkeypatch.setattr(checkpoint, "mapped_halves", lambda name: halves[name])
    stages = gpu_plan(spec, Format.BF16).ranks[0].layer_stages
    kinds = {
        stage.name: type(packing_for(spec, checkpoint, (stage,), range(spec.layers))) for stage in stages
    }
    assert spec.rope.interleaved
    assert kinds == {"qkv": AnyPacking, "output": AnyPacking, "gate_up": DirectPacking, "down": AnyPacking}


@pytest.mark.usefixtures("forgetful")
@pytest.mark.parametrize("compiler", [None, ["false"]])
def test_without_a_compiler_that_works_numpy_packs(
    tmp_path: Path, compiler: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MONOTAPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(library, "find_compiler", lambda preferred: compiler)
    checkpoint = open_checkpoint(make_checkpoint(BY_NAME["qwen2"], tmp_path, "bfloat16"))
    spec = spec_from_config(checkpoint.config)
    stages = gpu_plan(spec, Format.BF16).ranks[0].layer_stages
    assert isinstance(packing_for(spec, checkpoint, stages, range(spec.layers)), AnyPacking)


def test_the_library_is_built_once_and_anew_for_another_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MONOTAPE_CACHE", str(tmp_path))
    found = library.find_library()
    assert found.parent == tmp_path / "native" and found.is_file()
    monkeypatch.setattr(library, "find_compiler", lambda preferred: None)
    assert library.find_library() == found
    for name in ("blocks.cpp", "tile.h"):
        changed = shutil.copytree(library.SOURCES, tmp_path / name / "native")
        (changed / name).write_bytes((changed / name).read_bytes() + b"//")
        monkeypatch.setattr(library, "SOURCES", changed)
        with pytest.raises(BuildError, match="no C"):
            library.find_library()


def damage(folder: Path, name: str, row: int, column: int, bits: int) -> None:
    file = folder / "model.safetensors"
    tensor = read_header(MappedFile(file))[name]
    with file.open("r+b") as opened:
        opened.seek(tensor.offset + 2 * (row * tensor.shape[1] + column))
        opened.write(np.uint16(bits).tobytes())


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("fmt", STORED)
@pytest.mark.parametrize(
    ("name", "row", "column"),
    [
        ("model.layers.1.mlp.down_proj.weight", 21, 75),
        ("model.layers.2.self_attn.k_proj.weight", 17, 0),
        ("model.layers.0.mlp.up_proj.weight", 75, 53),
        ("lm_head.weight", 130, 53),
        ("model.embed_tokens.weight", 130, 53),
    ],
)
def test_a_word_that_is_no_number_is_refused_with_its_row(
    tmp_path: Path,
    fmt: Format,
    name: str,
    row: int,
    column: int,
    native: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = make_checkpoint(BY_NAME["llama"], tmp_path, STORED[fmt])
    for sign, extra in ((0, 0), (0x8000, 0), (0, 1)):
        damage(folder, name, row, column, sign + EXPONENT[fmt] + extra)
        checkpoint = open_checkpoint(folder)
        spec = spec_from_config(checkpoint.config)
        if not native:
            monkeypatch.setattr(direct, "pack_function", lambda: None)
        with (
            fake_gpu(FakeCuda()) as gpu,
            pytest.raises(CheckpointError, match=rf"{name} holds a value near row {row} .* {fmt.value} "),
        ):
            load_model(spec, gpu_plan(spec, fmt), checkpoint)
        assert gpu.used == 0


def test_pages_that_were_read_are_released(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_checkpoint(checkpoint("llama"))
    spec = spec_from_config(opened.config)
    released: list[str] = []
    monkeypatch.setattr(opened, "release", released.append)
    with fake_gpu(FakeCuda()):
        load_model(spec, gpu_plan(spec, Format.BF16), opened)
    matrices = {name for name in opened.names if len(opened.shape(name)) == 2}
    assert sorted(released) == sorted(matrices)
