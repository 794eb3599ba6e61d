"""The manifest: what a checkpoint holds and how it came about. Written last; no manifest, no checkpoint.

Plain JSON, versioned. A newer reader accepts every older version; a manifest of a newer version is refused, since
what it adds may matter. Unknown keys of the same version are kept out of the way, not an error. The manifest vouches
for all other files by their checksums, and for itself by a digest of what it says.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from .errors import ManifestError, ManifestVersionError
from .files import CHECKSUM_ALGORITHM, FileFacts, resolve_inside, write_json_durably

FORMAT = "accel_fsdp_tools.manifest"
VERSION = 2
_FIRST_WITH_DIGEST = 2  # from this version on a manifest without one is damaged: a flip in the key would remove it
DIRECTORY = "accel_fsdp_tools"  # inside a checkpoint: everything that is ours
MANIFEST_PATH = f"{DIRECTORY}/manifest.json"

WRITER, TRAINER = "writer", "trainer"  # in `extra`: whose files these are, where they are not Accelerate's
STATES = ("model", "optimizer", "scheduler", "rng", "data")


@dataclass(frozen=True)
class TensorFacts:
    """One parameter or persistent buffer: its whole shape, whatever the sharding."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    requires_grad: bool
    kind: str  # "parameter" or "buffer"
    fingerprint: str | None = None  # of the values in memory when it was saved; None where copies differed
    statistics: Mapping[str, Any] | None = None  # of the same values: count, sum, NaN, ... (statistics.py)


@dataclass(frozen=True)
class ModelFacts:
    """One prepared model.

    `ties` lists groups of names that are one tensor; `config` is transformers' own. `architecture` is what an export
    needs to know, for `architecture.ArchitectureFacts.from_dict`: looked at by exports only, so that nothing in it can
    be in the way of a resume.
    """

    class_name: str
    tensors: tuple[TensorFacts, ...]
    ties: tuple[tuple[str, ...], ...] = ()
    config: Mapping[str, Any] | None = None
    is_peft: bool = False
    architecture: Mapping[str, Any] | None = None

    @property
    def fingerprints(self) -> dict[str, str]:
        """The recorded fingerprints by name."""
        return {tensor.fqn: tensor.fingerprint for tensor in self.tensors if tensor.fingerprint is not None}


@dataclass(frozen=True)
class OptimizerFacts:
    """One prepared optimizer: class, hyper-parameters per group, and the parameters that have state."""

    class_name: str
    num_param_groups: int
    num_parameters: int
    model_index: int
    stateless: tuple[str, ...] = ()  # trainable parameters that had no state yet (never got a gradient)
    is_empty: bool = False  # no state at all: no update had been made
    fingerprints: Mapping[str, str] = field(default_factory=dict)  # of states and options, by name
    statistics: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # of states, by name


@dataclass(frozen=True)
class Topology:
    """How the run was spread over ranks."""

    world_size: int
    distributed_type: str
    fsdp_version: int | None = None
    state_dict_type: str | None = None
    use_orig_params: bool | None = None
    sharding_strategy: str | None = None
    mixed_precision: str = "no"
    device_type: str = "cpu"
    mesh: Mapping[str, int] | None = None


@dataclass(frozen=True)
class Lineage:
    """Where a checkpoint stands in the history of its root.

    `attempt` counts starts of the run: a later attempt supersedes an earlier one whatever its step, which is what
    makes a branch that was abandoned by going back stop being the newest.
    """

    checkpoint_id: str
    run_id: str
    attempt: int
    parent_id: str | None = None


@dataclass(frozen=True)
class Manifest:
    """Everything that is recorded about one checkpoint."""

    created_at: str
    step: int
    epoch: int
    lineage: Lineage
    topology: Topology
    versions: Mapping[str, str]
    states: Mapping[str, Any]
    files: tuple[FileFacts, ...]
    models: tuple[ModelFacts, ...]
    optimizers: tuple[OptimizerFacts, ...]
    num_schedulers: int
    num_dataloaders: int
    num_custom_objects: int
    accelerate: Mapping[str, Any]  # accelerator.step, save_iteration, accumulation
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @property
    def is_of_trainer(self) -> bool:
        """Whether transformers' Trainer wrote the files, in its own layout."""
        return self.extra.get(WRITER) == TRAINER

    @property
    def order(self) -> tuple[int, int]:
        """Sorts checkpoints of one root from oldest to newest along the lineage."""
        return self.lineage.attempt, self.step

    def to_dict(self) -> dict[str, Any]:
        body = dataclasses.asdict(self)
        return {"format": FORMAT, "version": VERSION, "checksum": CHECKSUM_ALGORITHM, **body}


