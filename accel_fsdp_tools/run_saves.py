"""How a run saves: what it has saved last, its save in flight, and what follows a commit."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arguments import check_positive
from .assets import check_tokenizer
from .background import PendingSave
from .keeping import settle_checkpoint
from .manifest import Lineage
from .ranks import broadcast, run_on_main
from .records import pin
from .retention import RetentionPolicy
from .save import SaveOrder, get_run_id, start_checkpoint, write_checkpoint
from .survey import get_name

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SavePlan:
    """What a `Checkpointer` was given for its saves; see there. Checked when made."""

    root: Path
    every: int | None
    every_s: float | None
    policy: RetentionPolicy | None
    verify: str
    strict: bool
    tokenizer: Any
    timeout_s: float | None

    def __post_init__(self) -> None:
        check_positive("save_every", self.every, int)
        check_positive("save_every_s", self.every_s, (int, float))
        check_tokenizer(self.tokenizer)


class RunSaves:
    """The saves of one run, from a resume on.

    Attributes:
        parent_id: of the checkpoint that the next one follows in the lineage.
    """

    def __init__(self, accelerator: Accelerator, plan: SavePlan) -> None:
        self._accelerator, self._plan = accelerator, plan
        self.parent_id: str | None = None
        self._last_began = time.monotonic()
        self._pending: PendingSave | None = None
        self._saved: tuple[int, Path] | None = None
        self._step = 0  # of the save in flight

    @property
    def is_busy(self) -> bool:
        """Whether a save is in flight, or has ended and nobody has asked what it came to."""
        return self._pending is not None

    def begin(self, parent_id: str | None) -> None:
        """The run goes on from `parent_id`, or starts."""
        self.parent_id, self._last_began, self._saved = parent_id, time.monotonic(), None

    def is_due(self, step: int) -> bool:
        """Whether a save is due after this update. Collective if that is a matter of time."""
        if self._plan.every is not None and step % self._plan.every == 0:
            return True
        if self._plan.every_s is None:
            return False
        # Clocks differ: rank 0's decides, or some ranks would enter the save and others not.
        return broadcast(time.monotonic() - self._last_began >= self._plan.every_s)

    def write(
        self,
        step: int,
        *,
        epoch: int | None,
        attempt: int,
        metrics: Mapping[str, float | str],
        pinned: bool,
        in_background: bool,
    ) -> Path:
        """Save, read back, and remove what nothing keeps any longer. Collective; none may be in flight.

        Returns:
            The checkpoint's path; the one that it will have, if that goes on in the background.
        """
        path, plan = self._plan.root / get_name(step), self._plan
        order = SaveOrder(
            attempt=attempt,
            parent_id=self.parent_id,
            step=step,
            epoch=epoch,
            strict=plan.strict,
            tokenizer=plan.tokenizer,
            timeout_s=plan.timeout_s,
            extra={"metrics": metrics},
        )

        def settle(path: Path, lineage: Lineage) -> None:
            if pinned:
                run_on_main("pinning", lambda: pin(plan.root, lineage.checkpoint_id, name=path.name))
            settle_checkpoint(path, lineage, policy=plan.policy, verify=plan.verify, run_id=get_run_id())

        if in_background:
            self._pending, self._step = start_checkpoint(self._accelerator, path, order, follow=settle), step
            self._last_began = time.monotonic()
            return path
        path, lineage = write_checkpoint(self._accelerator, path, order)
        self.parent_id, self._last_began, self._saved = lineage.checkpoint_id, time.monotonic(), (step, path)
        settle(path, lineage)
        return path

    def find_saved(self, step: int) -> Path | None:
        """Return the committed checkpoint of `step`, if the last one is that."""
        return self._saved[1] if self._saved is not None and self._saved[0] == step else None

    def is_done(self) -> bool:
        """Whether the save in flight is over on rank 0, which decides for all. Collective if there is one."""
        return self._pending is not None and broadcast(self._pending.done)

    def finish(self) -> Path | None:
        """Wait for the save in flight and return its path, None if there is none. Collective if there is one.

        Raises:
            What it has failed with, the same on every rank.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        try:
            return pending.wait()
        finally:
            if pending.is_committed:
                self.parent_id, self._saved = pending.checkpoint_id, (self._step, pending.path)

    def finish_alone(self) -> None:
        """Let this rank's part of the save in flight end, and log what it fails with. Not collective."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait_alone()
            if pending.failure is not None:
                logger.error("%s was not saved: %s", pending.path, pending.failure)

    def discard(self) -> None:
        """Give the save in flight up. Collective if there is one."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.discard()
