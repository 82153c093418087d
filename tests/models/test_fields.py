"""models/fields.py: what a strict reader accepts, and the sentence with which it refuses the rest."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from monotape.errors import ModelError, UnsupportedModel
from monotape.models.fields import Fields


@pytest.mark.parametrize("value", [True, "64", 64.0, 0, -3, 1001, 10**30, None, [64]])
def test_integer_refuses_what_is_no_integer_in_range(value: Any) -> None:
    with pytest.raises(ModelError, match=r"size is .* must be an integer from 1 to 1000"):
        Fields({"size": value}).integer("size", 1, 1000)


def test_integer_takes_both_ends_and_the_default() -> None:
    fields = Fields({"low": 1, "high": 1000})
    assert [fields.integer(name, 1, 1000, 7) for name in ("low", "high", "absent")] == [1, 1000, 7]


def test_absent_field_without_default_is_named() -> None:
    with pytest.raises(ModelError, match=r"config\.json has no field hidden_size"):
        Fields({}).integer("hidden_size", 1, 10)


@pytest.mark.parametrize("value", [False, "1e-5", math.nan, math.inf, 0, -1.0, 2.0, 10**400])
def test_number_refuses_what_is_no_number_in_range(value: Any) -> None:
    with pytest.raises(ModelError, match=r"eps is .* must be a number above 0 and at most 1"):
        Fields({"eps": value}).number("eps", 0, 1)


@pytest.mark.parametrize("value", [0, 1, "true", None])
def test_flag_takes_booleans_only(value: Any) -> None:
    with pytest.raises(ModelError, match=r"tied is .* must be true or false"):
        Fields({"tied": value}).flag("tied", False)


@pytest.mark.parametrize(("value", "ids"), [(None, ()), (5, (5,)), ([5, 0], (5, 0)), ([], ())])
def test_ids_are_one_or_many_or_none(value: Any, ids: tuple[int, ...]) -> None:
    assert Fields({"eos": value}).ids("eos", 6) == ids


@pytest.mark.parametrize("value", [6, -1, True, "5", [1, 6], [1, None], 1.0])
def test_ids_outside_the_vocabulary_are_refused(value: Any) -> None:
    with pytest.raises(ModelError, match=r"eos is .* integers from 0 to 5"):
        Fields({"eos": value}).ids("eos", 6)


@pytest.mark.parametrize("value", [[1.0, 2.0, 3.0], [1.0], "ab", None, 3])
def test_numbers_must_be_as_many_as_needed(value: Any) -> None:
    with pytest.raises(ModelError, match="factors must list 2 numbers"):
        Fields({"factors": value}).numbers("factors", 2)


@pytest.mark.parametrize("value", [[1.0, 0.0], [1.0, -1], [1.0, math.inf], [1.0, True], [1.0, "2"]])
def test_numbers_must_be_positive(value: Any) -> None:
    with pytest.raises(ModelError, match="positive numbers only"):
        Fields({"factors": value}).numbers("factors", 2)


def test_fixed_fields_are_refused_with_name_value_and_what_is_supported() -> None:
    accepted = {"bias": (False,)}
    for harmless in ({}, {"bias": False}, {"bias": None}):
        Fields(harmless).fixed(accepted, "LlamaForCausalLM")
    for value in (True, 0):  # 0 == False in Python, but not in a config
        with pytest.raises(UnsupportedModel, match=r"bias = (true|0).*LlamaForCausalLM.*Supported: false"):
            Fields({"bias": value}).fixed(accepted, "LlamaForCausalLM")


def test_finish_refuses_an_unread_field_and_names_the_nearest() -> None:
    fields = Fields({"hidden_size": 3, "hiden_size": 4, "prefix": "x", "unset": None})
    fields.integer("hidden_size", 1, 9)
    with pytest.raises(UnsupportedModel, match=r"hiden_size = 4.*nearest known field is hidden_size"):
        fields.finish("llama", frozenset({"prefix"}))


def test_long_values_are_cut() -> None:
    fields = Fields({"vocab_size": 3, "experts": {"of_layer": list(range(500))}})
    fields.integer("vocab_size", 1, 9)
    with pytest.raises(UnsupportedModel) as caught:
        fields.finish("llama")
    assert len(caught.value.message) < 200


def test_notes_are_collected() -> None:
    fields = Fields({"_monotape_notes": ["one", "two"], "_monotape_notes_rope": "three"})
    assert fields.notes() == ("one", "two", "three")
    fields.finish("llama")
    with pytest.raises(ModelError, match="_monotape_notes is 3"):
        Fields({"_monotape_notes": 3}).notes()


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda fields: fields.table("a"), "a is 3, but must be an object"),
        (lambda fields: fields.optional_text("a"), "a is 3, but must be a string"),
        (lambda fields: fields.texts("a", 2), "a is 3, but must be a list of strings"),
        (lambda fields: fields.texts("b", 2), "b lists 1 layers, but there are 2"),
    ],
)
def test_wrong_shapes_are_named(read: Callable[[Fields], Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read(Fields({"a": 3, "b": ["x"]}))


def test_nested_fields_are_named_with_their_path() -> None:
    inner = Fields({"rope_scaling": {"factor": "2"}}).table("rope_scaling")
    assert inner is not None
    with pytest.raises(ModelError, match=r"rope_scaling\.factor is \"2\""):
        inner.number("factor", 0, 10)
