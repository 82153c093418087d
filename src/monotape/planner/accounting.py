"""From a config.json to a ModelShape: every parameter counted by part, layer by layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from monotape.errors import ModelError, UnsupportedModel, nearest
from monotape.models.dense import MAX_VOCAB, MAX_WIDTH
from monotape.models.registry import architecture_of
from monotape.planner.attention import MAX_WINDOW
from monotape.planner.config_fields import ConfigFields
from monotape.planner.families import FAMILIES, Family, layer_count
from monotape.planner.shape import ATTENTION, EMBEDDING, HEAD, Layer, ModelShape, Part

#: Parts that a checkpoint may carry beside the text model, by the field that declares them.
_BESIDE = {
    "num_nextn_predict_layers": "the prediction (MTP) layer",
    "mtp_num_hidden_layers": "the prediction (MTP) layer",
    "num_mtp_modules": "the prediction (MTP) modules",
}


def shape_from_config(config: Mapping[str, Any]) -> ModelShape:
    """What a config.json describes. Raises UnsupportedModel, by name, for an architecture that no row describes."""
    architecture = _known(architecture_of(config))
    outer = ConfigFields(config)
    family = FAMILIES[architecture]
    fields = outer.inner("text_config") if outer.has("text_config") else outer
    layers = tuple(_layer(family, fields, number) for number in range(layer_count(fields)))
    return ModelShape(
        architecture=architecture,
        layers=layers,
        parts=_outside(family, fields, _tied(outer, fields, family)),
        width=fields.integer("hidden_size", 1, MAX_WIDTH),
        context=fields.optional_integer("max_position_embeddings", 1, MAX_WINDOW),
        notes=_notes(outer, fields),
        heads=family.heads(fields),
    )


def _known(name: str | None) -> str:
    if name is None:
        raise ModelError(
            "config.json names no architecture.",
            "The planner counts by it; add the field architectures with one name.",
        )
    if name not in FAMILIES:
        raise UnsupportedModel(
            f"The planner cannot count the architecture {name}; the nearest it knows is"
            f" {nearest(name, FAMILIES)}.",
            f"It knows {', '.join(sorted(FAMILIES))}.",
        )
    return name


def _layer(family: Family, fields: ConfigFields, number: int) -> Layer:
    attention = family.attention(fields, number)
    block = family.feedforward(fields, number)
    norm = fields.integer("hidden_size", 1, MAX_WIDTH) * family.norm_values
    after = family.norms // 2 * norm  # half of a layer's norms belong to each of its two blocks
    before = (family.norms - family.norms // 2) * norm + family.layer_vectors(fields)
    first, *rest = block.parts
    return Layer(
        parts=(
            Part(ATTENTION, attention.matrices, attention.vectors + before),
            dataclasses.replace(first, vectors=first.vectors + after),
            *rest,
        ),
        caches=attention.caches,
        stages=attention.stages + block.stages,
        score_flops=attention.score_flops,
    )


def _outside(family: Family, fields: ConfigFields, tied: bool) -> tuple[Part, ...]:
    """Embedding and head. A tied table is stored once and read whole, as the head."""
    width = fields.integer("hidden_size", 1, MAX_WIDTH)
    vocab = fields.integer("vocab_size", 1, MAX_VOCAB)
    vectors = width * family.norm_values + family.model_vectors(fields)
    head = Part(HEAD, vocab * width, vectors)
    return (head,) if tied else (Part(EMBEDDING, width, copies=vocab), head)


def _tied(outer: ConfigFields, fields: ConfigFields, family: Family) -> bool:
    place = fields if fields.has("tie_word_embeddings") else outer
    return place.flag("tie_word_embeddings", family.tied)


def _notes(outer: ConfigFields, fields: ConfigFields) -> tuple[str, ...]:
    found = [
        f"not counted: {what} of the checkpoint"
        for name, what in _BESIDE.items()
        if fields.optional_integer(name, 0, 64, 0)
    ]
    if outer.has("vision_config"):
        found.append("not counted: the vision tower of the checkpoint")
    return tuple(found)
