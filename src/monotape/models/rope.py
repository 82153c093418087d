"""Rotary position rules: from what a config says to frequencies, and from frequencies to cos and sin tables.

Frequencies are float32 and every step is rounded as transformers rounds it, because positions multiply the
error: at position 100,000 one unit in the last place of a frequency is an angle of 0.006. Powers, cosines and
sines are taken in float64 and rounded once, so the tables are the same on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from monotape.errors import ModelError, UnsupportedModel, nearest
from monotape.models.fields import Fields, shown
from monotape.models.spec import MAX_POSITIONS, Rope

Floats = NDArray[np.float32]
Number = TypeVar("Number", int, float)

ORIGINAL = "original_max_position_embeddings"
DEFAULT_THETA = 10000.0  # what transformers takes where a file names none
_HUGE = 1e12  # above any theta or factor that means something
_TINY = 1 / _HUGE  # a factor that is 0 in float32 would divide
_TABLE_ROWS = 4096  # positions whose float64 intermediates are in memory at a time


@dataclass(frozen=True, slots=True)
class _Base:
    """What every rule starts from."""

    theta: float
    dims: int
    context: int  # the model's own: max_position_embeddings
    original: int | None  # the context before it was stretched

    def powers(self) -> Floats:
        """theta ** (2 i / dims): the wavelengths over 2 pi."""
        exponents = np.arange(0, self.dims, 2, dtype=np.float32) / np.float32(self.dims)
        return np.power(self.theta, exponents.astype(np.float64)).astype(np.float32)

    def frequencies(self) -> Floats:
        return np.float32(1) / self.powers()


def _values(frequencies: Floats) -> tuple[float, ...]:
    assert frequencies.dtype == np.float32
    return tuple(float(value) for value in frequencies)


def _default(base: _Base, fields: Fields) -> Rope:
    return Rope(base.dims, _values(base.frequencies()), rule=f"theta {base.theta:g}")


def _linear(base: _Base, fields: Fields) -> Rope:
    factor = fields.number("factor", _TINY, _HUGE)
    return Rope(
        base.dims,
        _values(base.frequencies() / np.float32(factor)),
        rule=f"linear x{factor:g}, theta {base.theta:g}",
    )


def _factors(base: _Base, fields: Fields) -> Rope:
    """Not of Hugging Face: GGUF files hold a rule's outcome as one divisor a frequency."""
    factors = np.array(fields.numbers("factors", base.dims // 2), np.float32)
    return Rope(base.dims, _values(base.frequencies() / factors), rule=f"factors, theta {base.theta:g}")


def _llama3(base: _Base, fields: Fields) -> Rope:
    """Long waves are stretched, short ones kept, those between blended."""
    factor = fields.number("factor", _TINY, _HUGE)
    low = fields.number("low_freq_factor", 0, _HUGE)
    high = fields.number("high_freq_factor", 0, _HUGE)
    original = _original(base, fields)
    if high <= low:
        raise fields.wrong("high_freq_factor", f"must be above low_freq_factor ({low:g})")
    plain = base.frequencies()
    wavelengths = np.float32(2 * math.pi) / plain
    blend = (np.float32(original) / wavelengths - np.float32(low)) / np.float32(high - low)
    blended = (np.float32(1) - blend) * plain / np.float32(factor) + blend * plain
    long, short = wavelengths > original / low, wavelengths < original / high
    frequencies = np.where(long, plain / np.float32(factor), np.where(short, plain, blended))
    return Rope(
        base.dims, _values(frequencies), rule=f"llama3 x{factor:g} of {original}, theta {base.theta:g}"
    )


def _longrope(base: _Base, fields: Fields) -> Rope:
    """One list of divisors for contexts up to the original one, another for longer ones."""
    short = np.array(fields.numbers("short_factor", base.dims // 2), np.float32)
    long = np.array(fields.numbers("long_factor", base.dims // 2), np.float32)
    original = _original(base, fields)
    scale = fields.optional_number("factor", _TINY, _HUGE) or base.context / original
    magnitude = fields.optional_number("attention_factor", 0, _HUGE)
    if magnitude is None:
        magnitude = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
    return Rope(
        base.dims,
        _values(np.float32(1) / (short * base.powers())),
        magnitude=magnitude,
        short_context=original,
        long_frequencies=_values(np.float32(1) / (long * base.powers())),
        rule=f"longrope x{scale:g} of {original}, theta {base.theta:g}",
    )


def _yarn(base: _Base, fields: Fields) -> Rope:
    """Interpolated where a head turns rarely, kept where it turns often, with a ramp between."""
    original = _original(base, fields)
    factor = fields.optional_number("factor", _TINY, _HUGE) or base.context / original
    fast = fields.optional_number("beta_fast", 0, _HUGE) or 32.0
    slow = fields.optional_number("beta_slow", 0, _HUGE) or 1.0
    whole = fields.flag("truncate", True)

    def dimension(turns: float) -> float:
        return base.dims * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base.theta))

    low, high = dimension(fast), dimension(slow)
    if whole:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, base.dims - 1)
    if low == high:
        high += 0.001  # a ramp needs a width
    steps = np.arange(base.dims // 2, dtype=np.float32)
    ramp = np.clip((steps - np.float32(low)) / np.float32(high - low), np.float32(0), np.float32(1))
    kept = np.float32(1) - ramp
    powers = base.powers()
    stretched = np.float32(1) / (np.float32(factor) * powers)
    frequencies = stretched * (np.float32(1) - kept) + np.float32(1) / powers * kept
    return Rope(
        base.dims,
        _values(frequencies),
        magnitude=_yarn_magnitude(factor, fields),
        rule=f"yarn x{factor:g} of {original}, theta {base.theta:g}",
    )


def _yarn_magnitude(factor: float, fields: Fields) -> float:
    given = fields.optional_number("attention_factor", 0, _HUGE)
    numerator = fields.optional_number("mscale", 0, _HUGE)
    denominator = fields.optional_number("mscale_all_dim", 0, _HUGE)

    def grown(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if given is not None:
        return given
    return grown(numerator) / grown(denominator) if numerator and denominator else grown(1.0)


def _original(base: _Base, fields: Fields) -> int:
    if base.original is None:
        raise ModelError(
            f"{fields.label(ORIGINAL)} is missing from config.json.",
            "This rope rule needs the context that the model was first trained with.",
        )
    return base.original


RULES: dict[str, Callable[[_Base, Fields], Rope]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "longrope": _longrope,
    "yarn": _yarn,
    "factors": _factors,
}


def read_rope(
    fields: Fields, head_dim: int, context: int, rules: tuple[str, ...], partial: bool,
    default_theta: float | None = None,
) -> Rope:  # fmt: skip
    """The rotary positions that a config describes, in the words of transformers 4 or 5.

    Version 5 has one object `rope_parameters` with everything in it; version 4 has `rope_theta` and
    `rope_scaling` side by side. `partial` says whether the family can rotate only a part of a head.
    """
    new, old = fields.table("rope_parameters"), fields.table("rope_scaling")
    if new is not None and old is not None and not new.same_as(old):
        raise ModelError(
            "config.json: rope_parameters and rope_scaling contradict each other.", "Keep one of them."
        )
    inner = new or old or Fields({}, prefix="rope_parameters.")
    name = _rule_name(inner)
    if name not in rules:
        raise UnsupportedModel(
            f"config.json asks for the rope rule {name}, which is not supported here; "
            f"the nearest that is: {nearest(name, rules)}.",
            f"Supported: {', '.join(rules)}.",
        )
    theta = _agreed(fields, inner, "rope_theta", lambda table, key: table.optional_number(key, 1, _HUGE))
    base = _Base(
        theta=theta or default_theta or DEFAULT_THETA,
        dims=_rotating_dims(fields, inner, head_dim, partial),
        context=context,
        original=_agreed(
            fields, inner, ORIGINAL, lambda table, key: table.optional_integer(key, 2, MAX_POSITIONS)
        ),
    )
    rope = RULES[name](base, inner)
    inner.finish(f"the rope rule {name}")
    return rope


def _rule_name(inner: Fields) -> str:
    new, old = inner.optional_text("rope_type"), inner.optional_text("type")
    if new is not None and old is not None and new != old:
        raise inner.wrong("rope_type", f"{inner.label('type')} is {shown(old)}")
    name = new or old or "default"
    return "longrope" if name == "su" else name  # the name it had in the first Phi-3 files


def _agreed(
    outer: Fields, inner: Fields, name: str, read: Callable[[Fields, str], Number | None]
) -> Number | None:
    """A value that may stand beside the rope object, in it, or in both places if they agree."""
    beside, inside = read(outer, name), read(inner, name)
    if beside is not None and inside is not None and beside != inside:
        raise inner.wrong(name, f"{outer.label(name)} is {beside:g}")
    return inside if beside is None else beside


def _rotating_dims(fields: Fields, inner: Fields, head_dim: int, partial: bool) -> int:
    name = "partial_rotary_factor"
    factor = _agreed(fields, inner, name, lambda table, key: table.optional_number(key, 0, 1))
    if factor not in (None, 1.0) and not partial:
        raise UnsupportedModel(
            f"config.json says {name} = {factor:g}, but in this family every value of a head rotates.",
            "Supported: 1.0.",
        )
    dims = int(head_dim * (1.0 if factor is None else factor))
    if dims < 2 or dims % 2:
        raise ModelError(
            f"config.json: {dims} of a head's {head_dim} values would rotate, but they rotate in pairs.",
            "head_dim times partial_rotary_factor must be even and at least 2.",
        )
    return dims


def position_tables(rope: Rope, context: int) -> tuple[Floats, Floats]:
    """cos and sin of every position up to `context`, with the rule's magnitude: float32 [context, dims / 2].

    `context` is the engine's context length, decided once at load. Longrope picks its frequencies by it: past
    `short_context` every position uses the long list, also while a sequence is still short, because keys that
    are in the KV cache cannot be rotated anew when the sequence grows past the limit.
    """
    long = rope.short_context is not None and context > rope.short_context
    chosen = rope.long_frequencies if long and rope.long_frequencies is not None else rope.frequencies
    frequencies = np.array(chosen, np.float32)
    shape = (context, rope.dims // 2)
    cosines, sines = np.empty(shape, np.float32), np.empty(shape, np.float32)
    for start in range(0, context, _TABLE_ROWS):
        rows = slice(start, min(start + _TABLE_ROWS, context))
        positions = np.arange(rows.start, rows.stop, dtype=np.float32)
        angles = (positions[:, None] * frequencies).astype(np.float64)
        magnitude = np.float32(rope.magnitude)
        cosines[rows] = np.cos(angles).astype(np.float32) * magnitude
        sines[rows] = np.sin(angles).astype(np.float32) * magnitude
    return cosines, sines
