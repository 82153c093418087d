"""Lays tiles of codes out natively, as tiles.py does it in NumPy, in a call in which Python's lock is free."""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p
from functools import cache
from typing import Any

import numpy as np

from monotape.backends.cpu.build import BuildError
from monotape.backends.cuda import tiles
from monotape.backends.cuda.library import find_library
from monotape.plan.formats import GPU_LAYOUTS, Format
from monotape.weights.coded import Coded, Plane
from monotape.weights.tapes import Bytes

#: native/tile.h: Format, after halves.
FORMATS = (
    Format.FP8, Format.FP8_BLOCK, Format.INT8, Format.INT4_G32, Format.INT4_G64, Format.INT4_G128, Format.INT4_G32Z,
    Format.INT4_G64Z, Format.INT4_G128Z, Format.MXFP4, Format.Q8, Format.Q4_1, Format.Q5_0, Format.Q4_K, Format.Q5_K,
    Format.Q6_K, Format.K_MIXED, Format.WIDE,
)  # fmt: skip
_PLANES = 2  # of groups, and of blocks, at most


@cache
def native_library() -> ctypes.CDLL | None:
    """None where it cannot be built or loaded."""
    try:
        return ctypes.CDLL(str(find_library()))
    except (BuildError, OSError):
        return None


@cache
def knows_layout(fmt: Format) -> bool:
    """Whether native code lays weights of this format out as the plan has them."""
    if fmt.is_half or (library := native_library()) is None:
        return fmt.is_half
    size = library.monotape_block_bytes
    size.restype, size.argtypes = c_int64, [c_int64]
    layout = GPU_LAYOUTS[fmt]
    return bool(layout.k == tiles.BLOCK_K and layout.block_bytes == size(1 + FORMATS.index(fmt)))


@cache
def _pack_function() -> Any:
    library = native_library()
    assert library is not None, "knows_layout said that it is there"
    function = library.monotape_pack_codes
    function.restype = None
    function.argtypes = [c_int64, c_int64, c_int64, *[c_void_p] * 4, c_int64]
    return function


def pack(fmt: Format, coded: Coded, out: Bytes) -> None:
    """What tiles.pack does, bit for bit."""
    if not knows_layout(fmt):
        tiles.pack(fmt, coded, out)
        return
    assert out.strides[1] == 1, "the bytes of a tile lie together"
    planes = [
        _whole(plane) for plane in (coded.codes, *coded.of_groups, *coded.of_rows)
    ]  # kept until the end
    groups, rows = planes[1 : 1 + len(coded.of_groups)], planes[1 + len(coded.of_groups) :]
    _pack_function()(
        1 + FORMATS.index(fmt), out.shape[0], coded.codes.shape[1], planes[0].ctypes.data,
        _addresses(groups), _addresses(rows), out.ctypes.data, out.strides[0],
    )  # fmt: skip


def _whole(plane: Plane) -> Plane:
    return np.ascontiguousarray(plane)


def _addresses(planes: list[Plane]) -> Any:
    return (c_void_p * _PLANES)(*(plane.ctypes.data for plane in planes))
