"""Which family describes which model: from the architecture that a config.json names to a ModelSpec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from monotape.errors import ModelError, UnsupportedModel, nearest
from monotape.models.dense import Family
from monotape.models.fields import shown
from monotape.models.gpt_oss import GPT_OSS
from monotape.models.laneformer import LANEFORMER, LANEFORMER_TP, Laneformer
from monotape.models.llama import LLAMA
from monotape.models.mistral import MISTRAL
from monotape.models.mixtral import MIXTRAL
from monotape.models.phi3 import PHI3
from monotape.models.qwen2 import QWEN2
from monotape.models.qwen3 import QWEN3
from monotape.models.qwen3_moe import QWEN3_MOE
from monotape.models.spec import ModelSpec

FAMILIES: Mapping[str, Family | Laneformer] = {
    family.architecture: family
    for family in (
        LLAMA, MISTRAL, QWEN2, QWEN3, PHI3, GPT_OSS, QWEN3_MOE, MIXTRAL, LANEFORMER, LANEFORMER_TP,
    )
}  # fmt: skip
_OTHER_FILE = "The file is damaged or not a model's; fetch the model again."
_NEEDED = 'It needs a field like "architectures": ["LlamaForCausalLM"].'
_BY_TYPE: Mapping[str, Family | Laneformer] = {family.name: family for family in FAMILIES.values()}


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """The ModelSpec of a config.json. Raises UnsupportedModel, by name, where no family file describes it."""
    return _family(config).spec(config)


def _family(config: Mapping[str, Any]) -> Family | Laneformer:
    """By architecture; a file without one is known by its model_type."""
    name, known = architecture_of(config), FAMILIES
    if name is None:
        name, known = config.get("model_type"), _BY_TYPE
    if type(name) is not str:
        raise ModelError("config.json names no architecture.", _NEEDED)
    if name not in known:
        raise UnsupportedModel(
            f"The architecture {name} is not supported; the nearest that is: {nearest(name, known)}.",
            f"Supported: {', '.join(FAMILIES)}.",
        )
    return known[name]


def architecture_of(config: Mapping[str, Any]) -> str | None:
    """The architecture that a config.json names, known here or not; None where it names none."""
    if not isinstance(config, Mapping):
        raise ModelError(f"config.json holds {shown(config)}, but must hold an object.", _OTHER_FILE)
    names = config.get("architectures")
    if names in (None, []):
        return None
    if not isinstance(names, list | tuple) or len(names) != 1 or type(names[0]) is not str:
        raise ModelError(f"config.json: architectures is {shown(names)}, but must list one name.", _NEEDED)
    return names[0]
