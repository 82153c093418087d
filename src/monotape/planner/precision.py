"""How many bytes a weight takes: one format for all matrices, or what a checkpoint's quantization_config says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from monotape.errors import ModelError, UnsupportedModel, UsageError, nearest
from monotape.models.dense import Family
from monotape.models.registry import FAMILIES, architecture_of
from monotape.models.tensors import separate_tensors
from monotape.plan.formats import GPU_LAYOUTS
from monotape.planner.shape import (
    ATTENTION,
    EMBEDDING,
    FFN,
    GROUPS,
    HEAD,
    KIND_GROUPS,
    ROUTED,
    ROUTER,
    SHARED,
    ModelShape,
    Part,
)
from monotape.weights.quantised.compressed_presets import PRESETS
from monotape.weights.quantised.names import listed

#: Bytes of one weight, the scales it shares with its neighbours included: names of the field, then a GPU's tapes' own.
FORMATS: Mapping[str, tuple[float, str]] = {
    **{
        fmt.value: (
            layout.bytes / layout.k,
            f"{8 * layout.bytes / layout.k:.3g} bits, as {fmt.value} lies on a tape",
        )
        for fmt, layout in GPU_LAYOUTS.items()
        if not fmt.is_half
    },
    "f32": (4.0, "32 bits"),
    "bf16": (2.0, "16 bits"),
    "fp16": (2.0, "16 bits"),
    "fp8": (1 + 4 / (128 * 128), "8 bits, a 32-bit scale for 128 x 128"),
    "q8": (1 + 2 / 32, "8 bits, a 16-bit scale for 32"),
    "int4": (0.5 + 2 / 32, "4 bits, a 16-bit scale for 32"),
    "mxfp4": (0.5 + 1 / 32, "4 bits, an 8-bit scale for 32"),
}
AUTO = "auto"
_UNPACKED = FORMATS["bf16"][0]  # what a GPU's tapes hold where no format of codes holds a matrix
NVFP4_GROUP = 16  # weights that share a scale
KV_FORMATS: Mapping[str, float] = {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "f32": 4.0}
_STORED = {"float32": "f32", "bfloat16": "bf16", "float16": "fp16"}
#: A module of each kind, as checkpoints name them, for the lists of what a quantisation leaves alone.
_MODULES = {
    ATTENTION: "model.layers.1.self_attn.o_proj",
    FFN: "model.layers.1.mlp.down_proj",
    SHARED: "model.layers.1.mlp.shared_experts.down_proj",
    ROUTED: "model.layers.1.mlp.experts.1.down_proj",
    HEAD: "lm_head",
}
_NEVER = (ROUTER, EMBEDDING)  # no checkpoint shrinks these


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes of one weight, by kind of part; vectors, routers and embeddings keep `plain`."""

    name: str
    matrices: Mapping[str, float]
    plain: float
    note: str

    def stored_bytes(self, part: Part) -> float:
        return part.copies * self._bytes(part)

    def read_bytes(self, part: Part) -> float:
        return part.chosen * self._bytes(part)

    def _bytes(self, part: Part) -> float:
        return part.matrices * self.matrices.get(part.kind, self.plain) + part.vectors * self.plain


def precision_for(dtype: str, config: Mapping[str, Any], head_dtype: str = AUTO) -> Precision:
    """The precision that the user asks for; "auto" is what the checkpoint says of itself, and a head like the rest."""
    if head_dtype != AUTO:
        rest, head = precision_for(dtype, config), precision_for(head_dtype, config)
        return with_head(rest, head)
    if dtype == AUTO:
        return _of_checkpoint(config)
    if dtype not in FORMATS:
        raise UsageError(
            f"The planner knows no weight format {dtype!r}; the nearest it knows is {nearest(dtype, FORMATS)!r}.",
            f"It knows {', '.join((AUTO, *FORMATS))}.",
        )
    size, what = FORMATS[dtype]
    note = f"every matrix that a token reads, the head included, at {what}"
    if size < 2:
        note += "; norms, routers and embeddings at 16 bits"
    return Precision(dtype, dict.fromkeys(_MODULES, size), max(size, 2.0), note)


def with_head(rest: Precision, head: Precision) -> Precision:
    """The same weights with a head of another format."""
    matrices = {**rest.matrices, HEAD: head.matrices.get(HEAD, head.plain)}
    return Precision(rest.name, matrices, rest.plain, f"{rest.note}; the head as {head.name}")


