"""What is being verified: a directory, the files in it, its manifest if it has one, and what readers find in it."""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..commit import PARTIAL, looks_like_checkpoint
from ..errors import AccelFsdpError, CheckpointNotFoundError, ManifestError, ManifestVersionError, UsageError
from ..formats.checkpoint import METADATA_NAME, MODEL, OPTIMIZER, Section
from ..formats.sources import Options, Source, find_checkpoints_below, find_file_source, find_sources
from ..manifest import DIRECTORY, MANIFEST_PATH, Manifest, has_manifest, read_manifest
from ..opening import open_checkpoint
from .gathering import Gatherer

PARSING_ERRORS = (
    AccelFsdpError,
    ArithmeticError,
    AttributeError,
    LookupError,
    OSError,
    RecursionError,
    TypeError,
    ValueError,
    struct.error,
)
"""What reading damaged files may raise; a verification turns all of it into findings."""


@dataclass(frozen=True)
class DiskFile:
    """One file of the checkpoint as it is on disk now."""

    path: Path
    size_bytes: int
    modified_s: float


@dataclass(frozen=True)
class Subject:
    """One checkpoint under verification.

    `files` are all of its files by their path relative to `root`. `is_whole` is False for a single file, whose
    neighbours are not looked at.
    """

    root: Path
    files: Mapping[str, DiskFile]
    manifest: Manifest | None
    sections: tuple[Section, ...]
    is_whole: bool = True
    is_partial: bool = False
    expected: Mapping[str, tuple[int, str]] = field(default_factory=dict)  # size and checksum by the manifest

    @property
    def models(self) -> dict[int, Section]:
        return {section.index: section for section in self.sections if section.kind == MODEL}

    @property
    def optimizers(self) -> dict[int, Section]:
        return {section.index: section for section in self.sections if section.kind == OPTIMIZER}


def find_root(path: str | Path) -> Path:
    """Return the directory of the checkpoint that `path` stands for, or the file.

    A directory that holds exactly one checkpoint stands for it.

    Raises:
        CheckpointNotFoundError: `path` does not exist.
        UsageError: it holds several checkpoints; the message lists them.
    """
    root = Path(os.path.abspath(Path(path).expanduser()))  # noqa: PTH100 - links stay as they are
    if not root.exists():
        raise CheckpointNotFoundError(f"{root} does not exist", path=str(root))
    if root.is_file() or has_manifest(root) or (root / DIRECTORY).is_dir() or looks_like_checkpoint(root):
        return root
    if find_sources(root):
        return root
    found = find_checkpoints_below(root)
    if len(found) == 1:
        return found[0]
    if found:
        names = [str(each.relative_to(root)) for each in found]
        shown = ", ".join(names if len(names) <= 8 else [*names[:3], "...", *names[-4:]])
        raise UsageError(
            f"{root} holds {len(found)} checkpoints; name one of them: {shown}", path=str(root), actual=tuple(names)
        )
    return root


def open_subject(root: Path, gather: Gatherer) -> Subject:
    """Look at everything that is cheap to look at; what cannot be read becomes a finding."""
    if root.is_file():
        return _open_file(root, gather)
    files = dict(_walk(root, "", gather))
    manifest = _read_manifest(root, gather)
    sections = _open_sections(root, gather)
    expected = {} if manifest is None else {each.path: (each.size_bytes, each.checksum) for each in manifest.files}
    return Subject(root, files, manifest, sections, is_partial=PARTIAL in root.parts, expected=expected)


def _open_file(path: Path, gather: Gatherer) -> Subject:
    sections = tuple(_read_source(find_file_source(path), gather, path))
    paths = {path, *(Path(name) for section in sections for name in section.files)}
    files = {each.relative_to(path.parent).as_posix(): _describe(each) for each in sorted(paths) if each.is_file()}
    return Subject(path.parent, files, None, sections, is_whole=False)


def _describe(path: Path) -> DiskFile:
    facts = path.stat()
    return DiskFile(path, facts.st_size, facts.st_mtime)


def _walk(directory: Path, prefix: str, gather: Gatherer) -> Iterator[tuple[str, DiskFile]]:
    """Yield the files below `directory`; a link to a file counts as one, other things are findings."""
    try:
        entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
    except OSError as error:
        gather.add_error(error, path=directory)
        return
    for entry in entries:
        path = directory / entry.name
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(path, f"{prefix}{entry.name}/", gather)
            continue
        try:
            mode = path.stat().st_mode
            described = _describe(path)
        except OSError as error:
            gather.add_error(error, path=path)
            continue
        if stat.S_ISREG(mode):
            yield f"{prefix}{entry.name}", described
        else:
            what = "a link to a directory" if stat.S_ISDIR(mode) else "neither a file nor a directory"
            gather.hint("odd_file", f"{path} is {what}, and is not looked at", path=path)


def _read_manifest(root: Path, gather: Gatherer) -> Manifest | None:
    """Return the manifest; its absence is a failure only where this package has begun to write."""
    if not has_manifest(root):
        if (root / DIRECTORY).is_dir():
            gather.fail(
                "manifest",
                f"{root} has no {MANIFEST_PATH}, which is written last: the save did not finish, or it was removed. "
                "Use another checkpoint.",
                path=root / MANIFEST_PATH,
            )
        elif PARTIAL not in root.parts:
            gather.note(
                "no_manifest",
                "There is no manifest (not written by this package): sizes, checksums, the number of ranks and the "
                "inventory are not known. Damage is found by the CRCs inside torch's files only.",
            )
        return None
    try:
        return read_manifest(root)
    except ManifestVersionError as error:
        gather.fail("manifest_version", str(error), path=root / MANIFEST_PATH)
    except ManifestError as error:
        gather.fail("manifest", str(error), path=root / MANIFEST_PATH)
    except AccelFsdpError as error:  # it names files outside the checkpoint
        gather.fail("manifest", str(error), path=root / MANIFEST_PATH)
    return None


def _open_sections(root: Path, gather: Gatherer) -> tuple[Section, ...]:
    """Return the sections that can be read; one that can't does not hide the others."""
    sources = find_sources(root)
    if not sources:
        _explain_nothing(root, gather)
        return ()
    try:
        return open_checkpoint(root, keep_flat=True).sections
    except PARSING_ERRORS as error:
        first = error
    before = len(gather)
    sections: dict[str, Section] = {}
    for source in sources:
        for section in _read_source(source, gather, root):
            sections.setdefault(section.name, section)
    if len(gather) == before:  # each can be read, all together not
        gather.add_error(first, path=root)
    return tuple(sections.values())


def _read_source(source: Source, gather: Gatherer, path: Path) -> list[Section]:
    try:
        return source.read(Options({}, keep_flat=True))
    except PARSING_ERRORS as error:
        gather.add_error(error, path=path / source.label if path.is_dir() else path)
        return []


def _explain_nothing(root: Path, gather: Gatherer) -> None:
    if any(root.glob("*.distcp")):
        gather.fail(
            "missing_file",
            f"{root / METADATA_NAME} is missing, which torch writes last: the save did not finish, or a copy left "
            "hidden files behind. Use another checkpoint, or copy it again with its hidden files.",
            path=root / METADATA_NAME,
        )
        return
    shown = ", ".join(sorted(each.name for each in root.iterdir())[:8]) or "nothing"
    gather.fail(
        "incomplete",
        f"{root} holds no model that is known here (it holds {shown}). Expected pytorch_model_fsdp_0/, "
        "pytorch_model_fsdp.bin, model.safetensors, .metadata or rank files.",
    )
