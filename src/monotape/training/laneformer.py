"""Laneformer in PyTorch, for training: the same config.json and the same tensors as the model that the engine runs.

All lanes live in one tensor [batch, position, lane, width]. Written from docs/delayed-tensor-parallelism.md
and not from the steps of models/lanes.py, so that a test can hold the two against each other.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from monotape.errors import UnsupportedModel
from monotape.models.lanes import Lanes
from monotape.models.registry import spec_from_config
from monotape.models.rope import position_tables
from monotape.models.spec import ModelSpec


class LaneMatrix(nn.Module):
    """One matrix a lane: [lane, out, in]."""

    def __init__(self, lanes: int, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(lanes, rows, columns) / math.sqrt(columns))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bsli,loi->bslo", x, self.weight)


class Norm(nn.Module):
    """RMSNorm with one gain for all lanes ("weight") or one for each ("scale")."""

    def __init__(self, width: int, eps: float, lanes: int = 0) -> None:
        super().__init__()
        self.eps, self.name = eps, "scale" if lanes else "weight"
        self.register_parameter(self.name, nn.Parameter(torch.ones(*((lanes,) if lanes else ()), width)))

    def forward(self, x: Tensor) -> Tensor:
        gain: Tensor = getattr(self, self.name)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * gain


class Attention(nn.Module):
    """Every lane attends with its own heads."""

    def __init__(self, spec: ModelSpec, lanes: int, window: int | None) -> None:
        super().__init__()
        self.head_dim, self.window = spec.head_dim, window
        self.wq = LaneMatrix(lanes, spec.q_rows // lanes, spec.width)
        self.wk = LaneMatrix(lanes, spec.kv_rows // lanes, spec.width)
        self.wv = LaneMatrix(lanes, spec.kv_rows // lanes, spec.width)
        self.wo = LaneMatrix(lanes, spec.width, spec.q_rows // lanes)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        batch, length, lanes, _ = x.shape

        def heads(values: Tensor) -> Tensor:  # [batch, head of all lanes, position, head_dim]
            return values.reshape(batch, length, -1, self.head_dim).transpose(1, 2)

        q, k, v = turned(heads(self.wq(x)), turns), turned(heads(self.wk(x)), turns), heads(self.wv(x))
        position = torch.arange(length, device=x.device)
        distance = position[:, None] - position[None, :]
        seen = (distance >= 0) & (distance < (self.window or length))
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        out: Tensor = self.wo(mixed.transpose(1, 2).reshape(batch, length, lanes, -1))
        return out


class FeedForward(nn.Module):
    """SwiGLU, a share of its columns in each lane."""

    def __init__(self, spec: ModelSpec, lanes: int) -> None:
        super().__init__()
        self.w1 = LaneMatrix(lanes, spec.ffn // lanes, spec.width)
        self.w2 = LaneMatrix(lanes, spec.width, spec.ffn // lanes)
        self.w3 = LaneMatrix(lanes, spec.ffn // lanes, spec.width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(functional.silu(self.w1(x)) * self.w3(x))
        return out


class Layer(nn.Module):
    def __init__(self, spec: ModelSpec, lanes: Lanes, window: int | None) -> None:
        super().__init__()
        own = lanes.count if lanes.own_norms else 0
        self.attention_norm = Norm(spec.width, spec.norm_eps, own)
        self.attention = Attention(spec, lanes.count, window)
        self.ffn_norm = Norm(spec.width, spec.norm_eps, own)
        self.feed_forward = FeedForward(spec, lanes.count)


class Backbone(nn.Module):
    """The part of the checkpoint that is called "model"."""

    def __init__(self, spec: ModelSpec, lanes: Lanes) -> None:
        super().__init__()
        own = lanes.count if lanes.own_norms and lanes.head != "sum" else 0
        self.tok_embeddings = nn.Embedding(spec.vocab, spec.width)
        self.layers = nn.ModuleList(Layer(spec, lanes, window) for window in spec.windows)
        self.norm = Norm(spec.width, spec.norm_eps, own)


class LaneHead(nn.Module):
    """A head that reads all lanes side by side."""

    def __init__(self, columns: int, vocab: int) -> None:
        super().__init__()
        self.linear = nn.Linear(columns, vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.linear(x.flatten(-2))
        return logits


class Laneformer(nn.Module):
    """Token ids [batch, position] to logits [batch, position, vocab]."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        spec = spec_from_config(config)
        if spec.lanes is None:
            raise UnsupportedModel(
                f"{spec.architecture} has no lanes.", "Give the config.json of a Laneformer."
            )
        self.config, self.spec, self.lanes = dict(config), spec, spec.lanes
        self.model = Backbone(spec, spec.lanes)
        self.lm_head: nn.Module | None = None if spec.tied else _head(spec, spec.lanes)
        cosines, sines = position_tables(spec.rope, spec.context)
        turns = torch.stack((torch.from_numpy(cosines), torch.from_numpy(sines)))
        self.register_buffer("turns", turns, persistent=False)
        self.turns: Tensor

    def forward(self, ids: Tensor) -> Tensor:
        lanes, layers = self.lanes, self.model.layers
        x = self.model.tok_embeddings(ids)[:, :, None, :].expand(-1, -1, lanes.count, -1)
        turns = self.turns[:, : ids.shape[1]].to(x.dtype)
        partials: list[Tensor] = []
        for layer in layers:
            assert isinstance(layer, Layer)
            partials.append(layer.attention(layer.attention_norm(x), turns))
            x = x + self._exchanged(partials)
            partials.append(layer.feed_forward(layer.ffn_norm(x)))
            x = x + self._exchanged(partials)
        if lanes.own == "with sum":
            for late in partials[len(partials) - (lanes.delay or 0) :]:
                x = x + late.sum(-2, keepdim=True)
        return self._logits(x)

    def _exchanged(self, partials: list[Tensor]) -> Tensor:
        """What the newest module adds to every lane's residual."""
        lanes, module, own = self.lanes, len(partials) - 1, partials[-1]
        early = (lanes.delay or 0) if lanes.early_modules is None else lanes.early_modules
        if lanes.own == "with sum":
            waited = module - (lanes.delay or 0)
            return partials[waited].sum(-2, keepdim=True) if waited >= 0 else torch.zeros_like(own)
        if module < early:
            return own.sum(-2, keepdim=True) if lanes.early == "sum" else own * math.sqrt(lanes.count)
        if lanes.delay is None or module < lanes.delay:
            return own * math.sqrt(lanes.count)
        arrives = lanes.feed_forward if (module - lanes.delay) % 2 else lanes.attention
        if not arrives:
            return own * math.sqrt(lanes.count)
        sent = partials[module - lanes.delay]
        return own + sent.sum(-2, keepdim=True) - sent

    def _logits(self, x: Tensor) -> Tensor:
        kind, model = self.lanes.head, self.model
        normed = model.norm(x.sum(-2)) if kind == "sum" else model.norm(x)
        if kind == "mean":
            normed = normed.mean(-2)
        if self.lm_head is None:
            return functional.linear(normed, model.tok_embeddings.weight)
        logits: Tensor = self.lm_head(normed)
        return logits.flatten(-2) if kind == "vocabulary" else logits

    def save(self, folder: Path) -> None:
        """config.json and model.safetensors, as the engine and its authors' code read them."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config, indent=2) + "\n", "utf-8")
        tensors = {name: tensor.detach().contiguous() for name, tensor in self.state_dict().items()}
        save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})

    @classmethod
    def load(cls, folder: Path) -> Laneformer:
        """What `save` wrote."""
        model = cls(json.loads((folder / "config.json").read_text("utf-8")))
        model.load_state_dict(load_file(str(folder / "model.safetensors")))
        return model


def _head(spec: ModelSpec, lanes: Lanes) -> nn.Module:
    if lanes.head == "concatenate":
        return LaneHead(spec.head_width, spec.vocab)
    if lanes.head == "vocabulary":
        return LaneMatrix(lanes.count, spec.vocab // lanes.count, spec.width)
    return nn.Linear(spec.width, spec.vocab, bias=False)


def turned(heads: Tensor, turns: Tensor) -> Tensor:
    """RoPE on pairs (2 i, 2 i + 1): heads are [batch, head, position, head_dim], turns cos and sin by position."""
    cosines, sines = turns[0], turns[1]
    even, odd = heads[..., 0::2], heads[..., 1::2]
    pairs = torch.stack((even * cosines - odd * sines, odd * cosines + even * sines), dim=-1)
    return pairs.flatten(-2)