def kv_bytes_for(dtype: str) -> float:
    if dtype not in KV_FORMATS:
        raise UsageError(
            f"The planner knows no KV format {dtype!r}; the nearest it knows is {nearest(dtype, KV_FORMATS)!r}.",
            f"It knows {', '.join(KV_FORMATS)}.",
        )
    return KV_FORMATS[dtype]


def weight_bytes(shape: ModelShape, precision: Precision) -> float:
    """All weights, as they lie in memory."""
    return sum(times * precision.stored_bytes(part) for part, times in shape.all_parts())


def read_bytes_by_group(shape: ModelShape, precision: Precision) -> dict[str, float]:
    """The weights that one token reads, under the headings of shape.GROUPS."""
    found = dict.fromkeys(GROUPS, 0.0)
    for part, times in shape.all_parts():
        found[KIND_GROUPS[part.kind]] += times * precision.read_bytes(part)
    return found


def _of_checkpoint(config: Mapping[str, Any]) -> Precision:
    inner = config.get("text_config")
    text = inner if isinstance(inner, Mapping) else config
    plain_name = _plain_format(text, config)
    plain = FORMATS[plain_name][0]
    quantized = text.get("quantization_config") or config.get("quantization_config")
    if quantized is None:
        return Precision(plain_name, {}, plain, f"as the checkpoint says: {plain_name} throughout")
    if not isinstance(quantized, Mapping):
        raise ModelError(
            "config.json: quantization_config must be an object.", "Give --dtype to pass over it."
        )
    if _is_plain(quantized):
        return Precision(plain_name, {}, plain, f"as the checkpoint says: {plain_name} throughout")
    size, name = _quantized_size(quantized)
    matrices = dict.fromkeys(_quantized_kinds(quantized), size)
    if _has_sorted_columns(quantized):
        ffn = _sorted_ffn_bytes(size, config)
        matrices = {kind: ffn if kind == FFN else _UNPACKED for kind in matrices}
        name += " with sorted columns, which a GPU unpacks to bf16"
        name += "" if ffn == _UNPACKED else " (all matrices but down)"
    expert = text.get("expert_dtype")
    if expert == "fp4":  # DeepSeek-V4: FP8 throughout, FP4 in the routed experts
        matrices[ROUTED] = FORMATS["mxfp4"][0]
        name = f"{name} with fp4 experts"
    elif expert is not None:
        raise UnsupportedModel(
            f"config.json says expert_dtype = {expert!r}, which the planner does not know.", _HINT
        )
    left = [kind for kind in _MODULES if kind not in matrices]
    note = f"as the checkpoint says: {name}" + (f"; {plain_name} in {', '.join(left)}" if left else "")
    return Precision(name, matrices, plain, note)


def _has_sorted_columns(quantized: Mapping[str, Any]) -> bool:
    """Are the columns of a group scattered over a row? With static groups, or one group a row, they are not."""
    method = _method(quantized)
    if method == "gptq":
        scattered = quantized.get("desc_act") is True and quantized.get("static_groups") is not True
        return scattered and quantized.get("group_size") != -1
    weights = _compressed_weights(quantized) if method == "compressed-tensors" else None
    if weights is None:
        return False
    scattered = weights.get("actorder") in (True, "group", "dynamic")
    return scattered and weights.get("group_size") not in (None, -1)


def _sorted_ffn_bytes(size: float, config: Mapping[str, Any]) -> float:
    """Of a weight of a dense block: weights/sorted_columns.py puts the columns of `down` in order where it can.

    That is where `gate` and `up` are tensors of their own, whose rows can have the same order.
    """
    family = FAMILIES.get(architecture_of(config) or "")
    dense = isinstance(family, Family) and family.experts is None and family.projections is separate_tensors
    return (2 * _UNPACKED + size) / 3 if dense else _UNPACKED


_HINT = f"Give --dtype, one of {', '.join(FORMATS)}, to plan for a format of your own."


