"""Laneformer in PyTorch against the reference: two ways to write the same model down."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from backends.cpu_cases import reference
from lane_models import SETTINGS, VOCAB, config, make_laneformer
from monotape.errors import UnsupportedModel
from monotape.training.laneformer import Laneformer

TOKENS = np.random.default_rng(5).integers(0, VOCAB, 29).tolist()


def logits(model: Laneformer, tokens: list[int]) -> np.ndarray:
    with torch.no_grad():
        return np.asarray(model(torch.tensor([tokens]))[0].numpy())


@pytest.mark.parametrize("name", SETTINGS)
def test_numpy_and_pytorch_agree(name: str, tmp_path: Path) -> None:
    model = make_laneformer(tmp_path, **SETTINGS[name])
    backend = reference(tmp_path)
    got, want = backend.logits(TOKENS, backend.new_sequence()), logits(model, TOKENS)
    assert got.shape == want.shape == (len(TOKENS), VOCAB)
    assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want)
    sequence = backend.new_sequence()
    pieces = [backend.logits(TOKENS[start:end], sequence) for start, end in ((0, 1), (1, 17), (17, 29))]
    assert np.linalg.norm(np.concatenate(pieces) - want) <= 1e-5 * np.linalg.norm(want)


def test_settings_are_different_models(tmp_path: Path) -> None:
    """With the same weights: otherwise the test above would prove little."""
    seen: dict[str, np.ndarray] = {}
    for name in ("tensor parallel", "delay 1", "delay 2", "delay 3", "delay 4", "delay 4, early sums", "ladder",
                 "silent", "silent but for early sums", "attention alone"):  # fmt: skip
        seen[name] = logits(make_laneformer(tmp_path / name, **SETTINGS[name]), TOKENS)
    names = list(seen)
    for index, name in enumerate(names):
        for other in names[:index]:
            assert np.linalg.norm(seen[name] - seen[other]) > 0.05 * np.linalg.norm(seen[other]), (
                name,
                other,
            )


def test_what_was_saved_is_loaded_bit_for_bit(tmp_path: Path) -> None:
    model = make_laneformer(tmp_path)
    assert np.array_equal(logits(Laneformer.load(tmp_path).eval(), TOKENS), logits(model, TOKENS))


def test_tensors_have_their_authors_names_and_shapes(tmp_path: Path) -> None:
    tensors = make_laneformer(tmp_path).state_dict()
    assert tensors["model.layers.3.attention.wk.weight"].shape == (4, 12, 48)
    assert tensors["model.layers.3.attention.wo.weight"].shape == (4, 48, 12)
    assert tensors["model.layers.3.feed_forward.w2.weight"].shape == (4, 48, 18)
    assert {name.split(".")[0] for name in tensors} == {"model", "lm_head"}


def test_it_learns() -> None:
    torch.manual_seed(1)
    model = Laneformer(config(num_hidden_layers=2, swa_layers=[0]))
    tokens = torch.tensor([TOKENS])
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(12):
        loss = functional.cross_entropy(model(tokens[:, :-1])[0], tokens[0, 1:])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert losses[-1] < 0.5 * losses[0]


def test_a_model_without_lanes_is_refused() -> None:
    llama = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1,
        "intermediate_size": 8, "vocab_size": 9, "max_position_embeddings": 8,
    }  # fmt: skip
    with pytest.raises(UnsupportedModel, match="LlamaForCausalLM has no lanes"):
        Laneformer(llama)
