"""The one generated file of the kernel: the plan's dimensions as constants. The kernel's bodies are never generated."""

from __future__ import annotations

from monotape.errors import UnsupportedModel
from monotape.models.spec import ModelSpec
from monotape.plan.types import Format, Plan

SHARED_MEMORY = 227 * 1024  # what a block may have on Hopper
PAGE_BYTES = 16 * 1024
_WARPS, _BATCH_TILES = 8, 32


def plan_header(
    spec: ModelSpec, plan: Plan, *, trace: bool = False, few: int = 1, many: int = 4, fence: bool = True
) -> str:
    """plan.h for this model on this machine."""
    check_supported(spec, plan)
    rank = plan.ranks[0]
    width_tiles = max(span.count for span in rank.layer_stages[1].spans)
    longest_blocks = max(stage.padded_k for stage in rank.stages) // 32
    longest_input = 4 * -(-longest_blocks // _WARPS)
    constants = {
        "kWorkers": plan.machine.workers, "kLayers": spec.layers, "kWidth": spec.width, "kHeads": spec.heads,
        "kKvHeads": spec.kv_heads, "kHeadDim": spec.head_dim, "kFfn": spec.ffn, "kVocab": spec.vocab,
        "kRopeDims": spec.rope.dims, "kLongestInput": longest_input, "kMostWidthTiles": max(1, width_tiles),
        "kRingPages": ring_pages(spec, longest_input, width_tiles),
    }  # fmt: skip
    lines = [f"constexpr int {name} = {value};" for name, value in constants.items()]
    lines += [
        f"constexpr float kNormEps = {spec.norm_eps!r}f, kAttentionScale = {spec.attention_scale!r}f;",
        f"constexpr bool kQkvBias = {str(spec.qkv_bias).lower()}, kQkNorm = {str(spec.qk_norm).lower()};",
        # Copies in flight: few while consumers poll the exchange, which must not queue behind them; then many.
        f"constexpr int kFewInFlight = {few}, kManyInFlight = {many};",
        f"constexpr bool kFenceResets = {str(fence).lower()};",
        f"constexpr bool kTrace = {str(trace).lower()};",
    ]
    return "#pragma once\nnamespace monotape {\n" + "\n".join(lines) + "\n}  // namespace monotape\n"


def ring_pages(spec: ModelSpec, longest_input: int, width_tiles: int) -> int:
    """As many pages as shared memory holds beside everything else that types.h and ring.h keep there."""
    group, head = spec.heads // spec.kv_heads, spec.head_dim
    inputs = _WARPS * longest_input * 16
    sums = 2 * _BATCH_TILES * _WARPS * 8 * 4
    heads = 4 * (_WARPS * group * (head + 2) + 16 * (head + 2) + group * head + 2 * head)
    rest = inputs + sums + heads + 4 * 8 * width_tiles + 2048
    return (SHARED_MEMORY - rest) // PAGE_BYTES


def check_supported(spec: ModelSpec, plan: Plan) -> None:
    if spec.head_dim % 8 or spec.head_dim > 256 or spec.rope.dims % 2:
        raise UnsupportedModel(
            f"The CUDA kernel does not run heads of {spec.head_dim} values.",
            "They must be a multiple of 8 up to 256; use --backend cpu.",
        )
    if plan.machine.workers < spec.kv_heads:
        raise UnsupportedModel(
            f"{plan.machine.workers} workers cannot share {spec.kv_heads} KV heads.",
            "Use as many workers as heads.",
        )
    if plan.format is not Format.BF16:
        raise UnsupportedModel(
            f"The CUDA kernel does not run {plan.format.value} weights yet.",
            "Use --dtype bf16, or --backend cpu.",
        )
