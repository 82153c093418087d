"""A running request as a stream of text: detokenised, stopped, cancelled and accounted for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

from monotape.backends.protocol import Backend, Generation, KvSequence, TakesMasks, Token, drafts_of
from monotape.backends.token_ids import TokenIds
from monotape.engine.answer import Say
from monotape.engine.changed_prefix import Change
from monotape.engine.harmony.marks import SPECIAL
from monotape.engine.kv_pool import KvPool, RoomyBackend
from monotape.engine.outputs import (
    CompletionOutput,
    Delta,
    FinishReason,
    RequestOutput,
    TokenLogprobs,
    measured,
    token_logprobs,
)
from monotape.engine.prompt_logprobs import ScoredGeneration, score_prompt
from monotape.engine.request import Request
from monotape.engine.stop import StopStrings
from monotape.engine.tokenizer import Tokenizer


class TextStream:
    """Iterating gives a Delta for every token, and a last one with the finish reason.

    Closing it early, or dropping it, cancels the request. What was generated until then stays in `output`.
    """

    def __init__(
        self,
        request: Request,
        backend: Backend,
        pool: KvPool,
        tokenizer: Tokenizer | None,
        on_end: Callable[[], None],
    ) -> None:
        self._ended = True  # until the job has started there is nothing to end
        self._request, self._backend, self._pool, self._on_end = request, backend, pool, on_end
        params = request.params
        voice = tokenizer if params.detokenize else None
        self._text_of = None if voice is None else voice.token_text
        # With special tokens shown, the text is everything that the model wrote.
        channels = request.prompt.channels if params.skip_special_tokens else None
        self._answer = None if channels is None else channels.new_answer()
        self._detokenizer = (
            None
            if voice is None
            else voice.detokenizer(
                skip_special=params.skip_special_tokens and channels is None,
                prompt=request.prompt.ids,
                special_mark=request.special_mark if channels is None else SPECIAL,
            )
        )
        self._stops = StopStrings(params.stop_strings, include=params.include_stop_str_in_output)
        self._stop_ids = request.stop_ids
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._times_ns: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._unsaid: list[Token] = []  # that came after the text had ended
        self._finish_reason: FinishReason | None = None
        self._stop_reason: int | str | None = None
        self._start()

    def _start(self) -> None:
        request, backend, top = self._request, self._backend, self._request.params.prompt_logprobs
        room = len(request.prompt.ids) + request.max_tokens
        self._lease = self._pool.lease(request.prompt.ids, room=room, reuse=top is None)
        sequence = self._lease.sequence
        self._scored: ScoredGeneration | None = None
        begin = partial(_begin, request, backend, self._pool, sequence)
        if top is not None:
            roomy = RoomyBackend(backend, self._pool)
            scores = score_prompt(roomy, sequence, request.prompt.ids, top, self._text_of)
            self._scored = ScoredGeneration(scores, begin)
        self._generation: Generation = self._scored or begin()
        self._tokens = iter(self._generation)
        self._ended = False

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        if self._finish_reason is not None:
            raise StopIteration
        try:
            if not self._ended:
                for token in self._tokens:
                    return self._take(token)
            return self._finish()
        except BaseException:
            self._abandon()
            raise

    def cancel(self) -> None:
        """Ends the request within a token; safe from any thread. The stream then ends by itself."""
        if not self._ended:
            self._generation.cancel()

    def close(self) -> None:
        """Cancels the request if it still runs, and frees the engine for the next one."""
        if not self._ended:
            self._abandon()

    def __enter__(self) -> TextStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    @property
    def cache_miss(self) -> str | None:
        """Why no KV of an earlier conversation was used; None when some was."""
        return self._lease.findings.miss

    @property
    def change(self) -> Change | None:
        """What was changed near the top of an earlier prompt, so that the rest had to be computed again."""
        return self._lease.findings.change

    @property
    def filled(self) -> int:
        """How much of the prompt has been read: tokens whose KV is there, cached ones included."""
        return self._generation.filled

    @property
    def times_ns(self) -> list[int]:
        """When each token came, on the backend's clock."""
        return self._times_ns

    @property
    def decode_ns(self) -> int:
        """From the first token to the latest."""
        return self._times_ns[-1] - self._times_ns[0] if self._times_ns else 0

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._texts)

    @property
    def completion(self) -> CompletionOutput:
        """The completion so far."""
        request = self._request
        wanted = request.params.logprobs is not None
        return CompletionOutput(
            index=request.index,
            text=self.text,
            token_ids=list(self._token_ids),
            cumulative_logprob=sum(
                shown[token_id].logprob
                for token_id, shown in zip(self._token_ids, self._logprobs, strict=True)
            )
            if wanted
            else None,
            logprobs=list(self._logprobs) if wanted else None,
            finish_reason=self._finish_reason,
            stop_reason=self._stop_reason,
            seed=request.seed,
            stats=measured(
                self._backend.plan,
                prompt_tokens=len(request.prompt.ids),
                cached_tokens=self._lease.cached,
                start_ns=self._generation.start_ns,
                times_ns=self._times_ns,
                unsaid_ns=[token.time_ns for token in self._unsaid],
                drafts=drafts_of(self._generation),
            ),
            reasoning="" if self._answer is None else self._answer.reasoning,
            tool_calls=[] if self._answer is None else list(self._answer.calls),
        )

    @property
    def output(self) -> RequestOutput:
        """The request so far; `finished` once the stream has ended."""
        request = self._request
        return RequestOutput(
            request_id=request.id,
            prompt=request.prompt.text,
            prompt_ids=request.prompt.ids,
            prompt_logprobs=None if self._scored is None else self._scored.prompt_logprobs,
            outputs=[self.completion],
            finished=self._finish_reason is not None,
        )

    def _take(self, token: Token) -> Delta:
        self._token_ids.append(token.id)
        self._times_ns.append(token.time_ns)
        shown = None
        if self._request.params.logprobs is not None:
            shown = (token_logprobs(token, self._text_of),)
            self._logprobs.extend(shown)
        text, thought = self._read(self._text_after(token.id))
        if self._stops.matched is not None:
            self._generation.cancel()
            self._settle()
        return Delta(text, (token.id,), shown, reasoning=thought)

    def _text_after(self, token_id: int) -> str:
        params = self._request.params
        if self._detokenizer is None or (
            token_id in self._stop_ids and not params.include_stop_str_in_output
        ):
            return ""
        return self._stops.push(
            self._detokenizer.push(token_id), check=len(self._token_ids) > params.min_tokens
        )

    def _read(self, text: str, *, ended: bool = False) -> tuple[str, str]:
        """What is said and what is thought in a piece of the answer."""
        said, thought = text, ""
        if self._answer is not None:
            events = self._answer.end(text) if ended else self._answer.feed(text)
            pieces = [event for event in events if isinstance(event, Say)]
            said = "".join(piece.text for piece in pieces if piece.kind == "content")
            thought = "".join(piece.text for piece in pieces if piece.kind == "reasoning")
        self._texts.append(said)
        return said, thought

    def _finish(self) -> Delta:
        """The last delta: the job has ended by itself, by a stop string or by a cancellation."""
        self._settle()
        text = ""
        if self._detokenizer is not None and self._stops.matched is None:
            text = self._stops.push(self._detokenizer.flush())
            text += self._stops.flush()
        said, thought = self._read(text, ended=True)
        self._finish_reason, self._stop_reason = self._reasons()
        return Delta(said, (), None, self._finish_reason, self._stop_reason, thought)

    def _reasons(self) -> tuple[FinishReason, int | str | None]:
        if self._stops.matched is not None:
            return "stop", self._stops.matched
        reason = self._generation.finish_reason
        if reason == "stop":
            last = (
                self._token_ids[-1] if self._token_ids else None
            )  # a constraint may end it without a stop id
            return "stop", last if last in self._stop_ids - self._request.eos_ids else None
        return ("length" if reason == "length" else "abort"), None

    def _settle(self) -> None:
        """Waits until the job has ended, then keeps its KV and lets the next request in.

        The last delta comes after this, so nothing here may take long: limits of kept KV are applied later (trim_kv).
        """
        if self._ended:
            return
        for token in self._tokens:
            self._unsaid.append(token)
        if self._generation.finish_reason is None:  # an interrupt ended the iterator, but not the job
            for _ in self._generation:
                pass
        self._ended = True
        try:
            if self._generation.finish_reason is not None:  # otherwise the contents of its KV are unknown
                unsaid = [token.id for token in self._unsaid]
                tokens = TokenIds.joined(self._request.prompt.ids, self._token_ids, unsaid)
                self._pool.give_back(self._lease, tokens)
        finally:
            self._on_end()

    def _abandon(self) -> None:
        """Ends the request from outside. A sequence whose job did not end well is not given back."""
        if not self._ended:
            try:
                self._generation.cancel()
                with contextlib.suppress(Exception):  # the fault that led here is the one to report
                    self._settle()
            finally:
                if not self._ended:
                    self._ended = True
                    self._on_end()
        if self._finish_reason is None:
            self._finish_reason = "abort"
            self._read(self._stops.flush(), ended=True)


def _begin(request: Request, backend: Backend, pool: KvPool, sequence: KvSequence) -> Generation:
    """The answer itself. Not a method: a job that refers to its stream would keep a dropped stream alive."""
    job, roomy = request.job(sequence.length), RoomyBackend(backend, pool)
    if request.constraint is None:
        return roomy.start(job, sequence)
    if isinstance(backend, TakesMasks):
        from monotape.engine.guided import GuidedGeneration

        return GuidedGeneration(roomy, job, sequence, request.constraint, backend.spec.vocab)
    from monotape.engine.constrained import ConstrainedGeneration

    return ConstrainedGeneration(roomy, job, sequence, request.constraint)
