"""The Python API: a model that answers prompts and conversations, in the shape of vLLM's LLM class."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

from monotape.backends.protocol import Backend
from monotape.engine.chat_prompts import ChatPrompts
from monotape.engine.chat_template import ChatTemplate, Message, Rendering, RenderingArguments, read_template
from monotape.engine.config import EngineConfig, check_unknown, with_model
from monotape.engine.defaults import DefaultSampling, default_sampling, end_of_text_ids
from monotape.engine.drafts import Drafts, PredictionLike, make_prediction
from monotape.engine.incremental import IncrementalEncoder
from monotape.engine.kv_pool import KvPool
from monotape.engine.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from monotape.engine.progress import progress_bar
from monotape.engine.prompts import Prompt, PromptLike, make_prompt, split_prompts
from monotape.engine.request import Request, room_for
from monotape.engine.sampling_params import SEED_BITS, SamplingParams
from monotape.engine.stream import TextStream
from monotape.engine.tokenizer import Tokenizer
from monotape.engine.turnstile import Turnstile
from monotape.engine.wake import wake
from monotape.errors import RequestError, UsageError

if TYPE_CHECKING:
    from monotape.engine.constraint import Constraint

_DEFAULT = EngineConfig()
Params = SamplingParams | Sequence[SamplingParams] | None
Predictions = str | Sequence[str | None] | None


class LLM:
    """A loaded model. Requests run one at a time, from any thread; `close()` or `with` frees its memory."""

    def __init__(
        self,
        model: str = _DEFAULT.model,
        *,
        backend: str = _DEFAULT.backend,
        dtype: str = _DEFAULT.dtype,
        head_dtype: str = _DEFAULT.head_dtype,
        kv_dtype: str = _DEFAULT.kv_dtype,
        max_model_len: int | None = _DEFAULT.max_model_len,
        workers: int | None = _DEFAULT.workers,
        tp: int | None = _DEFAULT.tp,
        emulate_ranks: bool = _DEFAULT.emulate_ranks,
        speculation: bool = _DEFAULT.speculation,
        seed: int | None = _DEFAULT.seed,
        chat_template: str | None = _DEFAULT.chat_template,
        max_sequences: int = _DEFAULT.max_sequences,
        kv_bytes: int | None = _DEFAULT.kv_bytes,
        progress: bool = _DEFAULT.progress,
        **others: Any,
    ) -> None:
        check_unknown(others, tuple(field.name for field in dataclasses.fields(EngineConfig)))
        config = EngineConfig(
            model=str(model), backend=backend, dtype=dtype, head_dtype=head_dtype, kv_dtype=kv_dtype,
            max_model_len=max_model_len, workers=workers, tp=tp, emulate_ranks=emulate_ranks,
            speculation=speculation, seed=seed, chat_template=chat_template, max_sequences=max_sequences,
            kv_bytes=kv_bytes, progress=progress,
        )  # fmt: skip
        wake(config)
        config = with_model(config)
        from monotape.engine.startup import load

        loaded = load(config)
        config = dataclasses.replace(config, kv_bytes=loaded.kv_budget)
        self._set_up(
            config, loaded.backend, loaded.tokenizer, loaded.chat_template, loaded.generation_config,
            loaded.context, loaded.sampling, loaded.source,
        )  # fmt: skip

    @classmethod
    def from_config(cls, config: EngineConfig) -> LLM:
        """The same, from one object; the command line's way."""
        return cls(**{field.name: getattr(config, field.name) for field in dataclasses.fields(config)})

    @classmethod
    def from_parts(
        cls,
        backend: Backend,
        *,
        context: int,
        tokenizer: Tokenizer | None = None,
        chat_template: str | None = None,
        generation_config: Mapping[str, Any] | None = None,
        config: EngineConfig = _DEFAULT,
        sampling: DefaultSampling | None = None,
        source: str | None = None,
    ) -> LLM:
        """Around a backend that is already there."""
        made = cls.__new__(cls)
        made._set_up(
            config, backend, tokenizer, chat_template, generation_config or {}, context, sampling, source
        )
        return made

    def _set_up(
        self,
        config: EngineConfig,
        backend: Backend,
        tokenizer: Tokenizer | None,
        template: str | None,
        generation_config: Mapping[str, Any],
        context: int,
        sampling: DefaultSampling | None,
        source: str | None,
    ) -> None:
        self.config, self.backend, self.tokenizer, self.max_model_len = config, backend, tokenizer, context
        chosen = read_template(config.chat_template) if config.chat_template else template
        named_tokens = tokenizer.named_tokens if tokenizer is not None else {}
        self.chat_template = ChatTemplate(chosen, named_tokens)
        self._encoder = None if tokenizer is None else IncrementalEncoder(tokenizer)
        self._chats = ChatPrompts(
            self.chat_template, self._encoder, backend.spec.vocab, own_template=not config.chat_template
        )
        self._pool = KvPool(
            backend.new_sequence, max_sequences=config.max_sequences, max_bytes=config.kv_budget
        )
        self._turnstile = Turnstile()
        self._process = os.getpid()
        self._request_ids = itertools.count()
        self._seeds = random.Random(config.seed) if config.seed is not None else random.SystemRandom()
        self._latest: Callable[[], TextStream | None] = lambda: None
        self._closing = self._closed = False
        self.eos_ids = end_of_text_ids(backend.spec, generation_config, tokenizer)
        self.default_sampling = sampling or default_sampling(generation_config, (config.model,))
        self.source = source  # the file or folder that was loaded: a name alone may stand for several

    @property
    def default_sampling_params(self) -> SamplingParams:
        return self.default_sampling.params

    def get_default_sampling_params(self) -> SamplingParams:
        """What a request without parameters gets; `default_sampling.source` says where it comes from."""
        return self.default_sampling_params

    @property
    def has_chat_template(self) -> bool:
        return self._chats.can_chat

    def get_tokenizer(self) -> Tokenizer | None:
        return self.tokenizer

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: Params = None,
        *,
        prediction: Predictions = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continues each prompt. All are checked before the first one runs; `use_tqdm` shows progress.

        `prediction`: a text that the answer will repeat in large parts, or one for each prompt. It changes the speed
        where the backend checks drafts, never the answer.
        """
        given = [
            make_prompt(prompt, self._encoder, self.backend.spec.vocab) for prompt in split_prompts(prompts)
        ]
        return self._run_all(given, self._params_for(sampling_params, len(given)), prediction, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        *,
        prediction: Predictions = None,
        use_tqdm: bool = True,
        **rendering: Unpack[RenderingArguments],
    ) -> list[RequestOutput]:
        """Answers one conversation or several. Without params an answer may take the rest of the context.
        `prediction` as in generate().

        `rendering`: tools, add_generation_prompt, continue_final_message, chat_template, chat_template_kwargs.

        Of a model with channels (gpt-oss) `text` is what it says; `reasoning` and `tool_calls` stand beside it. With
        skip_special_tokens off, `text` is everything, marks included.
        """
        several = bool(messages) and not isinstance(messages[0], Mapping)
        conversations: Any = messages if several else [messages]
        form = Rendering.of(rendering)
        given = [self._chats.prompt(conversation, form) for conversation in conversations]
        chosen = self._chat_params if sampling_params is None else sampling_params
        return self._run_all(given, self._params_for(chosen, len(given)), prediction, use_tqdm)

    def stream(
        self,
        prompt: PromptLike,
        sampling_params: SamplingParams | None = None,
        *,
        index: int = 0,
        constraint: Constraint | None = None,
        special_mark: str = "",
        prediction: PredictionLike | None = None,
        speculation: bool = True,
    ) -> TextStream:
        """Starts one prompt; iterating gives its text as it comes. A constraint says which tokens may come.

        `prediction` as in generate(), or its token ids; without `speculation` this request has no drafts.

        `index` makes it one of several completions of the prompt: each but the first has the next seed. `special_mark`
        is written before the text of each special token, where those are not skipped.
        """
        prompts = split_prompts(prompt)
        if len(prompts) != 1:
            raise RequestError(f"stream() was given {len(prompts)} prompts.", "It takes one; use generate().")
        checked = make_prompt(prompts[0], self._encoder, self.backend.spec.vocab)
        (params,) = self._params_for(sampling_params, 1)
        drafts = self._drafts(prediction, speculation)
        return self._stream(checked, params, index, constraint, special_mark, drafts)

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        prediction: PredictionLike | None = None,
        speculation: bool = True,
        **rendering: Unpack[RenderingArguments],
    ) -> TextStream:
        """Starts the answer to one conversation; the arguments are chat()'s, and stream()'s `speculation`."""
        prompt = self._chats.prompt(messages, Rendering.of(rendering))
        (params,) = self._params_for(self._chat_params if sampling_params is None else sampling_params, 1)
        drafts = self._drafts(prediction, speculation)
        return self._stream(prompt, params, drafts=drafts)

    def render_chat(self, messages: Sequence[Message], **rendering: Unpack[RenderingArguments]) -> str:
        """The prompt that a conversation becomes; the arguments are chat()'s."""
        return self._chats.text(messages, Rendering.of(rendering))

    def trim_kv(self) -> None:
        """Gives back what the latest request has left beyond `kv_bytes` and `max_sequences`.

        The next request does so before it begins. Called between requests, it spares that request the time.
        """
        if self._turnstile.enter_if_free():  # otherwise another request has begun, and has done it
            try:
                self._pool.trim()
            finally:
                self._turnstile.leave()

    def close(self) -> None:
        """Ends the running request, refuses those that wait for their turn, and frees the model."""
        if self._closed:
            return
        self._closing = (
            True  # before the latest stream is looked for: `_open` sets that one, then looks at this
        )
        if (stream := self._latest()) is not None:
            stream.cancel()
            if self._turnstile.held_here:
                stream.close()
        self._turnstile.enter()
        try:
            self._closed = True
            self._pool.clear()
            self.backend.close()
        finally:
            self._turnstile.leave()
        self.chat_template.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _chat_params(self) -> SamplingParams:
        return dataclasses.replace(self.default_sampling_params, max_tokens=None)

    def _params_for(self, params: Params, count: int) -> list[SamplingParams]:
        chosen = self.default_sampling_params if params is None else params
        if isinstance(chosen, SamplingParams):
            return [chosen] * count
        if not isinstance(chosen, Sequence) or not all(isinstance(each, SamplingParams) for each in chosen):
            raise RequestError(
                "sampling_params is no SamplingParams.", "Write SamplingParams(temperature=0, max_tokens=16)."
            )
        if len(chosen) != count:
            raise RequestError(
                f"There are {count} prompts but {len(chosen)} sampling_params.",
                "Give one, or one per prompt.",
            )
        return list(chosen)

    def _drafts(self, prediction: PredictionLike | None, speculation: bool = True) -> Drafts:
        ids = make_prediction(
            prediction, self.tokenizer, vocab=self.backend.spec.vocab, context=self.max_model_len
        )
        return Drafts(self.config.speculation and speculation, ids)

    def _drafts_for(self, predictions: Predictions, count: int) -> list[Drafts]:
        if predictions is None or isinstance(predictions, str | bytes | bytearray):
            return [self._drafts(predictions)] * count
        if len(predictions) != count:
            raise RequestError(
                f"There are {count} prompts but {len(predictions)} predictions.",
                "Give one, or one per prompt.",
            )
        return [self._drafts(prediction) for prediction in predictions]

    def _requests(
        self,
        prompt: Prompt,
        params: SamplingParams,
        first: int = 0,
        constraint: Constraint | None = None,
        special_mark: str = "",
        drafts: Drafts | None = None,
    ) -> list[Request]:
        """A prompt's n completions, counted from `first`, checked, with their seeds."""
        if params.stop_strings and self.tokenizer is None:
            raise RequestError(
                "stop needs text, but this checkpoint has no tokenizer.", "Use stop_token_ids."
            )
        vocab = self.backend.spec.vocab
        room = room_for(prompt, params, self.max_model_len, self.backend.spec.context)
        request_id = str(next(self._request_ids))
        seed = self._seeds.getrandbits(SEED_BITS) if params.seed is None else params.seed
        params.sampling(seed=seed, vocab=vocab)
        return [
            Request(
                request_id, prompt, params, index, (seed + index) % 2**SEED_BITS, room,
                frozenset() if params.ignore_eos else self.eos_ids, vocab, constraint, special_mark,
                drafts or self._drafts(None),
            )
            for index in range(first, first + params.n)
        ]  # fmt: skip

    def _stream(
        self,
        prompt: Prompt,
        params: SamplingParams,
        index: int = 0,
        constraint: Constraint | None = None,
        special_mark: str = "",
        drafts: Drafts | None = None,
    ) -> TextStream:
        if params.n != 1:
            raise RequestError(f"n is {params.n}.", "A stream gives one completion; use generate().")
        return self._open(self._requests(prompt, params, index, constraint, special_mark, drafts)[0])

    def _open(self, request: Request) -> TextStream:
        if os.getpid() != self._process:  # no worker would answer, for ever
            raise UsageError(
                "This process was forked after the model was loaded, and has none of its workers.",
                "Load the model in this process, or let multiprocessing start it with spawn.",
            )
        self._turnstile.enter()
        stream = None
        try:
            if self._closing:
                raise UsageError("This model is closed.", "Load it again.")
            stream = TextStream(request, self.backend, self._pool, self.tokenizer, self._turnstile.leave)
            self._latest = weakref.ref(stream)
            if self._closing:  # since a moment ago, so that `close` may not have seen this stream
                stream.cancel()
            return stream
        except BaseException:
            if stream is None:
                self._turnstile.leave()
            else:  # an interrupt; an exception keeps the stream, whose job must not outlive the backend
                stream.close()
            raise

    def _run_all(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        predictions: Predictions,
        shown: bool,
    ) -> list[RequestOutput]:
        asked = zip(prompts, params, self._drafts_for(predictions, len(prompts)), strict=True)
        waiting = [self._requests(prompt, chosen, drafts=drafts) for prompt, chosen, drafts in asked]
        outputs = []
        with progress_bar(shown and len(waiting) > 1 and self.config.progress) as report:
            for requests in waiting:
                outputs.append(self._run(requests))
                if report is not None:
                    report("Prompts", len(outputs), len(waiting))
        self.trim_kv()
        return outputs

    def _run(self, requests: Sequence[Request]) -> RequestOutput:
        completions: list[CompletionOutput] = []
        scores: list[TokenLogprobs | None] | None = None
        for request in requests:
            with self._open(request) as stream:
                for _ in stream:
                    pass
                completions.append(stream.completion)
                scores = scores or stream.output.prompt_logprobs
        first = requests[0]
        return RequestOutput(first.id, first.prompt.text, first.prompt.ids, scores, completions, True)
