"""A strict reader of a config.json: each field is read with type and range, known as harmless or an error."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from monotape.errors import ModelError, UnsupportedModel, nearest

NOTES = "_monotape_notes"  # a loader that had to choose something says so under keys with this prefix

#: Fields that say nothing about the numbers of a forward pass, whatever their value.
HARMLESS = frozenset((
    # what it is (read by the registry), where it comes from and who wrote it; remote code is never run
    "architectures", "transformers_version", "_name_or_path", "name_or_path", "_commit_hash", "auto_map",
    "transformers.js_config", "unsloth_version", "unsloth_fixed", "is_llama_config", "tokenizer_class",
    # training, and the way in which others carry out the forward pass
    "attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "classifier_dropout",
    "initializer_range", "gradient_checkpointing", "use_cache", "chunk_size_feed_forward", "torchscript",
    "use_bfloat16", "tf_legacy_loss", "return_dict", "is_decoder", "output_attentions",
    "output_hidden_states", "_attn_implementation", "attn_implementation", "_attn_implementation_autoset",
    "max_sequence_length", "output_router_logits", "router_aux_loss_coef", "router_jitter_noise",
    # heads for other tasks
    "id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params",
    # old files keep generation defaults here; a request brings its own
    "max_length", "min_length", "max_new_tokens", "min_new_tokens", "do_sample", "early_stopping",
    "num_beams", "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p", "typical_p",
    "length_penalty", "repetition_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size",
    "bad_words_ids", "num_return_sequences", "output_scores", "return_dict_in_generate",
    "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty",
    "suppress_tokens", "begin_suppress_tokens", "decoder_start_token_id", "sep_token_id", "prefix",
))  # fmt: skip

#: Fields that every family accepts with these values only: others would change what the model computes.
FIXED: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "pretraining_tp": (1,),
    "is_encoder_decoder": (False,),
    "is_causal": (True,),
    "add_cross_attention": (False,),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({},),
    "per_layer_config": ({},),
    "lm_head_bias": (False,),
    "mlp_bias": (False,),
    "rope_interleaved": (False,),
    "use_mrope": (False,),
    "quantization_config": (None,),
}

_ABSENT = object()


def shown(value: Any) -> str:
    """A value as the file has it, cut to what fits in a sentence."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _is_flag(value: Any) -> bool:
    """Equal and of the same type: Python has 1 == True, a config file has not."""
    return isinstance(value, bool)


