"""Sources of converted tensors that are read once only: summed on the way, while what is made of them is copied.

A fused parameter whose experts are cut out of it has a fingerprint, its parts have none. Where the outputs use each of
its bytes just once, and as they lie in the files, the sums over those bytes at their places in the *source* add up to
its fingerprint. All other sources are read beforehand (`proof.prove_tensors`).
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from ..extents import DTYPE_SIZES, DiskTensor, Extent
from ..fingerprint import Fingerprint
from .outputs import OutputTensor
from .planning import CopyUnit, find_start


class _Stretch(NamedTuple):
    """Bytes of a file that are consecutive elements of a source, the first of which is number `start`."""

    begin: int
    end: int
    name: str
    start: int
    element_bytes: int


class PassingSources:
    """Which sources are summed on the way, and where their elements lie.

    Attributes:
        expected: those sources and their fingerprints, by name.
    """

    def __init__(self, sources: Mapping[str, tuple[DiskTensor, Fingerprint]], outputs: Iterable[OutputTensor]) -> None:
        """`sources` are all that have fingerprints; `outputs` is all that is written, whatever it is made of."""
        self._stretches: dict[str, list[_Stretch]] = {}
        left_out = {name for name, (tensor, _) in sources.items() if not self._add(name, tensor)}
        for each in self._stretches.values():
            each.sort()
            for one, other in itertools.pairwise(each):
                if other.begin < one.end:  # tied: which of the two is meant cannot be told
                    left_out |= {one.name, other.name}
        num_bytes = dict.fromkeys(sources, 0)
        for output in outputs:
            left_out |= self._count(output, num_bytes)
        self.expected = {
            name: found
            for name, found in sources.items()
            if name not in left_out and num_bytes[name] == found[0].size_bytes
        }

    def _add(self, name: str, tensor: DiskTensor) -> bool:
        size = DTYPE_SIZES[tensor.dtype]
        for extent in _list_extents(tensor):
            start = find_start(extent, tensor)
            if start is None:
                return False
            end = extent.offset + extent.part.numel * size
            self._stretches.setdefault(extent.bytes.path, []).append(_Stretch(extent.offset, end, name, start, size))
        return True

    def _count(self, output: OutputTensor, num_bytes: dict[str, int]) -> set[str]:
        """Count what an output uses of each source; return those that it uses in another way than as they lie."""
        source = output.source
        if not isinstance(source, DiskTensor):
            extents = [extent for each in source.inputs for extent in _list_extents(each)]
            return {name for extent in extents for name in self._touch(extent)}
        extents = list(_list_extents(source))
        left_out = set[str]()
        is_plain = all(find_start(extent, source) is not None for extent in extents)
        for extent in extents:
            size = extent.part.numel * DTYPE_SIZES[source.dtype]
            stretch = self._find(extent.bytes.path, extent.offset, size) if is_plain else None
            if stretch is None:
                left_out.update(self._touch(extent))
            else:
                num_bytes[stretch.name] += size
        return left_out

    def _touch(self, extent: Extent) -> Iterator[str]:
        """Yield the sources that lie in the same item."""
        item = extent.bytes
        for stretch in self._stretches.get(item.path, ()):
            if stretch.begin < item.offset + item.length and item.offset < stretch.end:
                yield stretch.name

    def _find(self, path: str, offset: int, num_bytes: int) -> _Stretch | None:
        stretches = self._stretches.get(path, [])
        index = bisect.bisect_right(stretches, offset, key=lambda stretch: stretch.begin) - 1
        if index < 0 or offset + num_bytes > stretches[index].end:
            return None
        return stretches[index]

    def find(self, unit: CopyUnit) -> tuple[str | None, int]:
        """Return the source that a unit reads (None: none of these), and which of its elements is the unit's first."""
        if unit.item is None:
            return None, 0
        size = unit.length * DTYPE_SIZES[unit.job.source.dtype]
        stretch = self._find(unit.item.path, unit.offset, size)
        if stretch is None or stretch.name not in self.expected:
            return None, 0
        return stretch.name, stretch.start + (unit.offset - stretch.begin) // stretch.element_bytes


def _list_extents(tensor: DiskTensor) -> Iterator[Extent]:
    return (extent for extent in tensor.extents if extent.part.numel)
