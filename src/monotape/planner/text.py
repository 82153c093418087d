"""The estimate for people: fixed columns, fixed widths, the same bytes on every machine."""

from __future__ import annotations

import textwrap

from monotape.planner.box import MICRO, TIGHT, Ceiling, balance
from monotape.planner.engines import OWN_ENGINES, SUMS_PER_LAYER, Pass
from monotape.planner.estimate import Estimate
from monotape.planner.reports import measured_here

WIDTH = 110
_HEADINGS = {
    "attention": "attention", "dense_ffn": "dense FFN", "experts": "experts", "head": "head", "kv": "KV",
}  # fmt: skip


def columns(label: str, body: str, indent: int = 12) -> list[str]:
    """A label, and text beside it that is folded at a fixed width."""
    lines = textwrap.wrap(body, WIDTH - indent, break_long_words=False, break_on_hyphens=False) or [""]
    return [f"{label:<{indent}}{lines[0]}", *(" " * indent + line for line in lines[1:])]


def speed(tokens_per_second: float) -> str:
    """Three digits or more, thousands apart."""
    if tokens_per_second >= 100:
        return f"{tokens_per_second:,.0f}"
    return f"{tokens_per_second:.1f}" if tokens_per_second >= 10 else f"{tokens_per_second:.2f}"


def count(parameters: int) -> str:
    for size, unit in ((1e12, "T"), (1e9, "B")):
        if parameters >= size:
            return f"{parameters / size:.2f} {unit}"
    return f"{parameters / 1e6:.1f} M"


def gigabytes(size: float) -> str:
    return f"{size / 1e9:,.2f} GB" if size >= 1e7 else f"{size / 1e6:.2f} MB"


def duration(seconds: float) -> str:
    """500 s is 8 min 20 s; a duration under a minute has three digits."""
    if seconds >= 60:
        whole = int(seconds + 0.5)
        hours, minutes = whole // 3600, whole % 3600 // 60
        return f"{hours} h {minutes} min" if hours else f"{minutes} min {whole % 60} s"
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"


def describe(found: Estimate) -> str:
    """The whole estimate."""
    sections = (_title, _weights, _bytes, _ceilings, _memory, _launches, _links, _prediction)
    return "\n".join(line for section in sections for line in section(found)) + "\n"


def _title(found: Estimate) -> list[str]:
    return [f"{found.source.name} on {found.box.name}, context {found.context:,}, one user", ""]


def _weights(found: Estimate) -> list[str]:
    shape, load = found.shape, found.load
    lines = columns(
        "weights",
        f"{count(shape.total)} parameters, {count(shape.active)} of them read for a token;"
        f" {gigabytes(load.weight_bytes)}",
    )
    lines += columns("", f"precision: {load.precision.note}; KV at {8 * load.kv_value_bytes:g} bits")
    lines += columns("", f"config: {found.source.origin}")
    for note in shape.notes:
        lines += columns("", note)
    return [*lines, ""]


def _bytes(found: Estimate) -> list[str]:
    total = found.token_bytes
    rows = [(_HEADINGS[name], size) for name, size in found.bytes_by_group.items() if size]
    lines = ["a token reads"]
    lines += [f"  {name:<11}{size / 1e9:>10.4f} GB {100 * size / total:>6.1f} %" for name, size in rows]
    return [*lines, f"  {'total':<11}{total / 1e9:>10.4f} GB", ""]


def _ceilings(found: Estimate) -> list[str]:
    lines = ["ceiling          TB/s      tok/s"]
    for one in found.ceilings:
        lines += columns(
            f"  {one.name:<10}{one.terabytes_per_second:>9.3f}{speed(one.tokens_per_second):>11}  ",
            one.source,
            34,
        )
    if all(one.name != "measured" for one in found.ceilings):
        lines += columns("  measured", "nobody of this project measured this device: give --bandwidth", 34)
    devices = [
        f"{value:.0f} ({name})"
        for name, value in (("BF16", balance(found.box)), ("FP8", balance(found.box, fp8=True)))
        if value
    ]
    does = f"; the device can do {' or '.join(devices)} in that time" if devices else ""
    lines += columns("", f"{found.flops_per_byte:.1f} FLOP a byte read{does}: memory is the bound", 34)
    return [*lines, ""]


