"""Outputs of a live export that only transformers can compute: gathered group by group, converted, written.

Nearly all conversions move elements about, and are done where the pieces lie (`live_writing`). One that computes needs
whole tensors. Those that belong together, and no others, are sent to one rank, which lets transformers convert them and
writes what comes out. The groups are dealt out: in each turn every rank gets one, all send, then all convert.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .describing.reverting import build_reference, describe_conversions, revert
from .errors import DamagedCheckpointError, RankMismatchError, UnsupportedError
from .export.planning import Job
from .export.reverting import RevertedTensor, Reverter
from .extents import DTYPE_SIZES, Part, Run, Shape, get_whole
from .files import fsync_file
from .fingerprint import Fingerprint, combine, fingerprint_bytes, fingerprint_tensor, view_bytes
from .live_writing import Feed, Written, check_unchanged, cut_part, synchronize, write_shards
from .ranks import get_control_group, get_rank, get_world_size, naming_missing, run_on_each, run_together
from .shards import LocalShard

if TYPE_CHECKING:
    import torch

_BLOCK_BYTES = 1 << 22  # sent at a time
_GATHERING = "gathering what is converted together"

NOT_STARTED = Reverter(Path("memory"))
"""Stands in a plan where an export from files has its child process: there are no files that it could read."""

Merges = Mapping[str, Callable[[Part, memoryview], memoryview]]


@dataclass(frozen=True)
class Group:
    """Live tensors that are converted together, and what comes of them. The same on every rank.

    Attributes:
        sources: the first names of the live tensors, by the names that they have for transformers.
        jobs: the outputs.
        size_bytes: of the live tensors.
    """

    sources: Mapping[str, str]
    jobs: tuple[Job, ...]
    size_bytes: int

    @property
    def live_names(self) -> tuple[str, ...]:
        """First names, each once."""
        return tuple(dict.fromkeys(self.sources.values()))

    @property
    def is_cast(self) -> bool:
        return any(job.tensor.dtype != job.source.dtype for job in self.jobs)


def list_groups(jobs: Sequence[Job], owners: Mapping[str, str]) -> tuple[Group, ...]:
    """Return the groups, the largest first, so that those of one turn are about as large as each other.

    Args:
        jobs: of all files.
        owners: from each name of a live tensor to its first.
    """
    found: dict[tuple[str, ...], list[Job]] = {}
    for job in jobs:
        if isinstance(job.source, RevertedTensor):
            found.setdefault(tuple(sorted(job.source.sources)), []).append(job)
    groups = []
    for names, each in found.items():
        first = each[0].source
        assert isinstance(first, RevertedTensor)  # noqa: S101 - chosen so
        size_bytes = sum(source.size_bytes for source in first.sources.values())
        groups.append(Group({name: owners[name] for name in names}, tuple(each), size_bytes))
    return tuple(sorted(groups, key=lambda group: (-group.size_bytes, sorted(group.sources))))


def write_groups(
    groups: Sequence[Group],
    shards: Sequence[LocalShard],
    mine: Sequence[LocalShard],
    directory: Path,
    *,
    model: torch.nn.Module,
    fingerprints: Mapping[str, Fingerprint],
    merges: Merges | None = None,
    num_threads: int | None = None,
) -> Written:
    """Write the outputs of all groups into files that exist at their full size, durably. Collective.

    Live memory is read only. What arrives is compared with what was sent, and what was read with the live fingerprints.

    Args:
        groups: from `list_groups`, the same on every rank.
        shards: all of this rank.
        mine: from `choose_mine`: what this rank sends.
        directory: where the files are.
        model: the prepared one.
        fingerprints: of the live tensors, by their first names.
        merges: of live tensors that adapters are merged into: from a part's bytes to those that are sent.
        num_threads: of each rank, for writing.

    Returns:
        the sums of what this rank has written. Peak memory: one group of whole tensors before and after the conversion
        (and what that needs), and 4 MB; and the modules' attributes, without data.

    Raises:
        UnsupportedError: transformers cannot convert a group, or makes something else of it than was planned.
        RankMismatchError: the ranks' models would be converted in different ways.
        CallOrderError: a live tensor is not what it was when its fingerprint was taken.
        DamagedCheckpointError: what has arrived is not what was sent.
        StorageError: the output cannot be written.
        RankFailedError, RankMissingError: another rank has failed, or does not answer.
    """
    needed = {name for group in groups for name in group.live_names}
    sent = [shard for shard in mine if shard.fqn in needed]
    told = run_together("looking at the parts", lambda: {each.fqn: _list_parts(each) for each in sent})
    by_name = {shard.fqn: shard for shard in shards if shard.fqn in needed}
    exchange = run_on_each("planning the conversions", lambda: _Exchange(by_name, sent, told, merges or {}))
    reference = run_on_each("looking at the model", lambda: build_reference(model))
    _require_same_conversions(run_together("comparing the conversions", lambda: describe_conversions(reference)))
    written = Written()
    for start in range(0, len(groups), get_world_size()):
        turn = groups[start : start + get_world_size()]
        written.add_outputs(_take_turn(turn, exchange, reference, directory, fingerprints, num_threads))
    files = {job.file for group in groups[get_rank() :: get_world_size()] for job in group.jobs}
    run_on_each("writing what was converted", lambda: _sync(directory, files))
    return written


def _require_same_conversions(everyone: Sequence[str]) -> None:
    """Raise unless all ranks would convert alike: each does so by its own model, and the plan is rank 0's."""
    for rank, each in enumerate(everyone):
        if each != everyone[0]:
            raise RankMismatchError(
                f"transformers would convert the weights in another way on rank {rank} than on rank 0 when it saves "
                "them: the models have other _weight_conversions (from_pretrained leaves them), or other configs. Make "
                "the model in the same way on all ranks.",
                rank=rank,
                expected=everyone[0],
                actual=each,
            )


