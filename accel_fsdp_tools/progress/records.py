"""What is saved of one loader on one rank, and what became of it on restore."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from ..errors import DataProgressError
from .attributes import AttributeStates
from .moments import Moment
from .values import PlainValue

if TYPE_CHECKING:
    from torch import Tensor

    from .order import OrderProof

PassState = Literal["idle", "running", "exhausted"]
Status = Literal["restored", "approximate", "absent"]

# Names of values: what completes a dispatched pass's last batch; that a stateful loader's first pass drew no seed.
FIRST_BATCH, UNSEEDED = "first_batch", "unseeded"
_COUNTS = ("index", "epoch", "batch", "samples", "samples_before_epoch", "iteration")
_LARGEST_COUNT = (1 << 53) - 1  # samplers add some of these to a seed of 64 bits
_LARGEST_DIGEST = (1 << 32) - 1
# What records of before these fields existed are read with.
_LATER_FIELDS: dict[str, Any] = {"replayable": False, "next_digest": None, "undelivered": [], "values": {}}
_MOMENTS = {"idle": {"now"}, "running": {"epoch_start", "before_fetch", "now"}, "exhausted": {"now"}}


@dataclass(frozen=True)
class LoaderPosition:
    """Where a loader stands: passes ended, batches handed out in this pass, samples handed out in all passes."""

    epoch: int
    batch: int
    samples: int


@dataclass(frozen=True)
class LoaderOutcome:
    """What `DataTracker.restore` did for one loader.

    `status` is "restored" (what follows is bit-equal to a run that never stopped), "approximate" (the position is
    right, something else is not: see `reason`) or "absent" (the epoch numbers are right, but the pass begins anew).
    """

    index: int
    status: Status
    reason: str | None
    epoch: int
    batch: int

    def to_dict(self) -> dict[str, Any]:
        """The outcome for JSON."""
        return {
            "index": self.index,
            "status": self.status,
            "reason": self.reason,
            "epoch": self.epoch,
            "batch": self.batch,
        }


@dataclass(frozen=True)
class LoaderProgress:
    """Where one rank's loader stood, and all random state that its next batches depend on.

    Attributes:
        index: position in `accelerator._dataloaders`.
        kind: the kind of loader (`kinds.py`).
        exact: whether restoring this gives the uninterrupted run's batches; if not, `reason` says why.
        restorable: whether the position can be restored at all.
        known: whether anybody counted: False for a loader that was used before it was followed.
        contract: the facts that must be the same on restore (`contract.py`).
        state: "idle" between passes, "running" in one, "exhausted" with the last batch of one in hand.
        epoch: passes ended: run to the end, or left by `break`.
        batch: batches handed out in the current pass.
        samples: samples handed out by all ranks in all passes, without the repeats that even out the last batch.
        samples_before_epoch: the part of `samples` from passes that ended.
        iteration: Accelerate's own counter, which seeds samplers through `set_epoch`, as of the current pass;
            unlike `epoch` it does not advance when a pass is left by `break`.
        reuses_workers: whether this pass (between passes: the next one) is made with persistent workers that
            run already; then torch draws no seed for them.
        digest: checksum of the indices handed out in this pass on this rank, None where not known.
        proof: what proves that the order is the saved one where this record was made of those of another number of
            ranks (`carry.py`). Not saved.
        moments: random state when the pass began, before the fetch that is one ahead, and at the save.
        attributes: state that samplers keep besides generators, when the pass began and at the save.
        replayable: whether reading the pass from its beginning again makes an inexact record exact.
        next_digest: checksum of the batch that had been fetched ahead (`batches.py`), None where not known.
        undelivered: numbers of batches whose indices were drawn before others' that were handed out already
            (`in_order=False`).
        values: other plain state, such as that of a stream before the fetch that is one ahead.
    """

    index: int
    kind: str
    exact: bool
    restorable: bool
    reason: str | None
    contract: Mapping[str, Any]
    state: PassState
    epoch: int
    batch: int
    samples: int
    samples_before_epoch: int
    iteration: int
    reuses_workers: bool = False
    digest: int | None = None
    known: bool = True
    moments: Mapping[str, Moment] = field(default_factory=dict)
    attributes: Mapping[str, AttributeStates] = field(default_factory=dict)
    replayable: bool = False
    next_digest: int | None = None
    undelivered: tuple[int, ...] = ()
    values: Mapping[str, PlainValue] = field(default_factory=dict)
    proof: OrderProof | None = None

    @property
    def position(self) -> LoaderPosition:
        """Where the loader stood."""
        return LoaderPosition(self.epoch, self.batch, self.samples)

    @property
    def is_untouched(self) -> bool:
        """Whether nothing had been drawn from the loader: then there is nothing to restore."""
        is_at_start = self.state == "idle" and self.epoch == 0 and self.iteration == 0 and self.samples == 0
        return self.known and is_at_start

    def end_pass(self) -> LoaderProgress:
        """The same place for a loop that begins the next pass at once: a pass without another batch counts as ended.

        The global random state is then for the caller to restore.
        """
        if self.state != "exhausted":
            return self
        return dataclasses.replace(
            self,
            state="idle",
            epoch=self.epoch + 1,
            batch=0,
            samples_before_epoch=self.samples,
            iteration=self.iteration + 1,
            moments={"now": Moment(None, self.moments["now"].generators)} if self.moments else {},
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything but the tensors, for JSON."""
        return {
            "index": self.index,
            "kind": self.kind,
            "exact": self.exact,
            "restorable": self.restorable,
            "known": self.known,
            "reason": self.reason,
            "contract": dict(self.contract),
            "state": self.state,
            "epoch": self.epoch,
            "batch": self.batch,
            "samples": self.samples,
            "samples_before_epoch": self.samples_before_epoch,
            "iteration": self.iteration,
            "reuses_workers": self.reuses_workers,
            "digest": self.digest,
            "moments": {name: moment.to_dict() for name, moment in self.moments.items()},
            "attributes": {name: states.to_dict() for name, states in self.attributes.items()},
            "replayable": self.replayable,
            "next_digest": self.next_digest,
            "undelivered": list(self.undelivered),
            "values": {name: value.data for name, value in self.values.items()},
        }

    def to_tensors(self) -> dict[str, Tensor]:
        """All random state, named `loader_<index>/<moment>/...`."""
        tensors: dict[str, Tensor] = {}
        for name, moment in self.moments.items():
            tensors.update(moment.to_tensors(f"loader_{self.index}/{name}"))
        for name, states in self.attributes.items():
            tensors.update(states.to_tensors(f"loader_{self.index}/{name}"))
        for name, value in self.values.items():
            tensors.update(value.to_tensors(f"loader_{self.index}/value/{name}"))
        return tensors

    @classmethod
    def from_dict(
        cls, data: Any, tensors: Mapping[str, Tensor], *, rank: int | None = None, path: Any = None
    ) -> LoaderProgress:
        """Rebuild a record from `to_dict()` and `to_tensors()`.

        Raises:
            DataProgressError: the record is malformed or contradicts itself; names rank and file.
            RngStateError: random state is missing or malformed; names rank, generator and file.
        """
        reader = _Reader({**_LATER_FIELDS, **data} if isinstance(data, dict) else data, rank, path)
        counts = {name: reader.get(name, int) for name in _COUNTS}
        for name, value in counts.items():
            reader.require(0 <= value <= _LARGEST_COUNT, f"{name!r} is out of range")
        state = reader.get("state", str)
        reader.require(state in get_args(PassState), f"'state' is {state!r}")
        reader.require((state == "idle") == (counts["batch"] == 0), f"'batch' contradicts the state {state!r}")
        reader.require(counts["samples_before_epoch"] <= counts["samples"], "'samples' is too small")
        restorable = reader.get("restorable", bool)
        moments, attributes = reader.get("moments", dict), reader.get("attributes", dict)
        if restorable:
            missing = _MOMENTS[state] - set(moments)
            reader.require(not missing, f"no random state for {', '.join(sorted(missing))}")
        for name in {*moments, *attributes}:
            reader.require(name in _MOMENTS["running"], f"there is no moment {name!r}")
        digests = {name: reader.get(name, int, optional=True) for name in ("digest", "next_digest")}
        for name, digest in digests.items():
            reader.require(digest is None or 0 <= digest <= _LARGEST_DIGEST, f"{name!r} is out of range")
        undelivered = reader.get("undelivered", list)
        reader.require(
            all(type(number) is int and 0 <= number <= _LARGEST_COUNT for number in undelivered),
            "'undelivered' holds something else than numbers of batches",
        )
        prefix = f"loader_{counts['index']}"
        return cls(
            **counts,
            kind=reader.get("kind", str),
            exact=reader.get("exact", bool),
            restorable=restorable,
            known=reader.get("known", bool),
            reason=reader.get("reason", str, optional=True),
            contract=reader.get("contract", dict),
            state=cast(PassState, state),
            reuses_workers=reader.get("reuses_workers", bool),
            **digests,
            replayable=reader.get("replayable", bool),
            undelivered=tuple(undelivered),
            values={
                name: PlainValue.from_dict(value, tensors, f"{prefix}/value/{name}", rank=rank, path=path)
                for name, value in reader.get("values", dict).items()
            },
            moments={
                name: Moment.from_dict(value, tensors, f"{prefix}/{name}", rank=rank, path=path)
                for name, value in moments.items()
            },
            attributes={
                name: AttributeStates.from_dict(value, tensors, f"{prefix}/{name}", rank=rank, path=path)
                for name, value in attributes.items()
            },
        )


class _Reader:
    """Strict access to parsed JSON; every complaint names the rank and the file."""

    def __init__(self, data: Any, rank: int | None, path: Any) -> None:
        self._rank = rank
        self._path = path
        self._data: Any = data
        self.require(isinstance(data, dict), "a loader's record is not an object")

    def get(self, name: str, kind: type, *, optional: bool = False) -> Any:
        self.require(name in self._data, f"{name!r} is missing")
        value = self._data[name]
        if optional and value is None:
            return None
        is_kind = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
        self.require(is_kind, f"{name!r} is {value!r}, not {kind.__name__}")
        return value

    def require(self, condition: bool, what: str) -> None:
        if not condition:
            raise DataProgressError(
                f"rank {self._rank}: the data progress in {self._path} is malformed: {what}. Resume from another "
                "checkpoint.",
                rank=self._rank,
                path=self._path,
            )