def _memory(found: Estimate) -> list[str]:
    room = found.fit
    body = f"{gigabytes(room.weights)} of weights and {gigabytes(room.kv)} of KV on each device"
    if room.memory is None or room.share is None:
        return [*columns("memory", body + "; give --memory to see whether they fit"), ""]
    verdict = "DOES NOT FIT" if not room.fits else "fits, but hardly" if room.share > TIGHT else "fits"
    body += f", {100 * room.share:.1f} % of its {room.memory / 1e9:g} GB: {verdict}"
    if not room.fits:
        body += f"; {found.load.weight_bytes / room.memory:.1f} devices would hold the weights alone"
        body += "; no engine can reach the ceilings above with what is here"
    return [*columns("memory", body), ""]


def _launches(found: Estimate) -> list[str]:
    if found.fit.fits is False:
        return []
    if not found.launch_taxes:
        return [*columns("launch tax", found.box.gpu.launch_source), ""]
    lines: list[str] = []
    for tax in found.launch_taxes:
        body = (
            f"{tax.kernels_per_layer} kernels a layer x {tax.layers} layers x {tax.launch_us:g} us ="
            f" {tax.token_us:,.0f} us a token: at most {speed(tax.most_tokens_per_second)} tok/s before a byte is read"
            f" ({tax.where})"
        )
        lines += columns("" if lines else "launch tax", body)
    return [*lines, ""]


def _links(found: Estimate) -> list[str]:
    if found.box.count == 1 or found.fit.fits is False:
        return []
    each, source = found.box.link
    if each is None:
        return [*columns("links", source), ""]
    layers = len(found.shape.layers)
    total = SUMS_PER_LAYER * layers * each
    body = (
        f"{SUMS_PER_LAYER} sums a layer x {layers} layers x {each:g} us = {total:,.0f} us a token ({source})"
    )
    return [*columns("links", body), ""]


def _prediction(found: Estimate) -> list[str]:
    if found.fit.fits is False:
        body = "none: the model does not fit. Give --count, or a smaller --dtype"
        return columns("prediction", body) + (columns("", _obstacles(found)) if found.obstacles else [])
    lines = columns("prediction", _obstacles(found)) if found.obstacles else []
    label = "" if lines else "prediction"
    prediction = found.prediction
    if prediction is None:
        return lines + columns(label, "none without --link-us, the time of one small sum over all devices")
    lines += columns(label, f"{found.engine.title}: {_speeds(found, prediction)}")
    if prediction.link_us:
        hidden = 1 / ((prediction.stream_us + prediction.exposed_us) * MICRO)
        lines += columns(
            "", f"if every sum hides behind streaming (delayed tensor parallelism): {speed(hidden)} tok/s"
        )
    lines += columns("", f"assumption: {found.engine.assumption(found.load, found.box)}")
    return lines + _measured(found)


def _obstacles(found: Estimate) -> str:
    return f"Monotape does not run this: {'; '.join(found.obstacles)}"


def _speeds(found: Estimate, prediction: Pass) -> str:
    parts = f"{prediction.stream_us:,.0f} us streaming + {prediction.exposed_us:,.0f} us not hidden"
    if prediction.link_us:
        parts += f" + {prediction.link_us:,.0f} us links"
    rate = 1 / (prediction.total_us * MICRO)
    return f"{speed(rate)} tok/s, {_share(rate, found.ceilings[-1])}; {parts}"


def _measured(found: Estimate) -> list[str]:
    """What the prediction is worth: the speeds that were measured of this model, where there are any."""
    if found.engine.name not in OWN_ENGINES or found.obstacles:
        return []
    points = measured_here(found.box, found.source.name, found.load.precision.name)
    if not points:
        return columns("", "measured: not yet, this model on this device")
    shown = ", ".join(
        f"{speed(point.tokens_per_second)} tok/s at a context of {point.context:,} ({100 * point.share:.0f} %)"
        for point in points
    )
    return columns("", f"measured: {shown}; {', '.join(dict.fromkeys(point.source for point in points))}")


def _share(rate: float, ceiling: Ceiling) -> str:
    return f"{100 * rate / ceiling.tokens_per_second:.0f} % of the {ceiling.name} ceiling"