def _list_parts(shard: LocalShard) -> list[Part]:
    return [part for part, _ in shard.iterate_pieces()]


def _sync(directory: Path, files: Iterable[str]) -> None:
    for name in sorted(files):
        fsync_file(directory / name)


def _take_turn(
    turn: Sequence[Group],
    exchange: _Exchange,
    reference: torch.nn.Module,
    directory: Path,
    fingerprints: Mapping[str, Fingerprint],
    num_threads: int | None,
) -> Written:
    """Gather, convert and write one group on every rank. Collective."""
    gathered = exchange.run(turn)
    everyone = run_together(_GATHERING, exchange.report)
    expected = _add_up(turn, everyone, fingerprints)

    def convert() -> Written:
        number = get_rank()
        if number >= len(turn):
            return Written()
        _check_arrived(gathered, {name: expected[number, name] for name in turn[number].live_names})
        return _convert(turn[number], gathered, reference, directory, num_threads)

    return run_on_each("converting weights back", convert)


_Sums = dict[tuple[int, str], Fingerprint]
"""By the number of a group in its turn, and a live tensor's first name."""


class _Exchange:
    """Sends the tensors of groups to the ranks that convert them.

    Which block goes from where to where in which order all ranks know, so that nothing is asked for and none waits for
    another in a circle. A rank that cannot read or keep something goes on sending and receiving, and says so when all
    is through (`report`): the others would wait for it.
    """

    def __init__(
        self,
        shards: Mapping[str, LocalShard],
        sent: Sequence[LocalShard],
        told: Sequence[Mapping[str, Sequence[Part]]],
        merges: Merges,
    ) -> None:
        """`told` is what each rank sends: parts of live tensors by their first names; `sent` what this one does."""
        import torch

        self._shards = shards
        self._pieces = {shard.fqn: dict(enumerate(tensor for _, tensor in shard.iterate_pieces())) for shard in sent}
        self._told = told
        self._merges = merges
        self._scratch = torch.empty(_BLOCK_BYTES, dtype=torch.uint8, device="cpu")
        self._failure: Exception | None = None
        self._sums: tuple[_Sums, _Sums] = ({}, {})
        synchronize(sent)

    def run(self, turn: Sequence[Group]) -> dict[str, torch.Tensor]:
        """Send and receive the tensors of the groups, of which each rank gets one; return those of this rank's.

        Collective. Raises nothing but what the connection does: see `report`.
        """
        self._sums = ({}, {})
        whole: dict[str, torch.Tensor] = {}
        group = get_control_group() if get_world_size() > 1 else None
        for receiver, wanted in enumerate(turn):
            for name in wanted.live_names:
                if receiver == get_rank():
                    with self._keeping_on():
                        whole[name] = _make_room(self._shards[name])
                for sender, parts in enumerate(self._told):
                    if get_rank() in (receiver, sender):
                        self._move(name, parts.get(name, ()), sender, receiver, whole.get(name), group)
        return whole

    def report(self) -> tuple[_Sums, _Sums]:
        """Return the sums of what this rank has read, and sent, in the last turn. Not collective.

        Raises:
            what this rank has failed with.
        """
        if self._failure is not None:
            raise self._failure
        return self._sums

    @contextlib.contextmanager
    def _keeping_on(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # raised in `report`: others are in the middle of a collective
            self._failure = self._failure or error

    def _move(
        self, name: str, parts: Sequence[Part], sender: int, receiver: int, whole: torch.Tensor | None, group: Any
    ) -> None:
        """Send, receive, or copy one rank's parts of one tensor."""
        import torch.distributed as dist

        shard, rank = self._shards[name], get_rank()
        size = DTYPE_SIZES[shard.dtype]
        for index, part in enumerate(parts):
            for here, slices in cut_part(part, _BLOCK_BYTES // size):
                block = self._scratch[: here.numel * size]
                if sender == rank:
                    with self._keeping_on():
                        self._read(shard, here, self._pieces[name][index][slices], block, receiver)
                    if receiver != rank:
                        with naming_missing(_GATHERING):  # around nothing else: who worked has not waited for others
                            dist.send(block, receiver, group=group)
                else:
                    with naming_missing(_GATHERING):
                        dist.recv(block, sender, group=group)
                if receiver == rank and whole is not None:
                    with self._keeping_on():
                        _put(whole, here, block)

    def _read(self, shard: LocalShard, part: Part, tensor: torch.Tensor, block: torch.Tensor, receiver: int) -> None:
        """Copy a block of live memory, merged where something is merged into it, and sum it up."""
        block.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        data = view_bytes(block)
        read = sent = fingerprint_bytes(data, shard.dtype, part, shard.shape)
        merge = self._merges.get(shard.fqn)
        if merge is not None:
            data[:] = merge(part, data)
            sent = fingerprint_bytes(data, shard.dtype, part, shard.shape)
        for sums, found in zip(self._sums, (read, sent), strict=True):
            key = (receiver, shard.fqn)
            sums[key] = sums.get(key, Fingerprint()) + found


def _make_room(shard: LocalShard) -> torch.Tensor:
    import torch

    return torch.empty(shard.shape, dtype=getattr(torch, shard.dtype), device="cpu")


def _put(whole: torch.Tensor, part: Part, block: torch.Tensor) -> None:
    values = block.view(whole.dtype)
    if isinstance(part, Run):
        whole.view(-1)[part.start : part.start + part.length].copy_(values)
        return
    slices = (slice(start, start + count) for start, count in zip(part.offsets, part.sizes, strict=True))
    whole[tuple(slices)].copy_(values.view(part.sizes))


def _add_up(
    turn: Sequence[Group], everyone: Sequence[tuple[_Sums, _Sums]], fingerprints: Mapping[str, Fingerprint]
) -> _Sums:
    """Return the sums of what all ranks have sent in a turn; what they read must be the live tensors."""
    expected: _Sums = {}
    for number, group in enumerate(turn):
        for name in group.live_names:
            read, sent = (
                combine(each[kind].get((number, name), Fingerprint()) for each in everyone) for kind in (0, 1)
            )
            check_unchanged(name, read, fingerprints[name])
            expected[number, name] = sent
    return expected


def _check_arrived(gathered: Mapping[str, torch.Tensor], expected: Mapping[str, Fingerprint]) -> None:
    for name, tensor in gathered.items():
        shape = tuple(tensor.shape)
        found = fingerprint_tensor(tensor, get_whole(shape), shape)
        if found != expected[name]:
            raise DamagedCheckpointError(
                f"{name} has not arrived as it was sent (its fingerprint is {found}, and was {expected[name]}): the "
                "connection between the ranks, or the memory here, cannot be trusted. Export again, on other nodes.",
                fqn=name,
                expected=str(expected[name]),
                actual=str(found),
            )


def _convert(
    group: Group,
    gathered: Mapping[str, torch.Tensor],
    reference: torch.nn.Module,
    directory: Path,
    num_threads: int | None,
) -> Written:
    """Let transformers convert a group, and write what comes of it."""
    names = ", ".join(group.sources)
    try:
        found = revert(reference, {name: gathered[live] for name, live in group.sources.items()})
    except Exception as error:  # whatever the code of an architecture raises
        raise UnsupportedError(
            f"{group.jobs[0].tensor.name} is computed by transformers from {names}, which has failed: "
            f"{type(error).__name__}: {error}. Gather the model's state dict and use its save_pretrained.",
            fqn=group.jobs[0].tensor.name,
        ) from error
    shards = [_take(job, found) for job in group.jobs]
    feeds = {job.tensor.name: (Feed(job, None),) for job in group.jobs}
    written = write_shards(shards, feeds, directory, summed=frozenset(feeds), num_threads=num_threads, sync=False)
    return replace(written, sources={})  # of the outputs themselves


def _spell(kind: tuple[str, Shape] | None) -> str:
    return "nothing" if kind is None else f"{kind[0]} {list(kind[1])}"


def _take(job: Job, found: Mapping[str, torch.Tensor]) -> LocalShard:
    """Return an output as if it were a live tensor that this rank holds whole."""
    name, wanted = job.tensor.name, (job.source.dtype, job.source.shape)
    tensor = found.get(name)
    shape: Shape = () if tensor is None else tuple(tensor.shape)
    actual = None if tensor is None else (str(tensor.dtype).removeprefix("torch."), shape)
    if tensor is None or actual != wanted:
        raise UnsupportedError(
            f"{name}: transformers makes {_spell(actual)} of the values, and {_spell(wanted)} was expected from the "
            "model without values. Gather the model's state dict and use its save_pretrained.",
            fqn=name,
            expected=wanted,
            actual=actual,
        )
    parts = (get_whole(shape),) if tensor.numel() else ()
    return LocalShard(name, wanted[0], shape, parts, tensor, "parameter")
