"""Where the tensors of the dense families lie in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from monotape.models.spec import TensorSource

Tensors = dict[str, TensorSource]
_PROJECTIONS = {role: f"{role}_proj" for role in ("gate", "up", "down")}

LAYER = "model.layers.{layer}."
_EVERYWHERE = {
    "attention_norm": TensorSource(LAYER + "input_layernorm.weight"),
    "output": TensorSource(LAYER + "self_attn.o_proj.weight"),
    "ffn_norm": TensorSource(LAYER + "post_attention_layernorm.weight"),
    "down": TensorSource(LAYER + "mlp.down_proj.weight"),
}


def model_tensors(tied: bool) -> Tensors:
    tensors = {
        "embedding": TensorSource("model.embed_tokens.weight"),
        "final_norm": TensorSource("model.norm.weight"),
    }
    return tensors if tied else {**tensors, "head": TensorSource("lm_head.weight")}


def separate_tensors(q_rows: int, kv_rows: int, ffn: int) -> Tensors:
    """One tensor per projection, as most families store them."""
    attention = {role: TensorSource(f"{LAYER}self_attn.{role}_proj.weight") for role in ("q", "k", "v")}
    feed_forward = {role: TensorSource(f"{LAYER}mlp.{role}_proj.weight") for role in ("gate", "up")}
    return {**_EVERYWHERE, **attention, **feed_forward}


def fused_tensors(q_rows: int, kv_rows: int, ffn: int) -> Tensors:
    """q, k and v as the rows of one tensor, gate and up as those of another."""
    qkv, gate_up = f"{LAYER}self_attn.qkv_proj.weight", f"{LAYER}mlp.gate_up_proj.weight"
    return {
        **_EVERYWHERE,
        "q": TensorSource(qkv, (0, q_rows)),
        "k": TensorSource(qkv, (q_rows, q_rows + kv_rows)),
        "v": TensorSource(qkv, (q_rows + kv_rows, q_rows + 2 * kv_rows)),
        "gate": TensorSource(gate_up, (0, ffn)),
        "up": TensorSource(gate_up, (ffn, 2 * ffn)),
    }


def expert_tensors(
    router: str, expert: str, names: Mapping[str, str] = _PROJECTIONS
) -> Callable[[int, int, int], Tensors]:
    """One tensor per projection of each expert. `router`: a module; `expert`: where the modules of an expert begin."""

    def tensors(q_rows: int, kv_rows: int, ffn: int) -> Tensors:
        return {
            **separate_tensors(q_rows, kv_rows, ffn),
            "router": TensorSource(f"{router}.weight"),
            **{role: TensorSource(f"{expert}{name}.weight") for role, name in names.items()},
        }

    return tensors


def bias_tensors(roles: tuple[str, ...], tensors: Tensors) -> Tensors:
    """The biases of some matrices, which lie beside them."""
    return {
        f"{role}_bias": TensorSource(f"{tensors[role].name.removesuffix('.weight')}.bias") for role in roles
    }


def head_norm_tensors() -> Tensors:
    return {f"{role}_norm": TensorSource(f"{LAYER}self_attn.{role}_norm.weight") for role in ("q", "k")}


def sink_tensors() -> Tensors:
    return {"sinks": TensorSource(f"{LAYER}self_attn.sinks")}
