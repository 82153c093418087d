"""A dense decoder in plain PyTorch, as one writes it by hand to be compiled: fused projections, static KV, one step.

The recipe is the usual one for CUDA graphs: every shape is fixed, the position is a tensor, attention runs over the
whole cache under a mask, and the next token is chosen inside the step. Query heads that share a KV head are multiplied
together, so that the cache is read once; PyTorch's own attention, which copies it for each of them, can be had instead.

A layer is a function of its weights and its part of the cache, so that it can be compiled once for all layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from monotape.models.spec import ModelSpec

_PADDING = 64  # the cache's length is a multiple of it


class TorchDecoder(torch.nn.Module):
    """Random weights of a shape; `forward` takes one token at one position and gives the next."""

    kv: torch.Tensor
    cosines: torch.Tensor
    sines: torch.Tensor
    positions: torch.Tensor

    def __init__(
        self, spec: ModelSpec, length: int, dtype: torch.dtype, device: str, *, sdpa: bool = False
    ) -> None:
        super().__init__()
        self.spec, self.sdpa = spec, sdpa
        made: dict[str, Any] = {"dtype": dtype, "device": device}
        width, head_dim, qkv = spec.width, spec.head_dim, spec.q_rows + 2 * spec.kv_rows

        def matrix(rows: int, columns: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(rows, columns, **made) * columns**-0.5, requires_grad=False)

        self.qkv = torch.nn.ParameterList(matrix(qkv, width) for _ in range(spec.layers))
        self.output = torch.nn.ParameterList(matrix(width, spec.q_rows) for _ in range(spec.layers))
        self.gate_up = torch.nn.ParameterList(matrix(2 * spec.ffn, width) for _ in range(spec.layers))
        self.down = torch.nn.ParameterList(matrix(width, spec.ffn) for _ in range(spec.layers))
        self.head = matrix(spec.vocab, width)
        self.embedding = self.head if spec.tied else matrix(spec.vocab, width)
        self.norm = torch.nn.Parameter(torch.ones(width, **made), requires_grad=False)
        self.head_norm = torch.nn.Parameter(torch.ones(head_dim, **made), requires_grad=False)
        self.run_layer: Callable[..., torch.Tensor] = self.layer  # or as compiled
        self.run_rows: Callable[..., torch.Tensor] = self.layer_rows
        self.set_length(length)

    def set_length(self, length: int) -> None:
        """A cache for `length` positions, filled with random values."""
        spec, like = self.spec, self.norm
        length = -(-length // _PADDING) * _PADDING
        shape = (spec.layers, 2, 1, spec.kv_heads, length, spec.head_dim)
        self.register_buffer("kv", torch.randn(shape, dtype=like.dtype, device=like.device) * 0.1)
        positions = torch.arange(length, device=like.device)
        frequencies = torch.tensor(spec.rope.frequencies, dtype=torch.float32, device=like.device)
        angles = positions[:, None].float() * frequencies
        self.register_buffer("cosines", angles.cos().to(like.dtype))
        self.register_buffer("sines", angles.sin().to(like.dtype))
        self.register_buffer("positions", positions)

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, (x.shape[-1],), weight, self.spec.norm_eps)

    def _rotated(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        dims = self.spec.rope.dims
        first, second, rest = x[..., : dims // 2], x[..., dims // 2 : dims], x[..., dims:]
        cos, sin = self.cosines[position], self.sines[position]
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)

    def _weights(self, layer: int) -> tuple[torch.Tensor, ...]:
        return self.qkv[layer], self.output[layer], self.gate_up[layer], self.down[layer]

    def _fed_forward(self, x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        gate, up = functional.linear(self._normed(x, self.norm), gate_up).chunk(2, -1)
        return functional.linear(functional.silu(gate) * up, down)

    def layer(
        self, x: torch.Tensor, position: torch.Tensor, mask: torch.Tensor, kv: torch.Tensor,
        qkv: torch.Tensor, output: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """One token through a layer."""
        x = x + self._attend(self._normed(x, self.norm), position, mask, kv, qkv, output)
        return x + self._fed_forward(x, gate_up, down)

    def layer_rows(
        self, x: torch.Tensor, positions: torch.Tensor, kv: torch.Tensor,
        qkv: torch.Tensor, output: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """All rows of a prompt through a layer."""
        x = x + self._attend_rows(self._normed(x, self.norm), positions, kv, qkv, output)
        return x + self._fed_forward(x, gate_up, down)

    def _attend(
        self, x: torch.Tensor, position: torch.Tensor, mask: torch.Tensor, kv: torch.Tensor,
        qkv: torch.Tensor, output: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        spec = self.spec
        projected = functional.linear(x, qkv)
        q, k, v = torch.split(projected, [spec.q_rows, spec.kv_rows, spec.kv_rows], -1)
        q, k = q.view(1, spec.heads, 1, -1), k.view(1, spec.kv_heads, 1, -1)
        if spec.qk_norm:
            q, k = self._normed(q, self.head_norm), self._normed(k, self.head_norm)
        q, k = self._rotated(q, position), self._rotated(k, position)
        keys, values = kv[0], kv[1]
        keys.index_copy_(2, position, k)
        values.index_copy_(2, position, v.view(1, spec.kv_heads, 1, -1))
        attended = self._attended(q, keys, values, mask)
        return functional.linear(attended.reshape(1, -1), output)

    def _attended(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        if self.sdpa:
            return functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)
        grouped = q.view(1, self.spec.kv_heads, -1, self.spec.head_dim)
        scores = torch.matmul(grouped, keys.transpose(2, 3)).float() * self.spec.attention_scale
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1).to(values.dtype)
        return torch.matmul(weights, values)

    def prefill(self, tokens: torch.Tensor) -> torch.Tensor:
        """All rows of a prompt at once, into the beginning of the cache; the token after the last."""
        rows = tokens.shape[0]
        x, positions = self.embedding[tokens], self.positions[:rows]
        for layer in range(self.spec.layers):
            x = self.run_rows(x, positions, self.kv[layer], *self._weights(layer))
        return functional.linear(self._normed(x[-1:], self.norm), self.head).argmax(-1)

    def _attend_rows(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        kv: torch.Tensor,
        qkv: torch.Tensor,
        output: torch.Tensor,
    ) -> torch.Tensor:
        spec, rows = self.spec, x.shape[0]
        projected = functional.linear(x, qkv)
        q, k, v = torch.split(projected, [spec.q_rows, spec.kv_rows, spec.kv_rows], -1)
        q, k, v = (part.view(1, rows, -1, spec.head_dim).transpose(1, 2) for part in (q, k, v))
        if spec.qk_norm:
            q, k = self._normed(q, self.head_norm), self._normed(k, self.head_norm)
        q, k = self._rotated(q, positions), self._rotated(k, positions)
        kv[0, :, :, :rows] = k
        kv[1, :, :, :rows] = v
        attended = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=spec.attention_scale, enable_gqa=True
        )
        return functional.linear(attended.transpose(1, 2).reshape(rows, -1), output)

    def forward(self, token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        x = self.embedding[token]
        mask = (self.positions <= position).view(1, 1, 1, -1)
        for layer in range(self.spec.layers):
            x = self.run_layer(x, position, mask, self.kv[layer], *self._weights(layer))
        return functional.linear(self._normed(x, self.norm), self.head).argmax(-1)
