"""Follow a loader: count its passes and the batches that it hands out.

Accelerate's loaders are generators of their own kind and some ranks never touch the DataLoader inside, so the only
place where every kind can be counted is the loader's `__iter__`. `install` gives the loader a subclass of its own
class whose `__iter__` passes through a `Follower`; the object, its settings and everything else stay as they are.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ..errors import DataProgressError
from .closing import Holders, is_being_handled, note_holders
from .contract import describe_contract, measure_batch
from .records import LoaderOutcome, LoaderPosition, LoaderProgress, PassState, Status

if TYPE_CHECKING:
    from ..rng import RngSnapshot
    from .kinds import LoaderKind
    from .session import RestoreSession

_KEY = "_accel_fsdp_tools_follower"
_SKIPPER, _SKIPPER_READS = "skip_first_batches", "iteration"  # Accelerate's function copies it from a loader


_observer: Callable[[Follower, Any], None] | None = None


def set_batch_observer(observer: Callable[[Follower, Any], None] | None) -> None:
    """Install a function that is called with each batch which a followed loader is about to hand out, and by whom."""
    global _observer
    _observer = observer


def _do_nothing() -> None:
    pass


class Pass:
    """One iteration over a loader, from its first batch to its end."""

    def __init__(self, loader: Any) -> None:
        self.iteration = int(getattr(loader, "iteration", 0))
        self.samples_per_batch, self.samples_limit = measure_batch(loader)
        self.num_batches = 0
        self.num_samples = 0
        self.is_exhausted = False  # nothing is left behind the batch in hand
        self.is_over = False
        self.is_void = False  # progress was restored, or another pass began: this one must not go on
        self.undo_hook: Callable[[], None] = _do_nothing  # what was put in the loader's way until the pass is over
        self.holders: Holders = ()
        self.failure: int | None = None

    def count_batch(self, num_samples_here: int | None, num_processes: int) -> None:
        """One more batch is handed out."""
        self.num_batches += 1
        if self.samples_per_batch is not None:
            num_samples = self.num_batches * self.samples_per_batch
            limit = self.samples_limit
            self.num_samples = num_samples if limit is None else min(num_samples, limit)
        elif num_samples_here is not None:
            self.num_samples += num_samples_here * num_processes

    def was_interrupted(self) -> bool:
        """Whether this pass ended by the exception that is being handled right now."""
        if self.failure is not None:
            error = sys.exc_info()[1]
            while error is not None and id(error) != self.failure:
                error = error.__context__
            return error is not None
        return bool(self.holders) and is_being_handled(self.holders)


class Follower:
    """Counts what one loader hands out. Subclasses remember what is needed to go on exactly.

    This base serves the kinds of loaders whose position this version cannot restore: `capture` says where they
    stood and why that is all.
    """

    def __init__(self, loader: Any, kind: LoaderKind) -> None:
        self.kind = kind
        self.num_passes = int(getattr(loader, "iteration", 0))
        self.samples_before = 0
        self.current: Pass | None = None
        self.last: Pass | None = None
        self.was_used_untracked = self.num_passes > 0
        self._loader = weakref.ref(loader)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return type(None), ()  # a copied or pickled loader is followed by nobody

    @property
    def loader(self) -> Any:
        """The loader that is followed."""
        return self._loader()

    @property
    def is_waiting(self) -> bool:
        """Whether the loader will go on in the middle of a pass when it is iterated next."""
        return False

    # What the loader calls

    def iterate(self, loader: Any, start: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Pass on what the loader's own `__iter__` (`start`) delivers, and count it."""
        this = self._open(loader)
        if this is None:
            return
        try:
            for batch in start():
                if this.is_void:
                    raise _make_void_error()
                self._count(this, batch)
                if _observer is not None:
                    _observer(self, batch)
                yield batch
            this.is_exhausted = True
        except GeneratorExit:
            this.holders = note_holders(sys._getframe(1))
            raise
        except BaseException as error:
            this.failure = id(error)
            raise
        finally:
            self._close(loader, this)

    def note_derived_loader(self) -> None:
        """`skip_first_batches` is copying the loader: an error where a restored position waits in it."""

    def _open(self, loader: Any) -> Pass | None:
        """A pass begins; None if it has nothing to deliver."""
        self._end(self.current)
        self.current = self._make_pass(loader)
        self.was_used_untracked = False
        return self.current

    def _make_pass(self, loader: Any) -> Pass:
        return Pass(loader)

    def _count(self, this: Pass, batch: Any) -> None:
        this.count_batch(None, 1)

    def _close(self, loader: Any, this: Pass) -> None:
        if this is self.current:
            self._end(this)

    def _end(self, this: Pass | None) -> None:
        if this is None or this.is_over:
            return
        this.is_over = this.is_void = True
        self.num_passes += 1
        self.samples_before += this.num_samples
        self.current, self.last = None, this

    # What the tracker calls

    def get_position(self) -> LoaderPosition:
        """Passes ended, batches handed out in this pass, samples handed out."""
        this = self.current
        if this is None:
            return LoaderPosition(self.num_passes, 0, self.samples_before)
        return LoaderPosition(self.num_passes, this.num_batches, self.samples_before + this.num_samples)

    def begin_training(self) -> None:
        """Count from here on; a pass in progress stays one."""
        self.num_passes = 0
        self.samples_before = 0
        self.last = None
        self.was_used_untracked = False

    def find_pass(self) -> tuple[Pass | None, int, int]:
        """The pass that a save now is in, passes ended before it, and samples handed out in those.

        A pass that is being left by the exception that is handled right now counts as going on.
        """
        this = self.current
        if this is None and self.last is not None and self.last.was_interrupted():
            this = self.last
            return this, self.num_passes - 1, self.samples_before - this.num_samples
        return this, self.num_passes, self.samples_before

    def capture(self, index: int, rng: RngSnapshot) -> LoaderProgress:
        """Where the loader stands, with the random state that this kind of loader needs to go on."""
        return self.record(index)

    def record(self, index: int, reason: str | None = None) -> LoaderProgress:
        """Where the loader stands, without what is needed to go on; `reason` says why that is all."""
        this, epoch, samples_before = self.find_pass()
        state: PassState = "idle"
        if this is not None and this.num_batches > 0:
            state = "exhausted" if this.is_exhausted else "running"
        return LoaderProgress(
            index=index,
            kind=self.kind.name,
            exact=False,
            restorable=False,
            reason=reason or self.kind.explain(self.loader, state),
            contract=describe_contract(self.loader),
            state=state,
            epoch=epoch,
            batch=this.num_batches if this is not None else 0,
            samples=samples_before + (this.num_samples if this is not None else 0),
            samples_before_epoch=samples_before,
            iteration=this.iteration if this is not None else int(getattr(self.loader, "iteration", 0)),
        )

    def validate(self, saved: LoaderProgress, data_resume: str) -> None:
        """Raise DataProgressError if `saved` cannot be put into this loader; changes nothing."""

    def restore(self, saved: LoaderProgress, session: RestoreSession) -> LoaderOutcome:
        """Put the loader where `saved` says, as far as this kind can."""
        if saved.is_untouched:
            self.apply_counters(saved)
            return LoaderOutcome(saved.index, "restored", None, 0, 0)
        return self.restore_epoch(saved, saved.reason or "this kind of loader is not restored")

    def restore_epoch(self, saved: LoaderProgress, reason: str) -> LoaderOutcome:
        """Put only the epoch numbers back: the pass that was being made begins anew."""
        self.apply_counters(saved)
        return LoaderOutcome(saved.index, "absent", reason, saved.epoch, 0)

    def apply_counters(self, saved: LoaderProgress) -> None:
        """Set the counters, ours and Accelerate's. A pass of this process that is in progress ends here."""
        if self.current is not None:
            self.current.is_over = self.current.is_void = True
        self.current = self.last = None
        self.num_passes = saved.epoch
        self.samples_before = saved.samples_before_epoch
        self.was_used_untracked = False
        if hasattr(self.loader, "iteration"):
            self.loader.iteration = saved.iteration

    def check_undisturbed(self) -> None:
        """Raise DataProgressError if a restored position that is still waiting has been bypassed."""


