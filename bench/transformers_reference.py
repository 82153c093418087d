"""A checkpoint's own numbers through transformers in float32: what Monotape's tokens are compared with.

The weights are read through Monotape and handed over as one state dict, so that both engines multiply the
same numbers; everything after that (architecture, positions, attention, KV) is transformers' own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from monotape.errors import UsageError
from monotape.weights.checkpoint import Checkpoint

Matrix = NDArray[np.float32]


class TransformersModel:
    """A checkpoint as a model of transformers: float32 on the CPU, unless something else is asked for."""

    def __init__(self, checkpoint: Checkpoint, device: str = "cpu", dtype: str = "float32") -> None:
        import transformers

        library: Any = transformers
        library.utils.logging.disable_progress_bar()
        config = _transformers_config(checkpoint)
        model_class = getattr(library, checkpoint.config["architectures"][0])
        self.model, loading = model_class.from_pretrained(
            None, config=config, state_dict=_state(checkpoint), dtype=dtype, output_loading_info=True
        )
        assert not any(loading.values()), f"not all weights found their place: {loading}"
        self.model.to(device).eval()
        self._device = device

    def _run(self, tokens: Sequence[Sequence[int]], **options: Any) -> Any:
        import torch

        return self.model(torch.tensor(tokens, device=self._device), **options)

    def logits(self, tokens: Sequence[int], last: int = 0) -> Matrix:
        """The logits after each token, or after the `last` tokens only, in one pass: [token, vocab]."""
        import torch

        with torch.inference_mode():
            output = self._run([tokens], use_cache=False, logits_to_keep=last)
        logits: Matrix = output.logits[0].float().cpu().numpy()
        return logits

    def greedy(self, prompt: Sequence[int]) -> Iterator[int]:
        """The most likely tokens, one after another, without end."""
        import torch

        new, past = list(prompt), None
        while True:
            with torch.inference_mode():  # not across the yield, where it would reach the caller
                output = self._run([new], past_key_values=past, use_cache=True, logits_to_keep=1)
            past, new = output.past_key_values, [int(output.logits[0, -1].argmax())]
            yield new[0]

    def greedy_together(
        self, prompts: Sequence[Sequence[int]], done: Callable[[Sequence[int]], bool], most: int
    ) -> list[list[int]]:
        """The most likely tokens of all prompts at once: of each until it is done, or as many as `most`.

        Shorter prompts are padded on the left; what stands there is masked, and has no position.
        """
        import torch

        longest = max(map(len, prompts))
        padding = [longest - len(prompt) for prompt in prompts]
        new = torch.tensor([[0] * pad + [*prompt] for pad, prompt in zip(padding, prompts, strict=True)])
        mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding], device=self._device)
        new, past = new.to(self._device), None
        texts: list[list[int]] = [[] for _ in prompts]
        open_rows = set(range(len(prompts)))
        while open_rows:
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -new.shape[1] :]
            with torch.inference_mode():
                output = self.model(
                    new, attention_mask=mask, position_ids=positions, past_key_values=past, use_cache=True,
                    logits_to_keep=1,
                )  # fmt: skip
                new = output.logits[:, -1].argmax(-1, keepdim=True)
            past, mask = output.past_key_values, torch.cat([mask, torch.ones_like(new)], 1)
            for row, token in enumerate(new[:, 0].tolist()):
                if row in open_rows:
                    texts[row].append(token)
            open_rows = {row for row in open_rows if len(texts[row]) < most and not done(texts[row])}
        return texts


def _transformers_config(checkpoint: Checkpoint) -> Any:
    from transformers import AutoConfig

    fields = {name: value for name, value in checkpoint.config.items() if not name.startswith("_")}
    if (fields.get("rope_scaling") or {}).get("rope_type") == "factors":
        raise UsageError(
            f"{checkpoint.source} has its RoPE scaling as a table, which transformers cannot express.",
            "Use the checkpoint's safetensors folder.",
        )
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


def _state(checkpoint: Checkpoint) -> dict[str, Any]:
    import torch

    state = {}
    for name in sorted(checkpoint.names):
        state[name] = torch.from_numpy(checkpoint.rows(name, 0, checkpoint.shape(name)[0]))
        checkpoint.release(name)
    return state
