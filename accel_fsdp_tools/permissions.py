"""What a load may put up with: the differences between checkpoint and run that its caller has named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .errors import UsageError

ELASTIC = ("exact", "allow", "refuse")
ALLOWABLE = ("dataset", "device_type", "dtype", "mixed_precision", "num_workers")


@dataclass(frozen=True)
class Permissions:
    """How a load treats differences.

    Attributes:
        strict: differences are refused unless one of the others covers them; without it all but fatal ones are noted.
        elastic: about the number of ranks, batch size and accumulation: "exact" goes on where every update is made of
            the samples that it would have been made of, "allow" at the same sample in any case, "refuse" never.
        allow: names of `ALLOWABLE`.
    """

    strict: bool = True
    elastic: str = "refuse"
    allow: tuple[str, ...] = ()

    @classmethod
    def make(cls, *, strict: bool = True, elastic: str = "refuse", allow: Sequence[str] = ()) -> Permissions:
        """Check what a caller has given.

        Raises:
            UsageError: a value that is not known.
        """
        if elastic not in ELASTIC:
            raise UsageError(f"elastic is {elastic!r}; use one of {', '.join(ELASTIC)}", actual=elastic)
        names = (allow,) if isinstance(allow, str) else tuple(allow)
        unknown = [name for name in names if name not in ALLOWABLE]
        if unknown:
            raise UsageError(
                f"allow names {unknown[0]!r}; use some of {', '.join(ALLOWABLE)}. The number of ranks, batch size and "
                "accumulation are what elastic= is about.",
                actual=unknown,
            )
        return cls(strict, elastic, names)

    def permits(self, argument: str | None) -> bool:
        """Whether a difference is covered by name: by `elastic`, or by a name in `allow`."""
        return (self.elastic != "refuse") if argument == "elastic" else argument in self.allow


def name_argument(argument: str | None) -> str:
    """How a caller would permit a difference, for a message; empty if only `strict=False` does."""
    if argument is None:
        return ""
    return ' (see elastic="exact")' if argument == "elastic" else f' (see allow=["{argument}"])'
