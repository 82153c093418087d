"""How fast a run is: tokens a second, and the share of the device's arithmetic that they use."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from monotape.training.settings import Settings

#: Dense bf16 products with float32 sums, operations a second, by a part of the device's name: vendors' figures.
PEAKS = {"H200": 989.5e12, "H100": 989.5e12, "A100": 312e12}


def flops_per_token(settings: Settings, vocabulary: int) -> float:
    """Multiplications and additions that training on one token needs, whatever the arm: 6 a weight, and attention."""
    layer = 4 * settings.width**2 + 3 * settings.width * settings.ffn
    weights = settings.layers * layer + vocabulary * settings.width
    attention = settings.layers * 6 * settings.width * settings.context  # each token sees half a sequence
    return 6.0 * weights + attention


def peak_of(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAKS.items() if part in name), None)


@dataclass(frozen=True, slots=True)
class Speed:
    tokens_per_second: float
    flops: float  # a second
    utilisation: float | None

    @classmethod
    def of(
        cls, tokens: int, seconds: float, settings: Settings, vocabulary: int, peak: float | None
    ) -> Speed:
        rate = tokens / seconds if seconds else 0.0
        flops = rate * flops_per_token(settings, vocabulary)
        return cls(rate, flops, flops / peak if peak else None)

    def text(self) -> str:
        used = (
            f"MFU {100 * self.utilisation:.1f} %"
            if self.utilisation is not None
            else f"{self.flops / 1e12:.3f} TFLOP/s"
        )
        rate = self.tokens_per_second
        return f"{rate / 1e6:.2f}M tok/s, {used}" if rate >= 1e5 else f"{rate:,.0f} tok/s, {used}"


def progress_line(settings: Settings, step: int, loss: float, rate: float, speed: Speed) -> str:
    """One line: step, tokens, loss, rate, speed and what is left."""
    left = (
        (settings.steps - step) * settings.step_tokens / speed.tokens_per_second
        if speed.tokens_per_second
        else 0.0
    )
    return (
        f"step {step}/{settings.steps}, {step * settings.step_tokens / 1e6:.1f}M tokens, loss {loss:.4f}, "
        f"rate x{rate:.2f}, {speed.text()}, {int(left) // 60}:{int(left) % 60:02d} left"
    )
