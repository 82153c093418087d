"""A real checkpoint on the GPU against transformers, on the same dequantised weights: as stored, and in bfloat16.

transformers computes in float32 what the kernel computes with 16-bit activations. It reads the prompt and the kernel's
tokens in one pass; each token must be its greedy choice after those before it, or one that the distance between
the two engines' logits at that place can explain: a tie.
"""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

import real_models
from monotape.backends.cuda.detection import why_not
from monotape.engine.llm import LLM
from monotape.engine.sampling_params import SamplingParams
from monotape.weights.open import open_checkpoint
from transformers_reference import TransformersModel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(why_not() is not None, reason=why_not() or "there is no GPU"),
]

Logits = NDArray[np.float32]
TOKENS = 256
PROMPTS = ("def quicksort(values):\n", "The three laws of motion, explained to a child:\n")


@pytest.mark.parametrize(("dtype", "of_reference"), [("bf16", "bfloat16"), ("auto", "float32")])
def test_256_greedy_tokens_are_those_of_transformers_up_to_ties(dtype: str, of_reference: str) -> None:
    path = real_models.qwen_coder()
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    with LLM(str(path), backend="cuda", dtype=dtype, max_model_len=512, progress=False) as llm:
        outputs = llm.generate(PROMPTS, params)
        again = [llm.generate([text], params)[0] for text in PROMPTS for _ in range(2)]
        texts = [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs]
        ours = [llm.backend.logits(ids[:-1], llm.backend.new_sequence()) for ids in texts]
    assert [one.outputs[0].token_ids for one in again] == [
        output.outputs[0].token_ids for output in outputs for _ in range(2)
    ]
    reference = TransformersModel(open_checkpoint(path), "cuda", of_reference)
    reference.model.float()
    for ids, mine in zip(texts, ours, strict=True):
        exact = reference.logits(ids[:-1])
        ties = ties_of(ids, mine, exact)
        distance = float(np.linalg.norm(mine - exact) / np.linalg.norm(exact))
        print(
            f"{len(ties)} ties in {TOKENS} tokens at {ties}; relative distance of all logits {distance:.1e}"
        )
        assert distance < 0.03
        assert len(ties) <= TOKENS // 20


def ties_of(ids: list[int], ours: Logits, exact: Logits) -> list[int]:
    """Places where transformers would have gone on differently; fails where rounding does not explain it."""
    ties = []
    for at in range(len(ids) - TOKENS - 1, len(ids) - 1):
        token, best = ids[at + 1], int(exact[at].argmax())
        if token == best:
            continue
        gap, apart = float(exact[at, best] - exact[at, token]), float(np.abs(ours[at] - exact[at]).max())
        assert gap <= 2 * apart, (
            f"token {at}: the kernel chose {token}, transformers {best}, by {gap:.3f} of logits"
        )
        ties.append(at)
    return ties
