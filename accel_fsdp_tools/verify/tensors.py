"""Whether each tensor is there exactly once, is what its files say, and is what the manifest says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ..extents import DTYPE_SIZES, Box, Coverage, DiskTensor, Extent, Part, Run, check_coverage
from ..formats.checkpoint import Section
from ..manifest import ModelFacts
from .gathering import Gatherer
from .subject import PARSING_ERRORS, Subject

_SIXTEEN_BITS = ("float16", "bfloat16")
_MIXED = ("fp16", "bf16", "fp8")
_SHOWN = 3


class Located(NamedTuple):
    """An extent that was looked up, and the tensor that it is a part of."""

    section: Section
    tensor: DiskTensor
    extent: Extent


def check_tensors(subject: Subject, gather: Gatherer) -> list[Located]:
    """Check coverage, and that what each item says about itself is what refers to it; return all extents.

    Memory: a few hundred bytes per extent, nothing per byte.
    """
    located: list[Located] = []
    for section in subject.sections:
        for note in section.notes:
            gather.note("reader", f"{section.name}: {note}")
        for tensor in section.tensors.values():
            gather.counts["tensors"] += 1
            _check_coverage(section, tensor, gather)
            extents = list(_look_up(section, tensor, gather))
            _compare_replicas(section, tensor, extents, gather)
            located += [Located(section, tensor, extent) for extent in extents]
        gather.counts["blobs"] += len(section.blobs)
    return located


def _check_coverage(section: Section, tensor: DiskTensor, gather: Gatherer) -> None:
    coverage = check_coverage(tensor.shape, tensor.parts)
    if coverage.ok:
        return
    where = f"{section.name}: {tensor.fqn}, {tensor.dtype} {list(tensor.shape)}"
    facts = {"fqn": tensor.fqn, "path": section.path}
    if coverage.num_missing:
        gather.fail(
            "hole",
            f"{where}: {coverage.num_missing} of {tensor.numel} elements are nowhere in the checkpoint: "
            f"{_show(coverage.holes)}. torch loads this in silence and leaves old values there; don't use it.",
            **facts,
            missing=coverage.num_missing,
        )
    if coverage.num_repeated:
        gather.fail(
            "overlap",
            f"{where}: {coverage.num_repeated} elements are there more than once: {_show(coverage.overlaps)}. Which of "
            "them a load takes is chance.",
            **facts,
            repeated=coverage.num_repeated,
        )
    _report_outside(where, coverage, gather, facts)


def _report_outside(where: str, coverage: Coverage, gather: Gatherer, facts: Mapping[str, str]) -> None:
    if coverage.outside:
        gather.fail(
            "outside",
            f"{where}: chunks lie outside the tensor: {_show(coverage.outside)}. The metadata is damaged or of another "
            "save.",
            **facts,
        )


def _show(parts: tuple[Part, ...] | tuple[Box, ...]) -> str:
    shown = ", ".join(map(_show_part, parts[:_SHOWN]))
    return f"{shown}, ..." if len(parts) > _SHOWN else shown


def _show_part(part: Part) -> str:
    if isinstance(part, Run):
        return f"elements {part.start}:{part.start + part.length}"
    return "[" + ", ".join(f"{at}:{at + size}" for at, size in zip(part.offsets, part.sizes, strict=False)) + "]"


def _look_up(section: Section, tensor: DiskTensor, gather: Gatherer) -> Iterator[Extent]:
    """Yield the extents whose items can be read and say of themselves what refers to them."""
    for extents in (tensor.extents, tensor.replicas):
        for index in range(len(extents)):
            try:
                yield extents[index]
            except PARSING_ERRORS as error:
                gather.add_error(error, fqn=tensor.fqn, path=section.path)


def _compare_replicas(section: Section, tensor: DiskTensor, extents: list[Extent], gather: Gatherer) -> None:
    """Compare further copies of a part by the CRCs that the formats store; without CRCs nothing is said."""
    if not tensor.replicas:
        return
    first: dict[Part, Extent] = {}
    for extent in extents:
        other = first.setdefault(extent.part, extent)
        same_place = (other.start, other.strides, other.bytes.length) == (
            extent.start,
            extent.strides,
            extent.bytes.length,
        )
        fills = extent.part.numel * DTYPE_SIZES[tensor.dtype] == extent.bytes.length
        known = other.bytes.crc32 is not None and extent.bytes.crc32 is not None
        if same_place and fills and known and other.bytes.crc32 != extent.bytes.crc32:
            gather.fail(
                "replica",
                f"{section.name}: {tensor.fqn} {_show_part(extent.part)} differs between "
                f"{gather.shorten(other.bytes.path)} and {gather.shorten(extent.bytes.path)}, which should "
                "hold copies. The ranks had diverged, or a file is of another save.",
                fqn=tensor.fqn,
                path=extent.bytes.path,
            )


def check_against_manifest(subject: Subject, gather: Gatherer) -> None:
    """Compare names, shapes and dtypes of the models with what was in memory at the save, as far as that is known."""
    manifest = subject.manifest
    if manifest is None:
        _check_precision_without_manifest(subject, gather)
        return
    for index, facts in enumerate(manifest.models):
        section = subject.models.get(index)
        if section is None:
            continue  # counted by the inventory
        if not section.is_flat:
            _compare_model(section, facts, gather)
        if manifest.topology.mixed_precision in _MIXED:
            trainable = {tensor.fqn for tensor in facts.tensors if tensor.requires_grad}
            _check_precision(section, trainable, f"the run used {manifest.topology.mixed_precision}", gather)


def _compare_model(section: Section, facts: ModelFacts, gather: Gatherer) -> None:
    recorded = {tensor.fqn: tensor for tensor in facts.tensors}
    tied = {name: group for group in facts.ties for name in group}
    there = section.tensors.keys() | section.blobs.keys()
    for name, saved in recorded.items():
        found = section.tensors.get(name)
        if found is None:
            # Some writers leave out all but one of tied parameters.
            if not there & {name, *tied.get(name, ())}:
                gather.fail(
                    "missing_tensor", f"{section.name}: {name} was saved and is not here", fqn=name, path=section.path
                )
            continue
        if found.shape != saved.shape:
            gather.fail(
                "shape",
                f"{section.name}: {name} has the shape {list(found.shape)}, {list(saved.shape)} was saved",
                fqn=name,
                path=section.path,
                expected=list(saved.shape),
                actual=list(found.shape),
            )
        if found.dtype != saved.dtype:
            gather.fail(
                "dtype",
                f"{section.name}: {name} is {found.dtype}, the parameter was {saved.dtype}. torch casts in silence; a "
                "resume would not be exact.",
                fqn=name,
                path=section.path,
                expected=saved.dtype,
                actual=found.dtype,
            )
    for name in sorted(section.tensors.keys() - recorded.keys()):
        gather.fail("extra_tensor", f"{section.name}: {name} is here and was not saved", fqn=name, path=section.path)


def _check_precision_without_manifest(subject: Subject, gather: Gatherer) -> None:
    """Look for 16-bit parameters whose optimizer state has 32 bits: then the run had fp32 master weights."""
    for index, section in subject.models.items():
        optimizer = subject.optimizers.get(index)
        if optimizer is None:
            continue
        wide = {
            str(tensor.key_path[1])
            for tensor in optimizer.tensors.values()
            if len(tensor.key_path) > 2 and tensor.key_path[0] == "state" and tensor.shape and tensor.dtype == "float32"
        }
        _check_precision(section, wide, "the optimizer's state is float32", gather)


def _check_precision(section: Section, names: set[str], why: str, gather: Gatherer) -> None:
    narrow = [name for name, tensor in section.tensors.items() if tensor.dtype in _SIXTEEN_BITS and name in names]
    if narrow:
        shown = ", ".join(narrow[:_SHOWN]) + (", ..." if len(narrow) > _SHOWN else "")
        gather.hint(
            "precision",
            f"{section.name}: {len(narrow)} parameter(s) are stored in 16 bits ({shown}) although {why}. If training "
            "kept fp32 master weights, a resume from this is not exact.",
            path=section.path,
            count=len(narrow),
        )
