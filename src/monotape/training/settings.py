"""What decides the numbers of a run. Equal settings, corpus and machine give equal bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from monotape.errors import UsageError

#: How the lanes talk, as fields of config.json; docs/delayed-tensor-parallelism.md says what each means.
ARMS: dict[str, dict[str, Any]] = {
    "tp": {"broadcast_delay_modules": 0, "use_early_comm": False},
    "dtp1-scale": {"broadcast_delay_modules": 1, "use_early_comm": False},
    "dtp1-sum": {"broadcast_delay_modules": 1, "use_early_comm": True},
    "dtp2-scale": {"broadcast_delay_modules": 2, "use_early_comm": False},
    "dtp2-sum": {"broadcast_delay_modules": 2, "use_early_comm": True},
    "ladder": {"broadcast_delay_modules": 1, "ladder_residual": True, "use_early_comm": False},
    "silent": {"broadcast_delay_modules": 0, "use_comm": False, "use_early_comm": False},
}
PRECISIONS = ("bf16", "f32")


@dataclass(frozen=True, slots=True)
class Settings:
    """One run. The defaults are those of the table: 32.5M parameters, of which 8.4M are the embedding."""

    arm: str = "tp"
    lanes: int = 8
    layers: int = 8
    width: int = 512
    heads: int = 8
    ffn: int = 1280
    context: int = 1024  # tokens of a sequence
    tokens: int = 245_000_000
    batch_sequences: int = 128  # of a step
    micro_sequences: int = 64  # that are in memory at once
    seed: int = 1  # of the first weights and of the order of the sequences
    warmup_steps: int = 20
    decay_share: float = 0.4  # of the steps, at the end, over which the rate falls to 0
    matrix_rate: float = 0.02  # Muon
    matrix_decay: float = 0.1
    momentum: float = 0.95
    embedding_rate: float = 0.004  # Adam, which the gains of norms have too
    precision: str = "bf16"
    compiled: bool = True

    def __post_init__(self) -> None:
        if self.arm not in ARMS:
            raise UsageError(f"There is no arm {self.arm!r}.", f"Arms: {', '.join(ARMS)}.")
        if self.precision not in PRECISIONS:
            raise UsageError(f"precision is {self.precision!r}.", f"It can be {' or '.join(PRECISIONS)}.")
        if self.batch_sequences % self.micro_sequences:
            raise UsageError(
                f"batch_sequences is {self.batch_sequences}.",
                f"micro_sequences ({self.micro_sequences}) must divide it.",
            )
        if self.steps < 1:
            raise UsageError(f"tokens is {self.tokens:,}.", f"A step takes {self.step_tokens:,}.")

    @property
    def step_tokens(self) -> int:
        return self.batch_sequences * self.context

    @property
    def steps(self) -> int:
        return self.tokens // self.step_tokens

    @property
    def decay_start(self) -> int:
        """The first step with a falling rate: until then a longer run has the same numbers."""
        return self.steps - round(self.decay_share * self.steps)

    def rate(self, step: int) -> float:
        """The factor of all rates: up over the warm-up, constant, then in a line to 0."""
        rising = min(1.0, (step + 1) / (self.warmup_steps + 1))
        left = (self.steps - step) / max(1, self.steps - self.decay_start)
        return min(rising, left) if step >= self.decay_start else rising

    def config(self, vocabulary: int, end: int) -> dict[str, Any]:
        """The model's config.json."""
        return {
            "architectures": ["LaneformerForCausalLM"], "model_type": "laneformer", "hidden_size": self.width,
            "intermediate_size": self.ffn, "num_hidden_layers": self.layers, "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads, "vocab_size": vocabulary, "max_position_embeddings": self.context,
            "rope_theta": 10000.0, "norm_eps": 1e-5, "tie_word_embeddings": True, "num_lanes": self.lanes,
            "bos_token_id": end, "eos_token_id": end, "dtype": "bfloat16", **ARMS[self.arm],
        }  # fmt: skip

    def saved(self) -> dict[str, Any]:
        return asdict(self)


def from_saved(saved: Mapping[str, Any]) -> Settings:
    """What `saved` gave, with fields that were not there yet at their defaults."""
    known = {field.name for field in fields(Settings)}
    unknown = sorted(set(saved) - known)
    if unknown:
        raise UsageError(f"There is no setting {unknown[0]!r}.", f"Settings: {', '.join(sorted(known))}.")
    return replace(Settings(), **saved)


#: What a longer run may change when it goes on from a trunk, where the rate was still constant.
LONGER = frozenset(("tokens", "decay_share"))


def check_same(
    saved: Mapping[str, Any], wanted: Settings, where: object, may_differ: frozenset[str] = frozenset()
) -> None:
    """A run goes on with the settings that it began with, or not at all."""
    for name, value in wanted.saved().items():
        if name not in may_differ and saved.get(name) != value:
            raise UsageError(
                f"{where} was trained with {name} = {saved.get(name)}, and this run asks for {value}.",
                "Ask for the same, or give the run another folder; nothing was changed.",
            )
