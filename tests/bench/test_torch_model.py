"""The peer in PyTorch computes what it claims to: the same token with either attention, and nothing from the future."""

from __future__ import annotations

import pytest

from monotape.models.registry import spec_from_config
from monotape.models.spec import ModelSpec
from shapes import SHAPES


def tiny(shape: str) -> ModelSpec:
    return spec_from_config(
        {
            **SHAPES[shape], "num_hidden_layers": 2, "hidden_size": 72, "num_attention_heads": 6, "head_dim": 12,
            "num_key_value_heads": 2, "intermediate_size": 90, "vocab_size": 77,
        }
    )  # fmt: skip


@pytest.mark.parametrize("shape", ["llama-3.2-1b", "qwen3-0.6b", "llama-3.1-8b"])
def test_both_attentions_agree_and_do_not_look_ahead(shape: str) -> None:
    import torch

    from torch_model import TorchDecoder

    torch.manual_seed(1)
    model = TorchDecoder(tiny(shape), 40, torch.float32, "cpu")
    assert model.kv.shape[4] == 64
    token = torch.tensor([5])
    with torch.no_grad():
        for place in range(30, 40):
            position = torch.tensor([place])
            model.sdpa = False
            grouped = model(token, position)
            model.sdpa = True
            model.kv[:, :, :, :, place + 1 :] = 1e6  # what has not been written yet
            assert torch.equal(model(token, position), grouped)
            token = grouped
