"""A job's sampling as the kernel sees it: its struct (kernels/sampling/settings.h), tables and log-probabilities."""

from __future__ import annotations

import ctypes
import math
from ctypes import c_double, c_float, c_int32, c_uint64, c_void_p

import numpy as np

from monotape.backends.cuda.driver import DeviceMemory, PinnedMemory
from monotape.backends.protocol import Job, Token
from monotape.errors import RequestError

MOST_LOGPROBS = 128  # the kernel ranks 256 tokens at once, one a thread, and wants room above


class SamplingStruct(ctypes.Structure):
    """kernels/sampling/settings.h: Sampling. All zeros: greedy."""

    _fields_ = (
        ("top_p", c_double), ("seed", c_uint64),
        *((name, c_void_p) for name in ("adjusted", "counts", "bias_ids", "bias_values")),
        *((name, c_void_p) for name in ("logprobs", "top_ids", "top_values", "masks")),
        *((name, c_float) for name in ("temperature", "log_min_p")),
        *((name, c_float) for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")),
        *((name, c_int32) for name in ("active", "top_k", "has_min_p", "min_tokens", "bias_count", "top_logprobs")),
        ("spare", c_int32),
    )  # fmt: skip


def is_plain(job: Job) -> bool:
    """Whether the best logit is all that is wanted: then the kernel takes its short path."""
    sampling = job.sampling
    adjusted = bool(sampling.logit_bias) or has_penalties(job) or bool(job.min_tokens and job.stop_ids)
    return sampling.greedy and not adjusted and job.logprobs is None and not job.masked


def has_penalties(job: Job) -> bool:
    sampling = job.sampling
    return bool(sampling.repetition_penalty != 1.0 or sampling.presence_penalty or sampling.frequency_penalty)


def sampling_struct(job: Job, vocab: int) -> SamplingStruct:
    """Everything but the pointers."""
    sampling, struct = job.sampling, SamplingStruct()
    if is_plain(job):
        return struct
    struct.active = 1
    struct.temperature, struct.top_p = sampling.temperature, sampling.top_p
    struct.seed = sampling.seed & (1 << 64) - 1
    struct.top_k = sampling.top_k if sampling.top_k < vocab else 0  # all of them: the filter is off
    struct.has_min_p = int(sampling.min_p > 0)
    struct.log_min_p = math.log(sampling.min_p) if sampling.min_p > 0 else 0.0
    struct.repetition_penalty = sampling.repetition_penalty
    struct.presence_penalty = sampling.presence_penalty
    struct.frequency_penalty = sampling.frequency_penalty
    struct.min_tokens = job.min_tokens
    struct.bias_count = len(sampling.logit_bias)
    struct.top_logprobs = -1 if job.logprobs is None else min(job.logprobs, vocab)
    if struct.top_logprobs > MOST_LOGPROBS:
        raise RequestError(
            f"{job.logprobs} log-probabilities a token were asked for; the GPU gives at most {MOST_LOGPROBS}.",
            "Ask for fewer, or use --backend cpu.",
        )
    return struct


class SamplingMemory:
    """The sampler's memory for one request. `adjusted` and `counts` belong to the model: [vocab] of 32 bits each."""

    def __init__(self, job: Job, vocab: int, adjusted: int, counts: int) -> None:
        self.struct = sampling_struct(job, vocab)
        self._memories: list[DeviceMemory] = []
        self._outputs: tuple[PinnedMemory, ...] = ()
        if not self.struct.active:
            return
        self.struct.adjusted = adjusted
        self.struct.counts = counts if has_penalties(job) else None
        if job.sampling.logit_bias:
            # Stable: biases of the same id are added in the order in which they were given.
            pairs = sorted(job.sampling.logit_bias, key=lambda pair: pair[0])
            ids = DeviceMemory.of(np.array([token for token, _ in pairs], np.int32))
            values = DeviceMemory.of(np.array([bias for _, bias in pairs], np.float32))
            self._memories += [ids, values]
            self.struct.bias_ids, self.struct.bias_values = ids.pointer, values.pointer
        if job.logprobs is not None:
            top = 4 * job.max_tokens * max(1, self.struct.top_logprobs)
            self._outputs = (PinnedMemory(4 * job.max_tokens), PinnedMemory(top), PinnedMemory(top))
            chosen, top_ids, top_values = self._outputs
            self.struct.logprobs = chosen.pointer
            self.struct.top_ids, self.struct.top_values = top_ids.pointer, top_values.pointer

    def token(self, index: int, token: int, time_ns: int) -> Token:
        """Token number `index` of the output, which the kernel has delivered."""
        if not self._outputs:
            return Token(token, time_ns)
        count = self.struct.top_logprobs
        chosen, ids, values = (memory.view for memory in self._outputs)
        span = slice(index * count, (index + 1) * count)
        top = zip(ids.view(np.int32)[span].tolist(), values.view(np.float32)[span].tolist(), strict=True)
        return Token(token, time_ns, float(chosen.view(np.float32)[index]), tuple(top))
