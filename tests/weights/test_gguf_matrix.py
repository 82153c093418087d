"""weights/gguf_matrix.py: stored blocks as codes and scales, beside the gguf package's own reading of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as some
from numpy.typing import NDArray

from monotape.errors import CheckpointError
from monotape.weights.gguf_file import GgufFile
from monotape.weights.quantised.k_matrix import KMatrix, KRows
from monotape.weights.quantised.stored import Kind as CodeKind
from monotape.weights.quantised.stored import StoredMatrix
from weights.gguf_files import HEADS, interleaved, model_values, random_blocks, write_gguf, write_model

K_QUANTS = (Kind.Q4_K, Kind.Q5_K, Kind.Q6_K)
BLOCKS_OF_32 = (Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q8_0, Kind.MXFP4)
#: Where the float16 numbers of a block lie.
HALVES = {
    Kind.Q4_0: (0,), Kind.Q4_1: (0, 2), Kind.Q5_0: (0,), Kind.Q8_0: (0,), Kind.MXFP4: (),
    Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,),
}  # fmt: skip
Raw = NDArray[np.uint8]


def _raw(kind: Kind, rows: int, columns: int, seed: int, largest: float = 0.5) -> Raw:
    """Random bits with finite scales of either sign, subnormal ones among them."""
    rng = np.random.default_rng(seed)
    block, size = GGML_QUANT_SIZES[kind]
    raw = random_blocks(kind, rows, columns, seed).reshape(-1, size)
    for at in HALVES[kind]:
        numbers = rng.uniform(-largest, largest, len(raw)) * 10.0 ** rng.integers(-7, 1, len(raw))
        raw[:, at : at + 2] = numbers.astype(np.float16)[:, None].view(np.uint8)
    if kind == Kind.MXFP4:
        raw[:, 0] = rng.integers(60, 200, len(raw))
    return raw.reshape(rows, columns // block * size)


def _opened(folder: Path, kind: Kind, raw: Raw) -> GgufFile:
    """A tensor "x" in an architecture that is not known, so that nothing is made of it."""
    return GgufFile(write_gguf(folder / "x.gguf", "other", {}, {"x": (kind, raw)}))


@settings(max_examples=12, deadline=None)
@given(
    seed=some.integers(0, 2**32 - 1), rows=some.integers(1, 11), blocks=some.integers(1, 5), data=some.data()
)
@pytest.mark.parametrize("kind", [*BLOCKS_OF_32, *K_QUANTS], ids=lambda kind: kind.name)
def test_codes_and_scales_are_the_numbers_that_gguf_reads(
    tmp_path_factory: pytest.TempPathFactory, kind: Kind, seed: int, rows: int, blocks: int, data: some.DataObject
) -> None:  # fmt: skip
    raw = _raw(kind, rows, blocks * GGML_QUANT_SIZES[kind][0], seed)
    matrix = _opened(tmp_path_factory.mktemp("x"), kind, raw).stored_matrix("x")
    assert matrix is not None and matrix.label == kind.name.lower()
    start = data.draw(some.integers(0, rows))
    stop = data.draw(some.integers(start, rows))
    np.testing.assert_array_equal(matrix.dequantised(start, stop), dequantize(raw, kind)[start:stop])


@pytest.mark.parametrize("kind", K_QUANTS, ids=lambda kind: kind.name)
def test_a_k_quant_is_codes_and_two_levels_of_scales(tmp_path: Path, kind: Kind) -> None:
    raw = _raw(kind, 5, 768, seed=4)
    matrix = _opened(tmp_path, kind, raw).stored_matrix("x")
    assert isinstance(matrix, KMatrix) and (matrix.rows, matrix.columns) == (5, 768)
    rows = matrix.k_rows(1, 4)
    assert rows.codes.shape == (3, 768) and rows.codes.dtype == np.uint8
    assert rows.scales.shape == rows.mins.shape == (3, 48) and rows.scales.dtype == rows.mins.dtype == np.int8
    assert rows.d.shape == rows.dmin.shape == (3, 3) and rows.d.dtype == rows.dmin.dtype == np.float16
    assert rows.codes.max() == {Kind.Q4_K: 15, Kind.Q5_K: 31, Kind.Q6_K: 63}[kind]
    _check_rows(rows, dequantize(raw, kind)[1:4])
    if kind == Kind.Q6_K:
        np.testing.assert_array_equal(rows.mins, rows.scales)
        np.testing.assert_array_equal(rows.dmin, 32 * rows.d)
    else:
        np.testing.assert_array_equal(rows.scales[:, ::2], rows.scales[:, 1::2])
        assert rows.scales.min() >= 0 and rows.scales.max() <= 63


def _check_rows(rows: KRows, expected: NDArray[np.float32]) -> None:
    """The definition, one element after another."""
    for n in range(expected.shape[0]):
        for k in range(expected.shape[1]):
            d, dmin = float(rows.d[n, k // 256]), float(rows.dmin[n, k // 256])
            value = int(rows.codes[n, k]) * (d * int(rows.scales[n, k // 16])) - dmin * int(
                rows.mins[n, k // 16]
            )
            assert np.float32(value) == expected[n, k], (n, k)


@pytest.mark.parametrize(
    ("kind", "codes", "most"),
    [
        (Kind.Q4_0, CodeKind.INT4, 15), (Kind.Q4_1, CodeKind.INT4, 15), (Kind.Q5_0, CodeKind.INT5, 31),
        (Kind.Q8_0, CodeKind.INT8, 255), (Kind.MXFP4, CodeKind.E2M1, 15),
    ],
    ids=lambda value: getattr(value, "name", None),
)  # fmt: skip
def test_blocks_of_32_are_codes_and_scales(tmp_path: Path, kind: Kind, codes: CodeKind, most: int) -> None:
    raw = _raw(kind, 9, 320, seed=5)
    matrix = _opened(tmp_path, kind, raw).stored_matrix("x")
    assert isinstance(matrix, StoredMatrix)
    assert (matrix.kind, matrix.group, matrix.symmetric) == (codes, (1, 32), True)
    values = matrix.values(2, 9)
    assert values.shape == (7, 320) and values.dtype == np.uint8 and values.max() == most
    assert matrix.scales(2, 9).shape == (7, 10)
    mins = matrix.mins(2, 9)
    assert (mins is not None) == (kind == Kind.Q4_1)
    if mins is not None:
        assert mins.shape == (7, 10) and mins.dtype == np.float16
        assert not matrix.fits_q8(), "minima are no multiples of the scales"


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q8_0], ids=lambda kind: kind.name)
def test_heads_that_lie_interleaved_come_back_in_order(tmp_path: Path, kind: Kind) -> None:
    values = model_values("llama")
    name = "blk.1.attn_q.weight"
    opened = GgufFile(write_model(tmp_path / "m.gguf", "llama", values, {name: kind}))
    theirs = "model.layers.1.self_attn.q_proj.weight"
    matrix = opened.stored_matrix(theirs)
    assert matrix is not None and matrix.name == theirs
    for start, stop in ((0, 96), (3, 21), (17, 18)):
        np.testing.assert_array_equal(matrix.dequantised(start, stop), opened.rows(theirs, start, stop))
    turned = interleaved(matrix.dequantised(0, 96), HEADS)
    assert np.abs(turned - interleaved(values[name], HEADS)).max() < 0.6


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16], ids=lambda kind: kind.name)
def test_floats_and_vectors_have_no_codes(tmp_path: Path, kind: Kind) -> None:
    name = "blk.0.ffn_up.weight"
    opened = GgufFile(write_model(tmp_path / "m.gguf", kinds={name: kind}))
    assert opened.stored_matrix("model.layers.0.mlp.up_proj.weight") is None
    assert opened.stored_matrix("model.norm.weight") is None


@pytest.mark.parametrize("kind", [kind for kind in HALVES if HALVES[kind]], ids=lambda kind: kind.name)
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_scale_that_is_no_number_is_named_with_its_row(tmp_path: Path, kind: Kind, bad: float) -> None:
    for at in HALVES[kind]:
        raw = _raw(kind, 6, 256, seed=6)
        raw[4, at : at + 2] = np.array([bad], np.float16).view(np.uint8)
        matrix = _opened(tmp_path, kind, raw).stored_matrix("x")
        assert matrix is not None
        matrix.dequantised(0, 4)
        with pytest.raises(CheckpointError, match=r"^Tensor x has a? ?(scales?|minimum) of .* in row 4\."):
            matrix.dequantised(2, 6)


def test_a_q6_k_scale_too_large_for_its_form_is_refused(tmp_path: Path) -> None:
    raw = _raw(Kind.Q6_K, 2, 256, seed=7)
    raw[1, 208:210] = np.array([4096.0], np.float16).view(np.uint8)
    matrix = _opened(tmp_path, Kind.Q6_K, raw).stored_matrix("x")
    assert matrix is not None
    with pytest.raises(CheckpointError, match=r"scales of 4096\.0 and inf in row 1"):
        matrix.dequantised(0, 2)


EVERY = (*BLOCKS_OF_32, *K_QUANTS)


@pytest.mark.parametrize("kind", EVERY, ids=lambda kind: kind.name)
def test_a_truncated_file_is_refused(tmp_path: Path, kind: Kind) -> None:
    path = write_gguf(tmp_path / "x.gguf", "other", {}, {"x": (kind, _raw(kind, 3, 256, seed=8))})
    path.write_bytes(path.read_bytes().rstrip(b"\0")[:-40])
    with pytest.raises(
        CheckpointError, match=r"tensor x lies at bytes \d+ to \d+, but the file has \d+ bytes"
    ):
        GgufFile(path)


@pytest.mark.parametrize("claimed", EVERY, ids=lambda kind: kind.name)
@pytest.mark.parametrize("kind", EVERY, ids=lambda kind: kind.name)
def test_a_mislabelled_tensor_is_refused(tmp_path: Path, kind: Kind, claimed: Kind) -> None:
    """Its bytes end elsewhere: in the next tensor, or before bytes that are no tensor's."""
    rows = {name: (kind, _raw(kind, 30, 512, seed=9)) for name in ("x", "y")}
    path = write_gguf(tmp_path / "x.gguf", "other", {}, rows)
    data = bytearray(path.read_bytes())
    at = data.find(b"x" + np.array([2], "<u4").tobytes()) + 1 + 4 + 16
    assert data[at : at + 4] == np.array([kind], "<u4").tobytes()
    data[at : at + 4] = np.array([claimed], "<u4").tobytes()
    path.write_bytes(data)
    sizes = [GGML_QUANT_SIZES[each][1] * 512 // GGML_QUANT_SIZES[each][0] for each in (kind, claimed)]
    if sizes[0] == sizes[1]:
        GgufFile(path)  # 4.5 bits a weight, or 5.5, in either way: no file can tell
        return
    with pytest.raises(CheckpointError, match=r"overlap|bytes after x belong to no tensor"):
        GgufFile(path)
