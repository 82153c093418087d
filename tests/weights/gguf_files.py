"""Writes small GGUF models with the gguf package: known values, stored in any of the readable formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import quantize
from numpy.typing import NDArray

Floats = NDArray[np.float32]
READABLE = (
    Kind.F32,
    Kind.F16,
    Kind.BF16,
    Kind.Q8_0,
    Kind.Q4_0,
    Kind.Q4_1,
    Kind.Q5_0,
    Kind.Q4_K,
    Kind.Q5_K,
    Kind.Q6_K,
)
#: Where the f16 scales of a K-quant block lie.
_SCALES = {Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,)}

LAYERS, WIDTH, HEADS, KV_HEADS, FFN, VOCAB = 3, 96, 6, 2, 160, 37
HEAD_DIM = WIDTH // HEADS
TOKENS = [f"t{index}" for index in range(VOCAB - 2)] + ["<|im_end|>", "Ġé"]


def random_blocks(kind: Kind, rows: int, columns: int, seed: int) -> NDArray[np.uint8]:
    """Stored rows of random bits with small f16 scales; every format can be made so."""
    rng = np.random.default_rng(seed)
    block, size = GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (rows, columns // block, size), dtype=np.uint8)
    for offset in _SCALES.get(kind, ()):
        scales = rng.uniform(0.001, 0.01, (rows, columns // block)).astype(np.float16)
        raw[..., offset : offset + 2] = scales[..., None].view(np.uint8)
    return raw.reshape(rows, -1)


def stored(values: Floats, kind: Kind, seed: int = 0) -> NDArray[Any]:
    """The values as the format stores them; K-quants, and NVFP4, get random blocks of the same shape instead."""
    if kind in _SCALES or kind.name == "NVFP4":
        return random_blocks(kind, values.shape[0], values.shape[1], seed)
    raw: NDArray[Any] = quantize(np.ascontiguousarray(values), kind)
    return raw


def interleaved(values: Floats, heads: int) -> Floats:
    """Rows as converters of the llama architecture store q and k: the two of a rotary pair side by side."""
    split = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(values.shape)


def layer_shapes(architecture: str) -> dict[str, tuple[int, ...]]:
    """The tensors of one layer, by their GGUF names without the "blk.N."."""
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (WIDTH,),
        "attn_q.weight": (q, WIDTH),
        "attn_k.weight": (kv, WIDTH),
        "attn_v.weight": (kv, WIDTH),
        "attn_output.weight": (WIDTH, q),
        "ffn_norm.weight": (WIDTH,),
        "ffn_gate.weight": (FFN, WIDTH),
        "ffn_up.weight": (FFN, WIDTH),
        "ffn_down.weight": (WIDTH, FFN),
    }
    if architecture == "phi3":
        for name in ("attn_q", "attn_k", "attn_v", "ffn_gate"):
            del shapes[f"{name}.weight"]
        shapes |= {"attn_qkv.weight": (q + 2 * kv, WIDTH), "ffn_up.weight": (2 * FFN, WIDTH)}
    if architecture == "qwen2":
        shapes |= {"attn_q.bias": (q,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
    if architecture == "qwen3":
        shapes |= {"attn_q_norm.weight": (HEAD_DIM,), "attn_k_norm.weight": (HEAD_DIM,)}
    return shapes


def model_values(architecture: str, tied: bool = True, seed: int = 0) -> dict[str, Floats]:
    """Random values for a whole small model, by GGUF name, in Hugging Face's row order."""
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, WIDTH), "output_norm.weight": (WIDTH,)}
    if not tied:
        shapes["output.weight"] = (VOCAB, WIDTH)
    for layer in range(LAYERS):
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in layer_shapes(architecture).items()}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def model_metadata(architecture: str) -> dict[str, Any]:
    """Integers are written as uint32, floats as float32."""
    return {
        f"{architecture}.block_count": LAYERS,
        f"{architecture}.context_length": 200,
        f"{architecture}.embedding_length": WIDTH,
        f"{architecture}.feed_forward_length": FFN,
        f"{architecture}.attention.head_count": HEADS,
        f"{architecture}.attention.head_count_kv": KV_HEADS,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-6,
        f"{architecture}.rope.freq_base": 50000.0,
        f"{architecture}.rope.dimension_count": HEAD_DIM,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [1] * (VOCAB - 2) + [3, 1],
        "tokenizer.ggml.merges": ["t 1", "t 2"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{{ messages }}",
    }


def write_gguf(
    path: Path,
    architecture: str,
    metadata: dict[str, Any],
    tensors: dict[str, tuple[Kind, NDArray[Any]]],
    alignment: int | None = None,
) -> Path:
    """A file with these stored tensors; a metadata value of None leaves the key out."""
    writer = gguf.GGUFWriter(path, architecture)
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    for key, value in metadata.items():
        _add(writer, key, value)
    for name, (kind, raw) in tensors.items():
        writer.add_tensor(name, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def write_model(
    path: Path,
    architecture: str = "llama",
    values: dict[str, Floats] | None = None,
    kinds: dict[str, Kind] | None = None,
    metadata: dict[str, Any] | None = None,
    alignment: int | None = None,
) -> Path:
    """A whole model. `kinds` gives tensors that are not float32; `metadata` replaces and adds entries."""
    tensors = {}
    for name, array in (values or model_values(architecture)).items():
        if architecture == "llama" and ".attn_q." in name:
            array = interleaved(array, HEADS)
        if architecture == "llama" and ".attn_k." in name:
            array = interleaved(array, KV_HEADS)
        kind = (kinds or {}).get(name, Kind.F32)
        tensors[name] = (kind, stored(array, kind))
    return write_gguf(path, architecture, model_metadata(architecture) | (metadata or {}), tensors, alignment)