class Fields:
    """The fields of one JSON object. A getter marks its field as used; `finish` refuses the unused ones."""

    def __init__(self, values: Mapping[str, Any], where: str = "config.json", prefix: str = "") -> None:
        self._values = values
        self._where = where
        self._prefix = prefix
        self._used: set[str] = set()

    def same_as(self, other: Fields) -> bool:
        return self._values == other._values

    def wrong(self, name: str, rule: str) -> ModelError:
        """The error for a field whose value breaks `rule`."""
        label, value = self.label(name), shown(self._values.get(name))
        return ModelError(f"{self._where}: {label} is {value}, but {rule}.", "The file is damaged or edited.")

    def says(self, name: str) -> str:
        return f"{self._where} says {self.label(name)} = {shown(self._values.get(name))}"

    def label(self, name: str) -> str:
        return self._prefix + name

    def _take(self, name: str, default: Any) -> Any:
        self._used.add(name)
        value = self._values.get(name, default)
        if value is _ABSENT:
            raise ModelError(
                f"{self._where} has no field {self.label(name)}.",
                "The family needs it; is the file complete?",
            )
        return value

    def integer(self, name: str, low: int, high: int, default: Any = _ABSENT) -> int:
        """An integer from `low` to `high`. Booleans, strings and 4096.0 are none."""
        value = self._take(name, default)
        if type(value) is not int or not low <= value <= high:
            raise self.wrong(name, f"must be an integer from {low} to {high}")
        return value

    def optional_integer(self, name: str, low: int, high: int, default: int | None = None) -> int | None:
        """An integer, or None where the file says null; `default` where it says nothing."""
        return None if self._take(name, default) is None else self.integer(name, low, high, default)

    def number(self, name: str, above: float, high: float, default: Any = _ABSENT) -> float:
        """A finite number in (above, high]."""
        value = self._take(name, default)
        if type(value) not in (int, float) or not above < value <= high:
            raise self.wrong(name, f"must be a number above {above:g} and at most {high:g}")
        return float(value)

    def optional_number(self, name: str, above: float, high: float) -> float | None:
        return None if self._take(name, None) is None else self.number(name, above, high)

    def flag(self, name: str, default: bool) -> bool:
        value = self._take(name, default)
        if type(value) is not bool:
            raise self.wrong(name, "must be true or false")
        return value

    def optional_text(self, name: str) -> str | None:
        value = self._take(name, None)
        if value is not None and type(value) is not str:
            raise self.wrong(name, "must be a string")
        return value

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        """Exactly `count` positive finite numbers."""
        value = self._take(name, _ABSENT)
        if not isinstance(value, list | tuple) or len(value) != count:
            size = f"has {len(value)}" if isinstance(value, list | tuple) else "is no list"
            raise ModelError(
                f"{self._where}: {self.label(name)} must list {count} numbers, but it {size}.",
                "The config contradicts itself; fetch it again.",
            )
        if any(type(item) not in (int, float) or not 0 < item < math.inf for item in value):
            raise self.wrong(name, "must hold positive numbers only")
        return tuple(float(item) for item in value)

    def integers(self, name: str, low: int, high: int) -> tuple[int, ...] | None:
        """A list of integers from `low` to `high`, or None where the file gives none."""
        value = self._take(name, None)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or any(
            type(item) is not int or not low <= item <= high for item in value
        ):
            raise self.wrong(name, f"must be a list of integers from {low} to {high}")
        return tuple(value)

    def anything(self, name: str) -> Any:
        """The value as it is, which the caller checks; None where the file gives none."""
        return self._take(name, None)

    def names(self, name: str) -> tuple[str, ...] | None:
        """A list of strings, or None where the file gives none."""
        value = self._take(name, None)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or any(type(item) is not str for item in value):
            raise self.wrong(name, "must be a list of strings")
        return tuple(value)

    def texts(self, name: str, count: int) -> tuple[str, ...] | None:
        """A list of exactly `count` strings, or None where the file gives none."""
        value = self.names(name)
        if value is not None and len(value) != count:
            raise ModelError(
                f"{self._where}: {self.label(name)} lists {len(value)} layers, but there are {count}."
            )
        return value

    def keys(self) -> tuple[str, ...]:
        """The names of all fields, for an object whose names mean something; each still has to be read."""
        return tuple(self._values)

    def ids(self, name: str, vocab: int, low: int = 0) -> tuple[int, ...]:
        """One token id, a list of them, or none."""
        value = self._take(name, None)
        items = [] if value is None else value if isinstance(value, list | tuple) else [value]
        if any(type(item) is not int or not low <= item < vocab for item in items):
            raise self.wrong(name, f"token ids must be integers from {low} to {vocab - 1}")
        return tuple(items)

    def table(self, name: str) -> Fields | None:
        """A nested object, read as strictly as this one."""
        value = self._take(name, None)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.wrong(name, "must be an object")
        return Fields(value, self._where, f"{self.label(name)}.")

    def notes(self) -> tuple[str, ...]:
        """What a loader wants the user to know: texts, or lists of them, under keys that begin with NOTES."""
        found: list[str] = []
        for name in self._values:
            if name.startswith(NOTES):
                value = self._take(name, None)
                items = value if isinstance(value, list | tuple) else [value]
                if any(type(item) is not str for item in items):
                    raise self.wrong(name, "must be text")
                found.extend(items)
        return tuple(found)

    def fixed(self, accepted: Mapping[str, tuple[Any, ...]], reader: str) -> None:
        """Accepts each of these fields with one of its listed values, or null; refuses any other by name."""
        for name, values in accepted.items():
            value = self._take(name, None)
            if value is None or any(value == v and _is_flag(value) == _is_flag(v) for v in values):
                continue
            raise UnsupportedModel(
                f"{self.says(name)}, which is not supported for {reader}.",
                f"Supported: {' or '.join(shown(v) for v in values)}.",
            )

    def finish(self, reader: str, harmless: frozenset[str] = frozenset()) -> None:
        """Refuses every field that no getter read; a null counts as absent."""
        for name, value in self._values.items():
            if name in self._used or name in harmless or value is None:
                continue
            close = nearest(name, self._used)
            raise UnsupportedModel(
                f"{self.says(name)}, a field that {reader} does not know.",
                f"It may change the results, so it is not ignored. The nearest known field is {close}.",
            )
