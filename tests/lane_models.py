"""Small random Laneformers: a setting for every way in which lanes can share what they compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCAB = 136
_CONFIG = {
    "architectures": ["LaneformerForCausalLM"],
    "model_type": "laneformer",
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": VOCAB,
    "max_position_embeddings": 160,
    "sliding_window": 11,
    "swa_layers": [0, 1],
    "rope_theta": 10000.0,
    "norm_eps": 1e-5,
    "num_lanes": 4,
    "broadcast_delay": 1,
    "use_early_comm": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float32",
}


def config(**changes: Any) -> dict[str, Any]:
    """A config.json; a field set to None is left out."""
    return {name: value for name, value in (_CONFIG | changes).items() if value is not None}


def in_modules(delay: int) -> dict[str, Any]:
    return {"broadcast_delay": None, "broadcast_delay_modules": delay}


#: Fields that differ from the ones above, by what they are about.
SETTINGS: dict[str, dict[str, Any]] = {
    "tensor parallel": {"broadcast_delay": 0},
    "delay 1": in_modules(1),
    "delay 2": {},
    "delay 3": in_modules(3),
    "delay 4": {"broadcast_delay": 2},
    "delay 4, early sums": {"broadcast_delay": 2, "use_early_comm": True},
    "longer than the model": {"broadcast_delay": 9, "use_early_comm": True},
    "ladder": {**in_modules(1), "ladder_residual": True},
    "ladder of three": {**in_modules(3), "ladder_residual": True},
    "silent": {"use_comm": False},
    "silent but for early sums": {"use_comm": False, "use_early_comm": True},
    "attention alone": {"use_mlp_comm": False},
    "feed-forward alone, delay 1": {"use_attention_comm": False, **in_modules(1)},
    "one lane": {"num_lanes": 1},
    "two lanes": {"num_lanes": 2, "num_key_value_heads": 4},
    "eight lanes": {"num_lanes": 8},
    "summed head": {"pre_norm_lane_agg": True},
    "concatenated head": {"lm_head_type": "lane"},
    "head by vocabulary": {"lm_head_type": "vocab_parallel"},
    "norms of their own": {"replicated_rmsn_scale": False},
    "norms of their own, summed head": {"replicated_rmsn_scale": False, "pre_norm_lane_agg": True},
    "norms of their own, tensor parallel": {"replicated_rmsn_scale": False, "broadcast_delay": 0},
    "tied": {"tie_word_embeddings": True},
}


def make_laneformer(folder: Path, seed: int = 0, **changes: Any) -> Any:
    """Writes a checkpoint whose every tensor matters, and gives the PyTorch module that it came from."""
    import torch

    from monotape.training.laneformer import Laneformer

    torch.manual_seed(seed)
    model = Laneformer(config(**changes)).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            noise = torch.randn_like(tensor)
            if name.endswith(("norm.weight", "norm.scale")):
                tensor.copy_(1 + 0.3 * noise)
            elif "tok_embeddings" in name:
                tensor.copy_(0.3 * noise)
            else:
                tensor.copy_(1.2 * noise / tensor.shape[-1] ** 0.5)
    model.save(folder)
    return model
