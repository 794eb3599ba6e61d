"""`load_state`: everything is checked before anything is loaded, and every kind of state is accounted for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from . import background, contract, layout
from .commit import PARTIAL, find_checkpoints, find_interrupted, looks_like_checkpoint, recover
from .errors import (
    CheckpointIncompleteError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
    MismatchError,
    UnsupportedError,
    UsageError,
)
from .files import check_files, list_files
from .formats.scan import scan_checkpoint
from .live import describe_topology, is_fsdp, list_explained
from .load_notes import LoadNotes, build_report
from .load_objects import load_objects
from .manifest import DIRECTORY, Manifest, find_manifest, has_manifest
from .model_changes import ModelChanges, ModelPlan, Rename, make_plans
from .pace import restore_paces
from .permissions import Permissions
from .prepared import get_prepared
from .progress import check_data_resume
from .progress import track as track_loaders
from .rank_restore import read_rank_part, restore_objects, restore_rank_part
from .ranks import gather_all, get_rank, get_world_size, run_on_each, run_on_main, run_together, wait_for_ranks
from .report import LoadReport
from .statistics import TensorStatistics
from .steps import follow_steps
from .verify_live import compare_with_checkpoint, require_verified, take_statistics
from .verify_states import verify_states

if TYPE_CHECKING:
    from accelerate import Accelerator

VERIFY_MODES = ("auto", "full", "fingerprint", "sample", "stats", "files", "size", "off")
# These compare memory with the checkpoint afterwards; all of them have checked the files' sums before.
COMPARES_MEMORY = ("auto", "full", "fingerprint", "sample", "stats")
READS_CHECKSUMS = frozenset(VERIFY_MODES) - {"size", "off"}


def load_state(
    accelerator: Accelerator,
    input_dir: str | Path,
    *,
    verify: str = "auto",
    strict: bool = True,
    elastic: str = "refuse",
    allow: Sequence[str] = (),
    rename: Rename | None = None,
    allow_missing: Sequence[str] = (),
    allow_unexpected: Sequence[str] = (),
    resize: Sequence[str] = (),
    allow_after_step: bool = False,
    allow_objects: Sequence[str] = (),
    data_resume: str = "skip",
    timeout_s: float | None = None,
) -> LoadReport:
    """Load a checkpoint into prepared objects and report what was restored, and how well.

    Before anything is loaded: the manifest is compared with the run (objects, shapes, FSDP and ranks), every file is
    checked against its recorded size and checksum, each file by one rank, and every pickle that Accelerate or torch
    would open is scanned without executing it. After it a plain `for batch in loader` goes on inside the epoch.

    Loads checkpoints of `save_state` and of plain `accelerator.save_state`; the latter hold no data progress, so the
    report is not exact. Collective. Peak memory is that of Accelerate's own load.

    Args:
        accelerator: with the same objects prepared, in the same order, as at the save; no update made yet.
        input_dir: the checkpoint's directory, the same on every rank.
        verify: before the load, all but "size" (sizes and presence only) and "off" check every file's checksum.
            After it, "auto", "full", "fingerprint", "sample" and "stats" compare models and optimizers in memory, as
            `verify_model` does ("stats" also tells what did not change in the load), and then scheduler, grad scaler,
            random generators and data progress; "files", "size" and "off" don't.
        strict: raise where a piece is missing or cannot be restored exactly because the run differs; False goes on
            with what can be restored and says in the report what is not exact.
        elastic: what to do on another number of ranks, or with another batch size or accumulation. "exact" goes on
            if every update is made of the same samples as it would have been, "allow" at the same sample in any case,
            and the report says what is other; "refuse" raises. See `docs/elastic.md`.
        allow: other differences to put up with, by name: "dataset" (its length), "num_workers", "mixed_precision",
            "dtype", "device_type". They are reported.
        rename, allow_missing, allow_unexpected, resize: what has changed in the model since the save: new names by old
            ones (of tensors or modules; or a function), tensors that only the model or only the checkpoint has, and
            tensors with another first dimension, by name or pattern. Without them any difference is an error, and so
            is any that they don't name. See `docs/elastic.md`.
        allow_after_step: go back to a checkpoint although updates have been made.
        allow_objects: classes ("module.Name") that registered objects' files may contain beside tensors and
            containers. Unpickling them runs their code: name only what you trust.
        data_resume: how loaders get behind the batches that were handed out. "skip" reads none of them where that is
            possible (indices, or a stream with a state of its own); other streams are read again from the beginning
            of their pass. "replay" reads and drops them where that makes more exact: workers then draw again what they
            drew. "refuse" is "skip", but raises where a stream would have to be read again.
        timeout_s: how long to wait for a rank that does not arrive.

    Raises:
        CheckpointNotFoundError: there is no checkpoint at `input_dir`.
        CheckpointIncompleteError, DamagedCheckpointError, ManifestError: it is not whole.
        MismatchError: it is a checkpoint of something else, or of another set-up.
        UnsafePickleError: a file names code that a checkpoint has no need for; nothing was executed.
        CallOrderError: before `prepare`, or after an update.
        RngStateError, DataProgressError: a rank's generators or a loader's place are missing or unreadable.
    """
    return load_checkpoint(
        accelerator,
        input_dir,
        LoadNotes(),
        verify=verify,
        permissions=Permissions.make(strict=strict, elastic=elastic, allow=allow),
        changes=ModelChanges.make(rename, allow_missing, allow_unexpected, resize),
        allow_after_step=allow_after_step,
        allow_objects=allow_objects,
        data_resume=data_resume,
        timeout_s=timeout_s,
    )


def load_checkpoint(
    accelerator: Accelerator,
    input_dir: str | Path,
    findings: LoadNotes,
    *,
    verify: str = "auto",
    permissions: Permissions,
    changes: ModelChanges | None = None,
    allow_after_step: bool = False,
    allow_objects: Sequence[str] = (),
    data_resume: str = "skip",
    timeout_s: float | None = None,
) -> LoadReport:
    """Do what `load_state` promises; `findings`, given empty, tell the caller of a load that fails how far it came."""
    background.wait_alone()  # what is being written may be this very checkpoint
    wait_for_ranks("load_state", timeout_s=timeout_s)
    directory = Path(input_dir).expanduser().absolute()
    run_on_main("recovering", lambda: _recover(directory))
    check_data_resume(data_resume)
    run_together("checking before the load", lambda: _check_before(accelerator, directory, verify, allow_after_step))
    manifest = run_on_each("reading the manifest", lambda: find_manifest(directory))
    _check_same_view(directory, manifest)
    kind = run_on_each("looking at the files", lambda: layout.detect_state_dict_type(directory))
    plans = run_on_each("planning the models", lambda: _make_plans(accelerator, directory, manifest, kind, changes))
    run_together("comparing", lambda: _compare(accelerator, directory, manifest, kind, plans, permissions, findings))
    run_together("checking the files", lambda: _check_files(directory, manifest, verify, permissions.strict, findings))
    run_together(
        "scanning for code in pickles",
        lambda: scan_checkpoint(directory, allow_objects=allow_objects, share=(get_rank(), get_world_size())),
    )
    part = read_rank_part(
        accelerator, directory, manifest, permissions=permissions, data_resume=data_resume, notes=findings
    )
    findings.has_begun = True
    before = take_statistics(get_prepared(accelerator)) if verify == "stats" else None
    load_objects(accelerator, directory, manifest, kind, plans, findings, verify=verify in COMPARES_MEMORY)
    if verify in COMPARES_MEMORY and plans is None:
        verify_memory(accelerator, directory, verify, before, findings)
    if manifest is not None:
        restore_objects(accelerator, directory, manifest, findings)
    outcomes = restore_rank_part(accelerator, manifest, part, strict=permissions.strict, notes=findings)
    if verify in COMPARES_MEMORY:
        require_verified(verify_states(accelerator, directory, manifest, part, outcomes, findings))
    if manifest is not None:
        run_on_each("setting the schedulers' pace", lambda: _set_paces(accelerator, manifest, findings))
    return build_report(accelerator, directory, manifest, findings)


def _recover(directory: Path) -> None:
    if not directory.exists() and find_interrupted(directory):
        recover(directory.parent)


def _check_before(accelerator: Accelerator, directory: Path, verify: str, allow_after_step: bool) -> None:
    if verify not in VERIFY_MODES:
        raise UsageError(f"verify is {verify!r}; use one of {', '.join(VERIFY_MODES)}", actual=verify)
    contract.check_setup(accelerator)
    if not allow_after_step:
        contract.check_not_stepped(accelerator, follow_steps(accelerator).count)
    check_is_checkpoint(directory)
    track_loaders(accelerator)


def check_is_checkpoint(directory: Path) -> None:
    """Make sure that `directory` can be a checkpoint, ours or Accelerate's. Not collective.

    Raises:
        CheckpointNotFoundError: nothing is there, or a file, or a directory without a checkpoint.
        CheckpointIncompleteError: a save that never completed.
    """
    if not directory.exists():
        raise CheckpointNotFoundError(
            f"{directory} does not exist. Check the path; on several nodes it has to be on shared storage.",
            path=str(directory),
        )
    if not directory.is_dir():
        raise CheckpointNotFoundError(f"{directory} is a file; give the checkpoint's directory.", path=str(directory))
    if has_manifest(directory):
        return
    if PARTIAL in directory.parts or (directory / DIRECTORY).exists():
        raise CheckpointIncompleteError(
            f"{directory} is a save that was never completed (it has no manifest). Use another checkpoint.",
            path=str(directory),
        )
    if not looks_like_checkpoint(directory):
        inside = [each.path.name for each in find_checkpoints(directory)]
        hint = (
            f" It holds the checkpoints {', '.join(inside[-5:])}: give one of them, or use Checkpointer.resume()."
            if inside
            else ""
        )
        raise CheckpointNotFoundError(f"{directory} holds no checkpoint.{hint}", path=str(directory))


def _check_same_view(directory: Path, manifest: Manifest | None) -> None:
    ids = gather_all(None if manifest is None else manifest.lineage.checkpoint_id)
    different = [rank for rank, each in enumerate(ids) if each != ids[0]]
    if different:
        raise MismatchError(
            f"{directory} is not the same checkpoint on every rank (rank {different[0]} sees another one than rank 0). "
            "Give every rank the same path, on shared storage.",
            path=str(directory),
            rank=different[0],
            expected=ids[0],
            actual=ids[different[0]],
        )


def _make_plans(
    accelerator: Accelerator,
    directory: Path,
    manifest: Manifest | None,
    kind: str | None,
    changes: ModelChanges | None,
) -> tuple[ModelPlan, ...] | None:
    """Find out where every tensor comes from, if the caller says that the model has changed."""
    if changes is None:
        return None
    if manifest is None or kind is None:
        raise UnsupportedError(
            f"{directory}: rename, allow_missing, allow_unexpected and resize work with checkpoints that this package "
            "has saved under FSDP. Load this one into the model as it was, and save it with save_state.",
            path=str(directory),
        )
    return make_plans(manifest.models, contract.describe_models(accelerator), changes)


def _compare(
    accelerator: Accelerator,
    directory: Path,
    manifest: Manifest | None,
    kind: str | None,
    plans: Sequence[ModelPlan] | None,
    permissions: Permissions,
    findings: LoadNotes,
) -> None:
    if (kind is not None) != is_fsdp(accelerator):
        saved, live = ("with", "without") if kind is not None else ("without", "with")
        raise MismatchError(
            f"{directory} was saved {saved} FSDP and this run is {live} it. Start the run as it was saved.",
            path=str(directory),
            expected=kind,
            actual=str(accelerator.distributed_type.value),
        )
    if manifest is not None:
        differences = contract.compare_with_manifest(accelerator, manifest, plans)
        contract.raise_on_differences(directory, differences, permissions)
    else:
        # What a foreign checkpoint lacks is reported, not refused: it never promised to be exact.
        differences = contract.compare_without_manifest(accelerator, directory, kind)
        contract.raise_on_differences(directory, differences, Permissions(strict=False))
    contract.check_complete(accelerator, directory, kind, checks_names=plans is None)
    for difference in differences:
        # What elastic covers of the data is judged, and noted, loader by loader.
        if difference.state != "data" or not permissions.permits(difference.argument):
            findings.reasons[difference.state].append(difference.text)
    _note_adaptations(accelerator, manifest, kind, findings)


def _note_adaptations(
    accelerator: Accelerator, manifest: Manifest | None, kind: str | None, findings: LoadNotes
) -> None:
    plugin = accelerator.state.fsdp_plugin if kind is not None else None
    if plugin is None:
        return
    if plugin.state_dict_type.name != kind:
        findings.notes.append(
            f"the checkpoint is {kind}, this run saves {plugin.state_dict_type.name}; loaded as what it is"
        )
    if manifest is None:
        return
    for model, facts in zip(accelerator._models, manifest.models, strict=False):
        explained = list_explained(model, {tensor.fqn: tensor.dtype for tensor in facts.tensors})
        if explained:
            findings.notes.append(
                f"{len(explained)} buffer(s) have another dtype in the checkpoint than this run would save "
                f"({explained[0]}): FSDP1's mixed precision casts buffers, and casts them back for units with "
                "parameters of their own only; they were loaded into the dtype that they have here in memory"
            )
    was, now = manifest.topology, describe_topology(accelerator)
    if was.fsdp_version not in (None, now.fsdp_version):
        findings.reasons["model"].append(
            f"saved under FSDP {was.fsdp_version}, loaded under FSDP {now.fsdp_version}: its arithmetic may round "
            "differently"
        )
    elif (was.sharding_strategy, was.mesh) != (now.sharding_strategy, now.mesh):
        findings.reasons["model"].append(
            f"sharded as {was.sharding_strategy or was.mesh} at the save, as {now.sharding_strategy or now.mesh} now: "
            "sums over ranks may round differently"
        )


def _check_files(directory: Path, manifest: Manifest | None, verify: str, strict: bool, findings: LoadNotes) -> None:
    """Check this rank's part of the files: those of its own state, and its share of all others."""
    if verify == "off" or manifest is None:
        return
    rank, world_size = get_rank(), get_world_size()
    checksums = verify != "size"
    shared = [file for file in manifest.files if not file.path.startswith(f"{DIRECTORY}/")]
    check_files(directory, shared[rank::world_size], checksums=checksums)
    own = [
        file
        for file in manifest.files
        if file.path.startswith(f"{DIRECTORY}/") and layout.get_writer_rank(file.path) % world_size == rank
    ]
    try:
        check_files(directory, own, checksums=checksums)
    except (CheckpointIncompleteError, DamagedCheckpointError) as error:
        if strict:
            raise
        findings.absent["rng"] = findings.absent["data"] = str(error)
    if rank == 0:
        listed = {file.path for file in manifest.files}
        extra = [name for name in list_files(directory) if name not in listed and name != f"{DIRECTORY}/manifest.json"]
        if extra:
            findings.notes.append(f"{len(extra)} file(s) that the manifest does not list: {', '.join(extra[:5])}")


def _set_paces(accelerator: Accelerator, manifest: Manifest, findings: LoadNotes) -> None:
    for each in restore_paces(accelerator, manifest.accelerate, manifest.topology.world_size):
        (findings.notes if each.is_exact else findings.reasons["scheduler"]).append(each.text)


def verify_memory(
    accelerator: Accelerator,
    directory: Path,
    verify: str,
    before: Mapping[str, TensorStatistics] | None,
    findings: LoadNotes,
) -> None:
    """Compare what was loaded with what was saved; raise on every rank if it differs. Collective.

    Args:
        verify: one of `COMPARES_MEMORY`.
        before: as for `compare_with_checkpoint`.
    """
    report = compare_with_checkpoint(
        get_prepared(accelerator), directory, mode=verify, checks_sums=False, before=before
    )
    require_verified(report)
    counts = ", ".join(f"{count} {name}" for name, count in report.counts.items())
    findings.notes.append(f"memory was compared with the checkpoint ({report.mode}: {counts})")
    findings.notes.extend(f"{each.severity.value}: {each.message}" for each in report.findings)
