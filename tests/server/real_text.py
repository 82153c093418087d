"""Scripted models with real tokenizers: gpt-oss's, with harmony, and Qwen3's, with its own template or Coder's tags.

A prompt that holds `say:HEX;` is answered with that text, its special tokens counted; the last one decides. The
model is `gptoss`, `qwen3` or `qwen3_coder`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

import real_tokenizers
from monotape.backends.protocol import Job, KvSequence
from monotape.engine.config import EngineConfig
from monotape.engine.llm import LLM
from monotape.engine.tokenizer import Tokenizer
from monotape.server.engine.model_source import Text
from token_source import SourceGeneration, SourceSequence, TokenSource

CONTEXT = 60_000
_SCRIPT = re.compile(r"say:([0-9a-f]*);")
#: In the shape of Qwen3-Coder's: tools and calls as tags.
CODER = """\
{%- if messages[0].role == 'system' or tools %}{{ '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}
{%- for tool in tools or [] %}{{ '\\n<function>\\n<name>' ~ tool.function.name ~ '</name>\\n</function>' }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endif %}
{%- for message in messages if message.role != 'system' %}
{{- '<|im_start|>' ~ ('user' if message.role == 'tool' else message.role) ~ '\\n' ~ message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n<function=' ~ call.function.name ~ '>\\n' }}
{%- for name, value in call.function.arguments | items %}
{{- '<parameter=' ~ name ~ '>\\n' ~ (value if value is string else value | tojson) ~ '\\n</parameter>\\n' }}
{%- endfor %}{{ '</function>\\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""


def said(text: str) -> str:
    """The words that make the model answer `text`."""
    return f"say:{text.encode().hex()};"


class RealTextBackend(TokenSource):
    """Its answers are in its prompts."""

    name = "scripted"

    def __init__(self, tokenizer: Tokenizer) -> None:
        eos = tokenizer.eos_id
        super().__init__(vocab=tokenizer.size + 64, context=CONTEXT, eos_id=eos)
        self._tokenizer, self._end = tokenizer, eos
        self._script: tuple[int, ...] = ()
        self._prompt = 0  # its length

    def _begin(self, prompt: Sequence[int]) -> None:
        found = _SCRIPT.findall(self._tokenizer.decode(list(prompt), skip_special=False))
        text = bytes.fromhex(found[-1]).decode() if found else "ok"
        assert self._end is not None
        self._script = (*self._tokenizer.encode(text, add_special=False), self._end)
        self._prompt = len(prompt)

    def answer(self, job: Job, index: int) -> int:
        return self._script[min(index, len(self._script) - 1)]

    def wait(self, generation: SourceGeneration, index: int) -> None:
        if index < 0:
            self._begin(generation.job.prompt)

    def logits(self, tokens: Sequence[int], sequence: KvSequence) -> NDArray[np.float32]:
        """The scripted token is the most likely one wherever the text so far is the script's."""
        assert isinstance(sequence, SourceSequence)
        rows = np.zeros((len(tokens), self.spec.vocab), np.float32)
        for row, token in enumerate(tokens):
            sequence.tokens.append(token)
            new = tuple(
                sequence.tokens[self._prompt + 1 :]
            )  # the last token of a prompt is left to the choice
            if new == self._script[: len(new)] and len(new) < len(self._script):
                rows[row, self._script[len(new)]] = 10
        return rows


def _text(config: EngineConfig) -> Text:
    name = "qwen3" if config.model.startswith("qwen3") else config.model
    assets = real_tokenizers.assets(name)
    template = CODER if config.model == "qwen3_coder" else assets.chat_template
    return Text(
        Tokenizer.from_assets(assets), config.chat_template or template, assets.tokenizer_config or {}
    )


def load_text(config: EngineConfig) -> Text:
    return _text(config)


def load_llm(config: EngineConfig, phase: Callable[[str], None]) -> LLM:
    text = _text(config)
    assert text.tokenizer is not None
    phase("weights")
    return LLM.from_parts(
        RealTextBackend(text.tokenizer),
        context=CONTEXT,
        tokenizer=text.tokenizer,
        chat_template=text.template,
        config=config,
    )
