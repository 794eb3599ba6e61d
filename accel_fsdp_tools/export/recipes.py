"""What goes into the files, as tensors on disk: where the bytes of every output lie in the checkpoint. No torch.

A converted tensor (an expert cut out of a fused parameter, a permuted projection, several joined into one) is a
tensor whose extents point right into the checkpoint's files, as strided boxes. So it is copied, read and checked like
any other, with no memory of its own. What moves cannot say is left to transformers (`reverting`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..architecture.facts import ArchitectureFacts
from ..architecture.moves import Axis, Move, cut_source, merge_axes
from ..architecture.outputs import OutputFacts
from ..errors import MismatchError, UnsupportedError
from ..extents import (
    DTYPE_SIZES,
    Box,
    ByteRange,
    DiskTensor,
    Extent,
    Run,
    Shape,
    get_row_major_strides,
    is_row_major,
    iterate_indices,
    split_into_boxes,
)
from .computed import Source
from .reverting import RevertedTensor, Reverter

_MAX_LISTED = 10


@dataclass(frozen=True)
class TieGroup:
    """Names of one tensor: `kept` is written; `dropped` are in the checkpoint too and must equal `source`.

    `source` is what `kept` is read from: itself, or one of the others where the checkpoint lacks it.
    """

    kept: str
    source: str
    dropped: tuple[str, ...]


@dataclass(frozen=True)
class AppliedRecipes:
    """The tensors of an export, in the order in which they are put into files, and what is left over.

    Attributes:
        outputs: name in the file, and where its bytes are.
        ties: groups of names whose equality must be proven before all but one are dropped.
        ignored: tensors of the checkpoint that are never written.
        missing: tensors that the architecture has and the checkpoint lacks.
        lost: outputs left out because something that they are made of is missing.
        unexpected: tensors of the checkpoint that the architecture does not have; not among the outputs.
        converted: outputs that are no plain copies, with the names that they are made of.
        storages: outputs that share memory in transformers: which memory, and how many elements it has.
    """

    outputs: tuple[tuple[str, Source], ...]
    ties: tuple[TieGroup, ...] = ()
    ignored: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    converted: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    storages: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)


def apply_recipes(
    tensors: Mapping[str, DiskTensor], facts: ArchitectureFacts, reverter: Reverter | None = None
) -> AppliedRecipes:
    """Return what `save_pretrained` would write of a checkpoint, as tensors that lie in its files.

    Args:
        tensors: of one model, by name as in the live model.
        facts: about its architecture.
        reverter: computes what moves cannot say.

    Memory: a few objects per tensor and chunk, whatever the sizes.

    Raises:
        MismatchError: tensors have another shape than the architecture's, or parts of one output other dtypes.
        UnsupportedError: the architecture could not be described, or has a conversion that computes with values
            and there is no reverter.
    """
    if facts.problem is not None:
        raise UnsupportedError(
            f"What transformers would write for {facts.class_name} is not known: {facts.problem}. Give --model a "
            "directory with its config.json.",
            actual=facts.class_name,
        )
    _check_shapes(tensors, facts)
    known = dict(tensors)
    ties = []
    for tie in facts.ties:
        present = [name for name in tie.names if name in tensors]
        if tie.dropped and present:
            dropped = tuple(name for name in present if name in tie.dropped and name != present[0])
            ties.append(TieGroup(tie.kept, present[0], dropped))
            known.setdefault(tie.kept, tensors[present[0]])
    optional = {name for tie in facts.ties for name in tie.dropped} | set(facts.ignored)
    missing = tuple(name for name in facts.shapes if name not in known and name not in optional)
    outputs, lost = [], []
    converted: dict[str, tuple[str, ...]] = {}
    for output in facts.outputs:
        if any(name not in known for name in output.needed):
            lost.append(output.name)
            continue
        outputs.append((output.name, _make_source(output, known, facts, reverter)))
        if output.source is None:
            converted[output.name] = output.needed
    return AppliedRecipes(
        outputs=tuple(outputs),
        ties=tuple(ties),
        ignored=tuple(name for name in facts.ignored if name in tensors),
        missing=missing,
        lost=tuple(lost),
        unexpected=tuple(name for name in tensors if name not in facts.shapes),
        converted=converted,
        storages={
            output.name: (number, storage.numel)
            for number, storage in enumerate(facts.storages)
            for start, count in storage.runs
            for output in facts.outputs[start : start + count]
        },
    )


def _make_source(
    output: OutputFacts, tensors: Mapping[str, DiskTensor], facts: ArchitectureFacts, reverter: Reverter | None
) -> Source:
    if output.operation is None or reverter is None or not output.sources:
        return _locate(output, tensors, facts)
    sources = {name: tensors[name] for name in output.sources}
    return RevertedTensor(output.name, _find_dtype(output, sources), output.shape, sources, reverter)


def locate_outputs(
    outputs: Sequence[OutputFacts], tensors: Mapping[str, DiskTensor], facts: ArchitectureFacts
) -> tuple[tuple[str, DiskTensor], ...]:
    """Return outputs (an adapter's) as tensors that lie in a checkpoint's files.

    Raises:
        MismatchError, UnsupportedError: as `apply_recipes`.
        KeyError: something that one of them is made of is not in `tensors`.
    """
    _check_shapes({name: tensors[name] for output in outputs for name in output.needed}, facts)
    return tuple((output.name, _locate(output, tensors, facts)) for output in outputs)


def _check_shapes(tensors: Mapping[str, DiskTensor], facts: ArchitectureFacts) -> None:
    wrong = [
        f"{name} is {list(tensor.shape)}, not {list(facts.shapes[name])}"
        for name, tensor in tensors.items()
        if name in facts.shapes and tensor.shape != facts.shapes[name]
    ]
    if wrong:
        more = f" and {len(wrong) - _MAX_LISTED} more" if len(wrong) > _MAX_LISTED else ""
        raise MismatchError(
            f"The checkpoint's tensors do not have the shapes of {facts.class_name}: "
            f"{'; '.join(wrong[:_MAX_LISTED])}{more}. Give --model the config that the model was trained with.",
            actual=tuple(wrong),
        )


def _locate(output: OutputFacts, tensors: Mapping[str, DiskTensor], facts: ArchitectureFacts) -> DiskTensor:
    if output.source is not None:
        source = tensors[output.source]
        return source if source.fqn == output.name else dataclasses.replace(source, fqn=output.name)
    if output.operation is not None:
        raise UnsupportedError(
            f"{output.name} of {facts.class_name} is computed by transformers ({output.operation}) from "
            f"{', '.join(output.sources) or 'constants'}, which copying bytes cannot do. Give --model a directory with "
            "the model's config.json, or load the checkpoint into the model and use its save_pretrained.",
            fqn=output.name,
            actual=output.operation,
        )
    sources = {name: tensors[name] for name in output.needed}
    dtype = _find_dtype(output, sources)
    extents = tuple(
        extent
        for move in output.moves
        for extent in _locate_move(move, sources[move.source], output.shape, DTYPE_SIZES[dtype])
    )
    return DiskTensor(output.name, dtype, output.shape, extents)


def _find_dtype(output: OutputFacts, sources: Mapping[str, DiskTensor]) -> str:
    dtypes = {tensor.dtype for tensor in sources.values()}
    if len(dtypes) > 1:
        raise MismatchError(
            f"{output.name} is made of tensors of several dtypes: "
            f"{', '.join(f'{name} is {tensor.dtype}' for name, tensor in sources.items())}. The checkpoint is not of "
            "one model as it was saved.",
            fqn=output.name,
            actual=sorted(dtypes),
        )
    (dtype,) = dtypes
    return dtype


def _locate_move(move: Move, source: DiskTensor, shape: Shape, size: int) -> Iterator[Extent]:
    """Yield the extents of an output that a move fills, wherever the source's chunks have been cut."""
    for extent in source.find_extents(_get_bounds(move)):
        for box, strides, start in _split_extent(extent, source.shape, size):
            yield from push_box(move, extent.bytes, box, strides, start, shape, size)


def push_box(
    move: Move, item: ByteRange, box: Box, strides: Shape, start: int, shape: Shape, size: int
) -> Iterator[Extent]:
    """Yield where the elements of one box of a source go that a move takes from it.

    Args:
        move: into an output of `shape`.
        item: the bytes that hold the box.
        box: in the coordinates of the source.
        strides: of the box's elements, counted in elements.
        start: where in `item` the first of them lies, in bytes.
        shape: of the output.
        size: bytes of an element.
    """
    parts = [move]
    for dim, (offset, count) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        parts = [each for part in parts for each in cut_source(part, dim, offset, offset + count)]
    for part in parts:
        yield from _build_extents(part, item, box, strides, start, shape, size)


def _get_bounds(move: Move) -> Box:
    sizes = [1] * len(move.origin)
    for axis in move.axes:
        sizes[axis.source_dim] += (axis.size - 1) * axis.source_step
    return Box(move.origin, tuple(sizes))


def _split_extent(extent: Extent, shape: Shape, size: int) -> Iterator[tuple[Box, Shape, int]]:
    """Yield the boxes of an extent with their strides in elements, and where in its bytes each one starts."""
    if isinstance(extent.part, Box):
        strides = extent.strides if extent.strides is not None else get_row_major_strides(extent.part.sizes)
        yield extent.part, strides, extent.start
        return
    assert isinstance(extent.part, Run)  # noqa: S101 - there is no third kind
    strides = get_row_major_strides(shape)
    for box in split_into_boxes(extent.part, shape):
        first = sum(offset * stride for offset, stride in zip(box.offsets, strides, strict=True))
        yield box, strides, extent.start + (first - extent.part.start) * size


def _build_extents(
    move: Move, item: ByteRange, box: Box, strides: Shape, start: int, shape: Shape, size: int
) -> Iterator[Extent]:
    """Yield the boxes of the output that a move fills out of one box of a file.

    A box has one step per dimension, so of several axes along one dimension of the output all but one are walked.
    """
    first = sum(
        (place - offset) * stride for place, offset, stride in zip(move.origin, box.offsets, strides, strict=True)
    )
    # From here on, steps in the source count elements of the file.
    steps = [axis._replace(source_dim=0, source_step=axis.source_step * strides[axis.source_dim]) for axis in move.axes]
    inner: dict[int, Axis] = {}
    outer: list[Axis] = []
    for axis in merge_axes(dataclasses.replace(move, axes=tuple(steps))).axes:
        if axis.target_step == 1 and axis.target_dim not in inner:
            inner[axis.target_dim] = axis
        else:
            outer.append(axis)
    sizes = tuple(inner[dim].size if dim in inner else 1 for dim in range(len(shape)))
    file_strides = tuple(inner[dim].source_step if dim in inner else 1 for dim in range(len(shape)))
    kept = None if is_row_major(sizes, file_strides) else file_strides
    for index in iterate_indices(tuple(axis.size for axis in outer)):
        target, position = list(move.target), first
        for place, axis in zip(index, outer, strict=True):
            target[axis.target_dim] += place * axis.target_step
            position += place * axis.source_step
        yield Extent(Box(tuple(target), sizes), item, kept, start + position * size)
