"""Damaged headers: whatever the bytes say, a file opens or is refused, and costs little memory."""

from __future__ import annotations

import json
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from monotape.errors import CheckpointError, ModelError
from monotape.models.registry import spec_from_config
from monotape.weights.check import check_tensors
from monotape.weights.open import open_checkpoint
from weights.gguf_files import model_values, write_model
from weights.safetensors_files import encode, layout, to_bf16

EXAMPLES = 200
MEMORY_LIMIT = 64 << 20
QUICK = settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)

#: Numbers that headers lie with.
EDGES = [0, 1, 7, 31, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
Damage = Callable[[bytes, int], bytes]


def _overwrite(place: int, raw: bytes) -> Damage:
    def damage(content: bytes, header: int) -> bytes:
        start = place % header
        return content[:start] + raw + content[start + len(raw) :]

    return damage


def _cut(place: int) -> Damage:
    return lambda content, header: content[: place % len(content)]


def _remove(place: int, length: int) -> Damage:
    return lambda content, header: content[: place % header] + content[place % header + length :]


def _repeat(place: int, length: int) -> Damage:
    def damage(content: bytes, header: int) -> bytes:
        start = place % header
        return content[: start + length] + content[start:]

    return damage


places = st.integers(0, 1 << 20)
damages = st.lists(
    st.one_of(
        st.builds(_overwrite, places, st.binary(min_size=1, max_size=9)),
        st.builds(_overwrite, places, st.sampled_from([struct.pack("<Q", edge) for edge in EDGES])),
        st.builds(_overwrite, places, st.sampled_from([struct.pack("<I", e) for e in EDGES if e < 2**32])),
        st.builds(_cut, places),
        st.builds(_remove, places, st.integers(1, 20)),
        st.builds(_repeat, places, st.integers(1, 20)),
    ),
    min_size=1,
    max_size=4,
)


def _use(path: Path) -> None:
    """Opens a checkpoint and touches everything that it offers."""
    opened = open_checkpoint(path)
    _ = (opened.text, opened.generation_config)
    for name in opened.names:
        shape = opened.shape(name)
        if not shape:
            continue
        try:
            opened.rows(name, 0, min(shape[0], 3))
            opened.integer_rows(name, shape[0] // 2, min(shape[0], shape[0] // 2 + 2))
        except CheckpointError:
            pass
        opened.release(name)
    check_tensors(spec_from_config(opened.config), opened)


def _survives(path: Path) -> None:
    tracemalloc.start()
    try:
        _use(path)
    except (CheckpointError, ModelError):
        pass
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < MEMORY_LIMIT


@pytest.fixture(scope="module", params=["llama", "phi3", "qwen2"])
def gguf_bytes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, int]:
    """A whole model, and where its header ends."""
    architecture = request.param
    values = model_values(architecture, tied=architecture != "qwen2")
    kinds = {
        "token_embd.weight": Kind.Q8_0,
        "blk.0.ffn_down.weight": Kind.Q4_0,
        "blk.1.ffn_up.weight": Kind.Q5_0,
    }
    path = write_model(tmp_path_factory.mktemp("fuzz") / "m.gguf", architecture, values, kinds)
    content = path.read_bytes()
    header = content.index(b"blk.2.ffn_down.weight") + 64
    open_checkpoint(path)
    return content, header


@QUICK
@given(damage=damages)
def test_damaged_gguf_headers(gguf_bytes: tuple[bytes, int], tmp_path: Path, damage: list[Damage]) -> None:
    content, header = gguf_bytes
    for change in damage:
        content = change(content, header) or b"\0"
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    _survives(path)


@pytest.mark.parametrize("edge", [2**31 - 1, 2**63 - 1, 2**64 - 1])
def test_every_number_of_a_gguf_header_may_lie(
    gguf_bytes: tuple[bytes, int], tmp_path: Path, edge: int
) -> None:
    content, header = gguf_bytes
    path = tmp_path / "m.gguf"
    for place in range(4, header, 29):
        path.write_bytes(content[:place] + struct.pack("<Q", edge) + content[place + 8 :])
        _survives(path)


CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 6, "intermediate_size": 10, "num_hidden_layers": 1,
    "num_attention_heads": 3, "vocab_size": 5, "max_position_embeddings": 50, "tie_word_embeddings": True,
}  # fmt: skip


def _safetensors() -> tuple[dict[str, Any], bytes]:
    spec = spec_from_config(CONFIG)
    tensors: dict[str, Any] = {}
    for role, source in {**spec.layer_tensors, **spec.model_tensors}.items():
        values = np.random.default_rng(len(tensors)).standard_normal(spec.shape_of(role)).astype(np.float32)
        tensors[source.in_layer(0)] = ("BF16", to_bf16(values)) if values.ndim == 2 else ("F32", values)
    return layout(tensors)


ENTRIES, DATA = _safetensors()
FILE = encode(ENTRIES, DATA)


def _folder(tmp_path: Path, content: bytes, config: bytes = json.dumps(CONFIG).encode()) -> Path:
    (tmp_path / "config.json").write_bytes(config)
    (tmp_path / "model.safetensors").write_bytes(content)
    return tmp_path


def test_the_undamaged_folder_is_fine(tmp_path: Path) -> None:
    _use(_folder(tmp_path, FILE))


@QUICK
@given(damage=damages)
def test_damaged_safetensors_headers(tmp_path: Path, damage: list[Damage]) -> None:
    content = FILE
    for change in damage:
        content = change(content, len(FILE) - len(DATA)) or b"\0"
    _survives(_folder(tmp_path, content))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)


@QUICK
@given(
    name=st.sampled_from(sorted(ENTRIES)),
    part=st.sampled_from(["dtype", "shape", "data_offsets", "other"]),
    value=json_values
    | st.lists(st.integers(-1, 200), max_size=3)
    | st.sampled_from(["F16", "I8", "F4", "F32"]),
)
@example(name=sorted(ENTRIES)[0], part="data_offsets", value=[0, 2**64])
def test_well_formed_headers_with_other_values(tmp_path: Path, name: str, part: str, value: Any) -> None:
    header = {**ENTRIES, name: {**ENTRIES[name], part: value}}
    _survives(_folder(tmp_path, encode(header, DATA)))


@QUICK
@given(header=json_values | st.dictionaries(st.text(max_size=6), json_values, max_size=3))
def test_headers_of_any_json(tmp_path: Path, header: Any) -> None:
    _survives(_folder(tmp_path, encode(header, DATA)))


@QUICK
@given(damage=damages)
def test_damaged_configs(tmp_path: Path, damage: list[Damage]) -> None:
    config = json.dumps(CONFIG).encode()
    for change in damage:
        config = change(config, len(config)) or b" "
    _survives(_folder(tmp_path, FILE, config))


@QUICK
@given(index=json_values | st.fixed_dictionaries({"weight_map": json_values}))
def test_indexes_of_any_json(tmp_path: Path, index: Any) -> None:
    folder = _folder(tmp_path, FILE)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    _survives(folder)
