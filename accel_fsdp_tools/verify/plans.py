"""What each file's bytes mean: which ranges a CRC covers, and which tensors' elements lie where."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from ..extents import DTYPE_SIZES, ByteRange, Part, Shape
from ..formats.zips import ZIP_MAGIC, Window, open_torch_zip, open_window
from .subject import PARSING_ERRORS, DiskFile, Subject
from .tensors import Located

_ZIP_SUFFIXES = (".bin", ".pt", ".pth", ".pkl")


class Key(NamedTuple):
    """A tensor of the checkpoint: its section's name, and its own."""

    section: str
    fqn: str


@dataclass(frozen=True)
class Use:
    """Elements of a tensor that lie consecutively in a file. `in_order`: in the part's row-major order."""

    keys: tuple[Key, ...]
    dtype: str
    shape: Shape
    part: Part
    offset: int
    in_order: bool

    @property
    def length(self) -> int:
        return self.part.numel * DTYPE_SIZES[self.dtype]

    @property
    def end(self) -> int:
        return self.offset + self.length


@dataclass(frozen=True)
class Span:
    """A range of a file with one meaning; `crc32` None: nothing to compare with. `uses` lie inside, in order."""

    offset: int
    length: int
    label: str = ""
    crc32: int | None = None
    is_entry: bool = False
    uses: tuple[Use, ...] = ()

    @property
    def end(self) -> int:
        return self.offset + self.length


@dataclass
class FilePlan:
    """All there is to do with one file, whose bytes are read once."""

    name: str
    file: DiskFile
    checksum: str | None = None
    zips: list[ByteRange] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    owners: dict[int, list[Key]] = field(default_factory=dict)  # tensors by the offset of the item they are in


@dataclass(frozen=True)
class Plans:
    """The plans of all files, and the extents that can't be looked at in passing.

    `scattered` share bytes with others in part, or have gaps; `strided` are whole but in another order than row-major,
    which matters to fingerprints only.
    """

    files: tuple[FilePlan, ...]
    scattered: tuple[Located, ...]
    strided: tuple[Located, ...]


def make_plans(subject: Subject, located: Iterable[Located]) -> Plans:
    """Return what to do with each file. No file is opened, except to see whether it is a zip."""
    plans = {name: FilePlan(name, file) for name, file in subject.files.items()}
    for name, (size_bytes, checksum) in subject.expected.items():
        if name in plans and plans[name].file.size_bytes == size_bytes:
            plans[name].checksum = checksum
    by_path = {str(plan.file.path): plan for plan in plans.values()}
    for section in subject.sections:
        for item in (*section.zips, *(blob.bytes for blob in section.blobs.values())):
            if item.path in by_path:
                by_path[item.path].zips.append(item)
    in_sections = {item.path for section in subject.sections for item in section.zips}
    for path, plan in by_path.items():
        if path not in in_sections and path.endswith(_ZIP_SUFFIXES) and _is_zip(plan.file.path):
            plan.zips.append(ByteRange(path, 0, plan.file.size_bytes))
    located = list(located)
    scattered = _add_uses(by_path, located)
    known = set(map(id, scattered))
    strided = [each for each in located if each.extent.strides is not None and id(each) not in known]
    return Plans(tuple(plans.values()), tuple(scattered), tuple(strided))


def _is_zip(path: Path) -> bool:
    try:
        with open_window(path) as window:
            return window.length >= 4 and window.read(0, 4) == ZIP_MAGIC
    except PARSING_ERRORS:
        return False  # whoever reads the file says what is wrong with it


def _add_uses(by_path: Mapping[str, FilePlan], located: list[Located]) -> list[Located]:
    """Give each file its uses; return the extents that none could be made of."""
    scattered: list[Located] = []
    made: dict[str, list[tuple[Use, Located]]] = {}
    for each in located:
        item = each.extent.bytes
        plan = by_path.get(item.path)
        if plan is None:
            continue
        use = _make_use(each)
        plan.owners.setdefault(item.offset, []).extend(use.keys)
        fills = (use.offset, use.length) == (item.offset, item.length)
        if use.end > plan.file.size_bytes or not (use.in_order or fills):
            scattered.append(each)
        elif use.length:
            made.setdefault(item.path, []).append((use, each))
    for path, pairs in made.items():
        by_path[path].uses, overlapping = _separate(pairs)
        scattered += overlapping
    return scattered


def _make_use(each: Located) -> Use:
    extent = each.extent
    return Use(
        keys=(Key(each.section.name, each.tensor.fqn),),
        dtype=each.tensor.dtype,
        shape=each.tensor.shape,
        part=extent.part,
        offset=extent.offset,
        in_order=extent.strides is None,
    )


def _separate(pairs: list[tuple[Use, Located]]) -> tuple[list[Use], list[Located]]:
    """Return uses in order of offset, tied tensors joined; and the extents that overlap others only in part."""
    kept: list[Use] = []
    left: list[Located] = []
    for use, each in sorted(pairs, key=lambda pair: (pair[0].offset, -pair[0].length)):
        if not kept or use.offset >= kept[-1].end:
            kept.append(use)
        elif replace(use, keys=()) == replace(kept[-1], keys=()):
            kept[-1] = replace(use, keys=kept[-1].keys + use.keys)
        else:
            left.append(each)
    return kept, left


def list_spans(plan: FilePlan, window: Window, errors: list[Exception]) -> list[Span]:
    """Return the entries of the file's zips and the uses outside of them, in order and without overlap.

    What is wrong with a zip is added to `errors`. An entry that overlaps another is left out and reported.
    """
    entries: list[Span] = []
    for item in dict.fromkeys(plan.zips):
        entries += _list_entries(item, window, errors)
    spans: list[Span] = []
    uses = list(plan.uses)
    for entry in sorted(entries, key=lambda span: span.offset):
        if spans and entry.offset < spans[-1].end:
            errors.append(window.describe_damage(f"has two items at byte {entry.offset}"))
            continue
        inside = []
        while uses and uses[0].offset < entry.end:
            use = uses.pop(0)
            if use.offset >= entry.offset and use.end <= entry.end:
                inside.append(use)
            elif use.end <= entry.offset:
                spans.append(Span(use.offset, use.length, uses=(use,)))
        spans.append(Span(entry.offset, entry.length, entry.label, entry.crc32, True, tuple(inside)))
    spans += [Span(use.offset, use.length, uses=(use,)) for use in uses]
    return sorted(spans, key=lambda span: span.offset)


def _list_entries(item: ByteRange, window: Window, errors: list[Exception]) -> Iterator[Span]:
    try:
        label = f"{window.label}, item at byte {item.offset}" if item.length != window.length else window.label
        part = window.narrow(item.offset, item.length, label)
        if part.length < 4 or part.read(0, 4) != ZIP_MAGIC:
            return
        archive = open_torch_zip(part)
        for name in archive.entries:
            payload = archive.locate(name)
            if payload.size_bytes:
                yield Span(payload.offset, payload.size_bytes, name, payload.crc32, True)
    except PARSING_ERRORS as error:
        errors.append(error)
