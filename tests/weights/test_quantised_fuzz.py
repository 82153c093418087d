"""Quantised checkpoints with any tensor or field changed: they are read, or refused with a sentence."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monotape.errors import MonotapeError
from monotape.weights.open import open_checkpoint
from weights.quantised_files import (
    Tensors,
    awq,
    finite_e4m3,
    fp8_blocks,
    gptq,
    mxfp4,
    packed,
    quantised_folder,
)

MODULE = "model.layers.0.mlp.down_proj"
RANDOM = np.random.default_rng(0)
CODES, ZEROS = RANDOM.integers(0, 16, (8, 64)), RANDOM.integers(1, 15, (8, 2))
SCALES = RANDOM.normal(0, 1, (8, 2)).astype(np.float16)
ORDER = [k % 2 for k in range(64)]
_WEIGHTS = {
    "num_bits": 4,
    "type": "int",
    "strategy": "group",
    "group_size": 32,
    "symmetric": False,
    "actorder": "group",
}
CASES: dict[str, tuple[Tensors, dict[str, Any]]] = {
    "awq": (awq(CODES, ZEROS, SCALES), {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}),
    "gptq": (
        gptq(CODES, ZEROS, SCALES, ORDER),
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": True, "format": "gptq"},
    ),
    "fp8": (
        fp8_blocks(finite_e4m3(RANDOM, (9, 21)), np.ones((3, 3), np.float32)),
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [4, 8], "activation_scheme": "dynamic"},
    ),
    "mxfp4": (mxfp4(CODES, np.full((8, 2), 120, np.uint8)), {"quant_method": "mxfp4"}),
    "compressed": (
        packed(CODES, ZEROS, SCALES.astype(np.float32), 4, ORDER),
        {
            "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": [],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": _WEIGHTS}},
        },
    ),
}  # fmt: skip
DTYPES = {"U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E8M0": 1, "F16": 2, "BF16": 2, "I32": 4, "F32": 4, "I64": 8}
VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 130), st.sampled_from([1 << 40, 0.5]), st.text(max_size=4),
    st.sampled_from(["gptq", "gptq_v2", "group", "channel", "tensor", "block", "int", "float", "float-quantized"]),
    st.lists(st.integers(-1, 9), max_size=3), st.just({}), st.just([["mlp"]]),
)  # fmt: skip


def _read(folder: Any, tensors: Tensors, config: dict[str, Any]) -> None:
    """Reads everything, as loading would."""
    try:
        opened = open_checkpoint(quantised_folder(folder, MODULE, tensors, config))
        for name in opened.names:
            shape = opened.shape(name)
            if len(shape) == 2:
                assert opened.rows(name, 0, shape[0]).shape == shape
                opened.integer_rows(name, 0, shape[0])
            opened.release(name)
    except MonotapeError:
        return


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(CASES)), st.data())
def test_tensors_of_any_dtype_shape_and_content(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
) -> None:
    tensors, config = CASES[name]
    changed = dict(tensors)
    end = data.draw(st.sampled_from(sorted(tensors)))
    dtype = data.draw(st.sampled_from([tensors[end][0], *DTYPES]))
    shape = data.draw(st.one_of(st.just(tensors[end][1].shape), st.lists(st.integers(0, 9), max_size=4)))
    size = math.prod(shape) * DTYPES[dtype]
    content = data.draw(st.binary(min_size=1, max_size=8))
    raw = np.frombuffer((content * (size + 1))[:size], np.uint8)
    if data.draw(st.booleans()):
        del changed[end]
    else:
        changed[end] = (dtype, raw.view(f"|V{DTYPES[dtype]}").reshape(shape))
    _read(tmp_path_factory.mktemp("fuzz"), changed, config)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(CASES)), st.data())
def test_fields_of_any_value(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
) -> None:
    tensors, config = CASES[name]
    changed = copy.deepcopy(config)
    tables = [changed]
    if name == "compressed":
        group = changed["config_groups"]["group_0"]
        tables += [changed["config_groups"], group, group["weights"]]
    table = data.draw(st.sampled_from(tables))
    key = data.draw(
        st.sampled_from([*sorted(table), "modules_to_not_convert", "block_structure", "strategy", "ignore"])
    )
    table[key] = data.draw(VALUES)
    _read(tmp_path_factory.mktemp("fuzz"), tensors, changed)