def make_outcome(saved: LoaderProgress, reason: str | None) -> LoaderOutcome:
    """The outcome of a position that was restored, exactly unless there is a reason why not."""
    status: Status = "restored" if reason is None else "approximate"
    return LoaderOutcome(saved.index, status, reason, saved.epoch, saved.batch)


def _make_void_error() -> DataProgressError:
    return DataProgressError(
        "this iteration over the loader cannot go on: a newer iteration began, or progress was restored while it "
        "was running. Leave the loop and start it again after load_state, and iterate a loader once at a time."
    )


def get_follower(loader: Any) -> Follower | None:
    """The follower of a loader, None if it is not followed."""
    follower = getattr(loader, "__dict__", {}).get(_KEY)
    return follower if isinstance(follower, Follower) and follower.loader is loader else None


def install(loader: Any, follower: Follower) -> None:
    """Let `follower` see every iteration over `loader`."""
    loader.__dict__[_KEY] = follower
    # Accelerate's loaders hide their class behind a property, which a plain assignment would meet.
    object.__dict__["__class__"].__set__(loader, _get_followed_class(type(loader)))


_followed_classes: dict[type, type] = {}


def _get_followed_class(cls: type) -> type:
    if cls not in _followed_classes:
        _followed_classes[cls] = _make_followed_class(cls)
    return _followed_classes[cls]


def _make_followed_class(cls: Any) -> type:
    def iterate(self: Any) -> Iterator[Any]:
        follower = get_follower(self)
        start = functools.partial(cls.__iter__, self)
        return start() if follower is None else follower.iterate(self, start)

    def read_iteration(self: Any) -> Any:
        if sys._getframe(1).f_code.co_name == _SKIPPER:
            follower = get_follower(self)
            if follower is not None:
                follower.note_derived_loader()
        try:
            return self.__dict__[_SKIPPER_READS]
        except KeyError:
            raise AttributeError(_SKIPPER_READS) from None

    def write_iteration(self: Any, value: Any) -> None:
        self.__dict__[_SKIPPER_READS] = value

    return type(
        cls.__name__,
        (cls,),
        {
            "__iter__": iterate,
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            "__doc__": cls.__doc__,
            _SKIPPER_READS: property(read_iteration, write_iteration),
        },
    )
