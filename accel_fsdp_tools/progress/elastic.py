"""Another number of ranks, batch size or accumulation: which samples make up an update, before and now.

Accelerate deals one global order out to the ranks. A *micro-batch* of all ranks together takes the next samples of that
order, `accumulation` of them make an update, and at the end of the order the last micro-batch is filled up with the
epoch's first samples (`even_batches`, several processes), dropped (`drop_last`) or short. So two set-ups train on the
same samples in the same updates if the samples per update agree and so does where the epoch ends, and a place in one is
a place in the other.

With `dispatch_batches` one process reads the order for all, and the last micro-batch is filled up only until every
process gets equally much of it.

Units are samples, or whole batches where a batch sampler of the user's own decides what belongs together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MODES = ("exact", "allow", "refuse")
GOVERNED = ("batch_size", "drop_last", "split_batches", "even_batches", "num_processes", "num_batches")
"""The facts of a loader's contract that `elastic` decides about; all others have to be the same."""

PLAIN_BATCH_SAMPLER = "torch.utils.data.sampler.BatchSampler"


@dataclass(frozen=True)
class EpochShape:
    """How an epoch is cut into micro-batches and updates, in units of the global order.

    Attributes:
        unit: "sample", or "batch" where only whole batches have an order.
        num_units: length of the global order.
        num_processes: processes that share the order.
        per_micro: units that all of them together take at a time.
        accumulation: micro-batches per update.
        is_sharded: Accelerate shares the order between processes; one process takes it as it is.
        is_filled: the last micro-batch is filled up with units from the beginning.
        drops_last: an incomplete last micro-batch is left out.
        is_dispatched: one process reads, and the last micro-batch is filled up until all get equally much of it.
    """

    unit: str
    num_units: int
    num_processes: int
    per_micro: int
    accumulation: int
    is_sharded: bool
    is_filled: bool
    drops_last: bool
    is_dispatched: bool = False

    @classmethod
    def from_contract(
        cls, contract: Mapping[str, Any], accumulation: int, *, is_dispatched: bool = False
    ) -> EpochShape | None:
        """The shape that a loader's contract describes; None where it does not tell."""
        facts: dict[str, Any] = {
            name: contract.get(name) for name in ("batch_size", "num_processes", "num_samples", "num_batches")
        }
        batch_size, num_processes = facts["batch_size"], facts["num_processes"]
        is_plain = contract.get("batch_sampler") == PLAIN_BATCH_SAMPLER
        needed = (batch_size, num_processes, facts["num_samples"] if is_plain else facts["num_batches"])
        if not all(_is_count(value) for value in (*needed, accumulation)):
            return None
        if is_dispatched and (not is_plain or facts["num_samples"] < num_processes):  # then some would get nothing
            return None
        is_split = bool(contract.get("split_batches"))
        even_batches, drops_last = contract.get("even_batches"), bool(contract.get("drop_last"))
        num_units = facts["num_samples"]
        per_micro = batch_size if is_split else batch_size * num_processes
        if not is_plain:
            per_micro = 1 if is_split else num_processes
            num_units = facts["num_batches"] * per_micro  # the order itself may be shorter: it is filled up, or cut
        return cls(
            unit="sample" if is_plain else "batch",
            num_units=num_units,
            num_processes=num_processes,
            per_micro=per_micro,
            accumulation=accumulation,
            is_sharded=even_batches is not None,
            is_filled=bool(even_batches) and not drops_last,
            drops_last=drops_last,
            is_dispatched=is_dispatched,
        )

    @property
    def per_update(self) -> int:
        """Units in a whole update."""
        return self.per_micro * self.accumulation

    @property
    def num_dealt(self) -> int:
        """Units handed out in an epoch, repeats included."""
        whole = self.num_units // self.per_micro * self.per_micro
        return whole if self.drops_last else whole + self._num_last

    @property
    def _num_last(self) -> int:
        """Units in an incomplete last micro-batch, with what it is filled up with."""
        rest = self.num_units % self.per_micro
        unit = self.per_micro if self.is_filled else self.num_processes if self.is_dispatched else 1
        return -(-rest // unit) * unit

    @property
    def num_short(self) -> int:
        """Units in the last micro-batch if it is a short one, otherwise 0. They weigh more than others."""
        return 0 if self.drops_last else self._num_last % self.per_micro

    def weighs_like(self, other: EpochShape) -> bool:
        """Whether samples of a short last micro-batch weigh the same in both."""
        if self.is_dispatched and other.is_dispatched:  # each process has equally many of them
            return (self.per_micro, self.accumulation) == (other.per_micro, other.accumulation)
        return self == other

    @property
    def num_micro(self) -> int:
        """Micro-batches in an epoch."""
        if self.drops_last:
            return self.num_units // self.per_micro
        return -(-self.num_units // self.per_micro)


@dataclass(frozen=True)
class Place:
    """A place in an epoch: micro-batches handed out, units before it, and units that will come a second time."""

    num_micro: int
    num_units: int
    num_repeated: int


def find_obstacle(before: EpochShape, now: EpochShape, num_micro: int) -> str | None:
    """Why the updates from here on are not made of the same samples as at the save; None if they are.

    Args:
        num_micro: micro-batches handed out before the save, in the epoch that it was made in.
    """
    if before.unit != now.unit:
        return f"the order was one of {before.unit}s, now it is one of {now.unit}s"
    if before.per_update != now.per_update:
        return f"an update takes {now.per_update} {now.unit}(s), it took {before.per_update} at the save"
    if before.num_dealt != now.num_dealt:
        return (
            f"with repeats and what is dropped an epoch has {now.num_dealt} {now.unit}(s), it had {before.num_dealt}, "
            "so its last update is another"
        )
    if (before.num_short or now.num_short) and not before.weighs_like(now):
        return (
            "the last batch of an epoch is a short one (it is not filled up), whose samples would not weigh what they "
            "did"
        )
    if before.unit == "batch" and before.is_sharded != now.is_sharded and not (before.drops_last and now.drops_last):
        return "several processes fill a short last batch up and one does not, and which it is here is not known"
    if (num_micro * before.per_micro) % now.per_micro:
        return (
            f"{num_micro * before.per_micro} {now.unit}(s) of the epoch had been handed out, which is no multiple of "
            f"the {now.per_micro} that all ranks take at a time now"
        )
    return None


def find_place(before: EpochShape, now: EpochShape, num_micro: int) -> Place:
    """Where to go on after `num_micro` micro-batches of the save: at the same sample, or at the last start before it.

    Nothing is left out: what does not fill a micro-batch of now comes again.
    """
    num_units = min(num_micro * before.per_micro, before.num_units)
    whole = min(num_units // now.per_micro, now.num_micro)
    if num_units >= now.num_units or whole >= now.num_micro:
        return Place(now.num_micro, min(now.num_dealt, now.num_units), 0)
    return Place(whole, whole * now.per_micro, num_units - whole * now.per_micro)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
