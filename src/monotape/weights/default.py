"""Which model answers when the user names none: SmolLM2, or the embedded model where it cannot be had."""

from __future__ import annotations

import logging

from monotape.errors import CheckpointError
from monotape.weights import embedded
from monotape.weights.network import missing_network


def default_model(progress: bool = True) -> str:
    """A name for --model. Without a network nothing is asked for; a network that does not lead to SmolLM2 is told."""
    from monotape.weights import hub

    chat = "smollm2"
    if hub.is_cached(chat):
        return chat
    reason = missing_network()
    if reason is None:
        try:
            hub.resolve(chat, progress)
            return chat
        except CheckpointError as error:
            reason = error.message.rstrip(".")
    logging.getLogger("monotape").warning(
        "SmolLM2 is not here (%s), so the embedded model answers: it completes Python and does not chat.",
        reason,
    )
    return embedded.NAME
