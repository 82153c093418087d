"""Every exception that Monotape raises on purpose, as one tree.

MonotapeError            one sentence that says what is wrong, and a hint that says what to do
├── UsageError           a flag, an argument or a setting that cannot be
├── ModelError           a model that this engine does not run, or a config.json that does not make sense
│   └── UnsupportedModel an architecture, or a field of it, that no family file describes
├── CheckpointError      a weight file that is missing, truncated, lying or not what the config says
├── RequestError         a prompt or sampling setting that cannot be served
│   └── ContextOverflow  a prompt, or a prompt and its answer, that the context has no room for
├── ResourceError        memory or disk that is not there
├── PlanError            a plan that breaks one of its own rules (our mistake, not the user's)
└── BackendError         what runs the plan
    ├── BackendUnavailable  this machine cannot run that backend
    ├── NumericalFault      a NaN or infinity where a number must be
    └── DeadlineFault       a worker waited too long for another

`assert` is for our own mistakes; these are for everything a user can meet.
"""

from __future__ import annotations

from collections.abc import Iterable


class MonotapeError(Exception):
    """One sentence for the user; `hint` says what to do about it."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(f"{message} {hint}".strip())
        self.message = message
        self.hint = hint


class UsageError(MonotapeError):
    """A flag, an argument or a setting that cannot be."""


class ModelError(MonotapeError):
    """A model description that does not make sense."""


class UnsupportedModel(ModelError):
    """An architecture, or a field of it, that no family file describes."""


class CheckpointError(MonotapeError):
    """A weight file that is missing, truncated, lying or not what the config says."""


class RequestError(MonotapeError):
    """A prompt or sampling setting that cannot be served."""


class ContextOverflow(RequestError):
    """A prompt, or a prompt and its answer, that the context has no room for. `exact` is false where the prompt has
    `prompt_tokens` at least."""

    def __init__(
        self, message: str, hint: str, *, prompt_tokens: int, context: int, exact: bool = True
    ) -> None:
        super().__init__(message, hint)
        self.prompt_tokens, self.context, self.exact = prompt_tokens, context, exact


class ResourceError(MonotapeError):
    """Memory or disk that is not there."""


class PlanError(MonotapeError):
    """A plan that breaks one of its own rules."""


class BackendError(MonotapeError):
    """Something that happened while a backend ran a plan."""


class BackendUnavailable(BackendError):
    """This machine cannot run that backend."""


class NumericalFault(BackendError):
    """A NaN or an infinity where a number must be."""


class DeadlineFault(BackendError):
    """A worker waited too long for another."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that looks most like `name`; the first one when nothing does."""
    import difflib  # here, because most starts go well

    names = sorted(known)
    return (difflib.get_close_matches(name, names, n=1, cutoff=0.0) or names[:1])[0]


def near(name: str, known: Iterable[str]) -> str | None:
    """The known name nearest to `name`, whatever its capitals; None if none is near."""
    import difflib

    names = {other.lower(): other for other in sorted(known)}
    found = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.6)
    return names[found[0]] if found else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The beginning of a hint; empty where no known name is near, because a far one only puzzles."""
    found = near(name, known)
    return f"Did you mean '{found}'? " if found else ""
