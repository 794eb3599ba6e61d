"""The one taxonomy of errors.

Every class derives from `AccelFsdpError` and from the builtin that a caller would expect. A message says what
happened, where, and what to do next; the facts behind it are attributes, so that code need not parse text.
Errors cross process boundaries (one rank's failure is raised on every rank), so all of them survive pickling.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any


def _rebuild(cls: type[AccelFsdpError], message: str, facts: dict[str, Any]) -> AccelFsdpError:
    return cls(message, **facts)


class AccelFsdpError(Exception):
    """Base of every error that this package raises on purpose.

    Facts given as keywords become attributes, `None` where not known: `path`, `rank`, `fqn`, `expected`, `actual`.
    """

    path: Any = None
    rank: int | None = None
    fqn: str | None = None
    expected: Any = None
    actual: Any = None

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.message = message
        self.facts = facts
        for name, value in facts.items():
            setattr(self, name, value)

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Callable[..., AccelFsdpError], tuple[Any, ...]]:
        return _rebuild, (type(self), self.message, self.facts)

    def with_facts(self, **facts: Any) -> AccelFsdpError:
        """Return the same error with more facts attached (used to add the rank that failed)."""
        return type(self)(self.message, **{**self.facts, **facts})


class UsageError(AccelFsdpError, ValueError):
    """An argument or a combination of settings cannot work; nothing was written or loaded."""


class CallOrderError(AccelFsdpError, RuntimeError):
    """A call came at a moment when it cannot be right (before prepare, after a step, in mid-accumulation)."""


class UnsupportedError(AccelFsdpError, NotImplementedError):
    """The situation is understood, and this version does not handle it."""


class CheckpointNotFoundError(AccelFsdpError, FileNotFoundError):
    """There is no checkpoint where one was expected."""


class CheckpointIncompleteError(AccelFsdpError, FileNotFoundError):
    """A checkpoint lacks files or states that a resume needs."""


class ManifestError(AccelFsdpError, ValueError):
    """The manifest cannot be read or contradicts itself."""


class ManifestVersionError(ManifestError):
    """The manifest was written by a newer version of this package."""


class DamagedCheckpointError(AccelFsdpError, OSError):
    """What is on disk is not what was written: size, checksum or structure differ."""


class MismatchError(AccelFsdpError, ValueError):
    """The checkpoint and the run that wants to load it differ; nothing was loaded."""


class UnsafePickleError(AccelFsdpError, pickle.UnpicklingError):
    """A pickle names something that is not on the short list of harmless types; it was not executed."""


class RngStateError(AccelFsdpError, ValueError):
    """A random generator's state is missing or cannot be restored; nothing was restored."""


class DataProgressError(AccelFsdpError, RuntimeError):
    """Where a dataloader stood is not known or cannot be restored."""


class StorageError(AccelFsdpError, OSError):
    """The storage does not behave as a checkpoint needs (not shared between ranks, not writable, full)."""


class LockedError(AccelFsdpError, RuntimeError):
    """Another live run uses the same checkpoint root."""


class SaveDiscardedError(AccelFsdpError, RuntimeError):
    """A save in the background was given up on request before it was committed; nothing is left of it."""


class RankFailedError(AccelFsdpError, RuntimeError):
    """One rank failed with an error from outside this package; raised on every rank.

    Facts: `rank` (the first that failed), `what` (the stage), `cause_type`, `cause_message`, `cause_traceback`
    and `failed_ranks`.
    """

    what: str | None = None
    cause_type: str | None = None
    cause_message: str | None = None
    cause_traceback: str | None = None
    failed_ranks: tuple[int, ...] = ()


class RankMissingError(RankFailedError):
    """One or more ranks did not arrive at a collective call within the timeout. Fact: `missing_ranks`."""

    missing_ranks: tuple[int, ...] = ()


class RankMismatchError(AccelFsdpError, RuntimeError):
    """What the ranks hold are not the parts of one model."""


class ReplicaDivergenceError(RankMismatchError):
    """Ranks that should hold copies of the same values hold different ones.

    Facts: `fqn` and `ranks` of the first tensor (the ranks that differ from the majority), and `divergences`, all.
    """

    ranks: tuple[int, ...] = ()
    divergences: tuple[Any, ...] = ()


class DataProgressWarning(UserWarning):
    """A dataloader is followed, but its resume will not be exact."""