def compute_digest(raw: Mapping[str, Any]) -> str:
    """Return the xxh3_128 of what a manifest says, as canonical JSON without its own `digest`.

    Independent of white space and the order of keys, so that a manifest may be reformatted.
    """
    body = {key: value for key, value in raw.items() if key != "digest"}
    return xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write the manifest into `directory` durably."""
    raw = manifest.to_dict()
    write_json_durably(directory / MANIFEST_PATH, {**raw, "digest": compute_digest(raw)})


def has_manifest(directory: Path) -> bool:
    """Whether `directory` is a checkpoint that was completed by this package."""
    return (directory / MANIFEST_PATH).is_file()


def find_manifest(checkpoint: Path) -> Manifest | None:
    """Return the manifest of a checkpoint, None if it has none. Raises what `read_manifest` does."""
    return read_manifest(checkpoint) if has_manifest(checkpoint) else None


def read_manifest(directory: Path) -> Manifest:
    """Read and check the manifest of the checkpoint at `directory`.

    Raises:
        ManifestError: it is missing, is not JSON, does not match its digest, or lacks or mistypes something.
        ManifestVersionError: a newer version of this package wrote it.
    """
    path = directory / MANIFEST_PATH
    advice = "Use another checkpoint, or load this one without a manifest by plain accelerator.load_state."
    try:
        raw = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ManifestError(f"{path} does not exist: this is no completed checkpoint.", path=str(path)) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ManifestError(f"{path} cannot be read: {error}. {advice}", path=str(path)) from error
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise ManifestError(f"{path} is not a manifest of this package. {advice}", path=str(path))
    version = raw.get("version")
    if not isinstance(version, int) or version < 1:
        raise ManifestError(f"{path} states the version {version!r}. {advice}", path=str(path), actual=version)
    if version > VERSION:
        raise ManifestVersionError(
            f"{path} has version {version}; this accel_fsdp_tools reads up to {VERSION}. Upgrade accel_fsdp_tools.",
            path=str(path),
            expected=VERSION,
            actual=version,
        )
    _check_digest(path, raw, version, advice)
    try:
        manifest = _build_manifest(raw)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ManifestError(
            f"{path} is incomplete or damaged ({type(error).__name__}: {error}). {advice}", path=str(path)
        ) from error
    for file in manifest.files:
        resolve_inside(directory, file.path)
    return manifest


def _check_digest(path: Path, raw: Mapping[str, Any], version: int, advice: str) -> None:
    if "digest" not in raw and version < _FIRST_WITH_DIGEST:
        return
    expected, actual = raw.get("digest"), compute_digest(raw)
    if expected != actual:
        raise ManifestError(
            f"{path} is damaged: the {CHECKSUM_ALGORITHM} of what it says is {actual}, its digest is {expected!r}. "
            f"{advice}",
            path=str(path),
            expected=expected,
            actual=actual,
        )


def _pick(cls: type[Any], raw: Mapping[str, Any], **converted: Any) -> Any:
    """Build a dataclass from the keys of `raw` that it has; unknown keys are left out."""
    values = {
        each.name: raw[each.name] for each in dataclasses.fields(cls) if each.name in raw and each.name not in converted
    }
    return cls(**values, **converted)


def _build_manifest(raw: Mapping[str, Any]) -> Manifest:
    files = tuple(FileFacts(str(each["path"]), int(each["size_bytes"]), str(each["checksum"])) for each in raw["files"])
    models = tuple(
        _pick(
            ModelFacts,
            each,
            tensors=tuple(
                _pick(TensorFacts, tensor, shape=tuple(int(size) for size in tensor["shape"]))
                for tensor in each["tensors"]
            ),
            ties=tuple(tuple(group) for group in each.get("ties", ())),
        )
        for each in raw["models"]
    )
    optimizers = tuple(
        _pick(OptimizerFacts, each, stateless=tuple(each.get("stateless", ()))) for each in raw["optimizers"]
    )
    manifest: Manifest = _pick(
        Manifest,
        raw,
        step=int(raw["step"]),
        epoch=int(raw["epoch"]),
        lineage=_pick(Lineage, raw["lineage"]),
        topology=_pick(Topology, raw["topology"]),
        files=files,
        models=models,
        optimizers=optimizers,
    )
    _check_types(manifest)
    return manifest


def _check_types(manifest: Manifest) -> None:
    """Raise TypeError or ValueError if a value that others rely on is of another kind than written."""
    for name in ("versions", "states", "accelerate", "extra"):
        if not isinstance(getattr(manifest, name), dict):
            raise TypeError(f"{name} is no object")
    if set(STATES) - set(manifest.states) or not all(isinstance(each, dict) for each in manifest.states.values()):
        raise ValueError(f"states are {sorted(manifest.states)}")
    lineage = manifest.lineage
    texts: tuple[Any, ...] = (lineage.checkpoint_id, lineage.run_id)
    if not all(isinstance(each, str) for each in texts):
        raise TypeError("lineage has no ids")
    numbers: dict[str, Any] = {
        "attempt": lineage.attempt,
        "world_size": manifest.topology.world_size,
        **{name: getattr(manifest, name) for name in ("num_schedulers", "num_dataloaders", "num_custom_objects")},
    }
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise TypeError(f"{name} is {value!r}")
    if any(file.size_bytes < 0 for file in manifest.files):
        raise ValueError("a file has a negative size")
