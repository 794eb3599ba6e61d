"""How a run loads: the newest whole checkpoint of its root, or the one that is named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .arguments import check_choice, check_positive
from .load import READS_CHECKSUMS, VERIFY_MODES, load_checkpoint
from .load_notes import LoadNotes
from .manifest import has_manifest, read_manifest
from .model_changes import ModelChanges
from .permissions import Permissions
from .progress import check_data_resume
from .ranks import run_on_main
from .report import LoadReport
from .resuming import ON_DAMAGE, Resumed, load_newest
from .save import get_run_id

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclass(frozen=True)
class RunLoads:
    """What a `Checkpointer` was given for its loads; see there. Checked when made."""

    accelerator: Accelerator
    root: Path
    on_damage: str
    max_resumes: int | None
    verify: str
    permissions: Permissions
    allow_objects: Sequence[str]
    data_resume: str
    timeout_s: float | None

    def __post_init__(self) -> None:
        check_choice("verify", self.verify, VERIFY_MODES)
        check_choice("on_damage", self.on_damage, ON_DAMAGE)
        check_positive("max_resumes", self.max_resumes, int)
        check_positive("timeout_s", self.timeout_s, (int, float))
        check_data_resume(self.data_resume)

    def load_newest(self, changes: ModelChanges | None) -> Resumed:
        """Load the newest whole checkpoint of the root, if there is one. Collective."""
        return load_newest(
            self.accelerator,
            self.root,
            lambda path, allow_after_step, notes: self._load(path, allow_after_step, notes, changes),
            on_damage=self.on_damage,
            max_resumes=self.max_resumes,
            verifies=self.verify in READS_CHECKSUMS,
            run_id=get_run_id(),
        )

    def load_named(self, path: Path, changes: ModelChanges | None) -> Resumed:
        """Load the checkpoint at `path`. Collective."""
        report = self._load(path, True, LoadNotes(), changes)

        def describe() -> tuple[str | None, int]:
            if not has_manifest(path):
                return None, 0
            manifest = read_manifest(path)
            return manifest.lineage.checkpoint_id, max(manifest.step, 0)

        checkpoint_id, step = run_on_main("reading the step", describe)
        return Resumed(path, checkpoint_id, step, report)

    def _load(self, path: Path, allow_after_step: bool, notes: LoadNotes, changes: ModelChanges | None) -> LoadReport:
        return load_checkpoint(
            self.accelerator,
            path,
            notes,
            verify=self.verify,
            permissions=self.permissions,
            changes=changes,
            allow_after_step=allow_after_step,
            allow_objects=self.allow_objects,
            data_resume=self.data_resume,
            timeout_s=self.timeout_s,
        )