def _plain_format(text: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    for place in (text, config):
        name = place.get("dtype") or place.get("torch_dtype")
        if name is not None:
            if name not in _STORED:
                raise UnsupportedModel(
                    f"config.json says dtype = {name!r}, which the planner does not know.", _HINT
                )
            return _STORED[name]
    return "bf16"  # what nearly every checkpoint of today holds where its config is silent


def _quantized_size(quantized: Mapping[str, Any]) -> tuple[float, str]:
    """Bytes of a quantised weight, and what the method is called."""
    method = _method(quantized)
    if method in ("fp8", "mxfp4"):
        return FORMATS[method][0], method
    if method in ("gptq", "awq"):
        # As the loaders have them: a field that is left out, or null, has the method's usual value.
        bits = quantized.get("bits") or quantized.get("w_bit") or (4 if method == "awq" else None)
        group = 128 if quantized.get("group_size") is None else quantized["group_size"]
        symmetric = quantized.get("sym") is not False if method == "gptq" else False
        zeros = method == "gptq" or quantized.get("zero_point") is not False
        if bits in (2, 3, 4, 8) and type(group) is int and (group > 0 or group == -1):
            size = _integer_bytes(bits, None if group == -1 else group, zeros)
            return _on_tape(size, f"{method} {bits} bits", wide=bits == 8 and not symmetric)
    weights = _compressed_weights(quantized) if method == "compressed-tensors" else None
    if weights is not None:
        return _compressed_size(weights)
    raise UnsupportedModel(
        f"config.json has a quantization_config (quant_method {method!r}) that the planner does not understand.",
        _HINT,
    )


def _method(quantized: Mapping[str, Any]) -> Any:
    return quantized.get("quant_method") or quantized.get("method")


def _compressed_weights(quantized: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What compressed-tensors says of the weights of its only group, spelt out or by the name of a preset."""
    found = _only_group(quantized)
    if found is None:
        return None
    name, group = found
    if _is_preset(name, group):
        return PRESETS[name.upper()].weights
    weights = group.get("weights") if isinstance(group, Mapping) else None
    return weights if isinstance(weights, Mapping) else None


def _only_group(quantized: Mapping[str, Any]) -> tuple[str, Any] | None:
    groups = quantized.get("config_groups")
    return next(iter(groups.items())) if isinstance(groups, Mapping) and len(groups) == 1 else None


def _is_preset(name: str, group: Any) -> bool:
    return isinstance(group, list) and name.upper() in PRESETS


def _integer_bytes(bits: int, group: int | None, zeros: bool) -> float:
    """Of a weight, with its share of a group's 16-bit scale and zero point; those of whole rows count for nothing."""
    shared = 2 + (bits / 8 if zeros else 0)
    return bits / 8 + (0 if group is None else shared / group)


def _on_tape(size: float, name: str, *, wide: bool) -> tuple[float, str]:
    """Weights that no smaller format of the tapes holds take what `wide` takes, which is more than in the file."""
    return (FORMATS["wide"][0], f"{name} as wide") if wide else (size, name)


def _compressed_size(weights: Mapping[str, Any]) -> tuple[float, str]:
    bits, kind, group = weights.get("num_bits", 8), weights.get("type") or "int", weights.get("group_size")
    if group in (None, -1):
        group = None
    elif type(group) is not int or group < 1:
        bits = None
    if kind == "float":
        if bits == 8:
            return 1.0, "fp8"
        if bits == 4 and group is not None:
            # MX scales are exponents of 8 bits; the scales of NVFP4, of 16 weights each, are floats of 8 bits.
            name = "nvfp4" if group == NVFP4_GROUP else "mxfp4"
            return _on_tape(bits / 8 + 1 / group, name, wide=name == "nvfp4")
    elif bits in (4, 8):
        zeros = weights.get("symmetric") is False
        return _on_tape(_integer_bytes(bits, group, zeros), f"int{bits}", wide=bits == 8 and zeros)
    raise UnsupportedModel(
        f"config.json compresses weights to {weights.get('num_bits')!r} bits ({kind!r}) in groups of "
        f"{weights.get('group_size')!r}, which the planner does not understand.",
        _HINT,
    )


def _is_plain(quantized: Mapping[str, Any]) -> bool:
    """Is the only group of compressed-tensors a preset that leaves its modules as they are?"""
    group = _only_group(quantized) if _method(quantized) == "compressed-tensors" else None
    return group is not None and _is_preset(*group) and PRESETS[group[0].upper()].weights is None


def _quantized_kinds(quantized: Mapping[str, Any]) -> Iterator[str]:
    """Without a list only MXFP4's routed experts are sure to be quantised: see weights/quantised/mxfp4.py."""
    if _method(quantized) == "mxfp4" and not isinstance(quantized.get("modules_to_not_convert"), list):
        yield ROUTED
        return
    kept = _kept_modules(quantized)
    yield from (kind for kind, module in _MODULES.items() if not listed(module, kept))


def _kept_modules(quantized: Mapping[str, Any]) -> list[str]:
    """Patterns of modules that stay as they are. Methods that list none leave the head alone."""
    listed_modules = ["lm_head"]
    for name in ("modules_to_not_convert", "ignored_layers", "ignore"):
        value = quantized.get(name)
        if isinstance(value, list) and all(type(item) is str for item in value):
            listed_modules = value
            break
    return [name for name in listed_modules if name != "lm_head" or quantized.get("lm_head") is not True]
