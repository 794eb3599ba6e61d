"""Faults on disk for the matrix: planted in a copy of a checkpoint before it is verified and loaded."""

from __future__ import annotations

import copy
import dataclasses
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from accel_fsdp_tools.formats.zips import open_torch_zip, open_window
from accel_fsdp_tools.manifest import DIRECTORY
from tests.attacks import read_metadata, write_metadata
from tests.manifests import flip_bit, reseal
from tests.matrix import KINDS

SHARDED, FULL = KINDS
MODEL, OPTIMIZER = "pytorch_model_fsdp_0", "optimizer_0"

WHOLE, ADAPTED, BARE = "manifest as written", "manifest adapted", "no manifest"


@dataclass(frozen=True)
class DiskFault:
    """`damage(path, late)`: `late` is a later checkpoint of the same run.

    A finding must name a tensor or a file or say `named`, and an error one of those. A variant that is not in `offline`
    or `load` is not demanded there, and `why` says why. `verify` is the mode of `load_state` that finds it where the
    manifest was adapted.
    """

    name: str
    damage: Callable[[Path, Path], None]
    named: str = "\0"  # nothing by itself
    kinds: tuple[str, ...] = KINDS
    offline: tuple[str, ...] = (WHOLE, ADAPTED, BARE)
    load: tuple[str, ...] = (WHOLE, ADAPTED, BARE)
    why: str = ""
    verify: str = "auto"

    @property
    def variants(self) -> tuple[str, ...]:
        return tuple(each for each in (WHOLE, ADAPTED, BARE) if each in (*self.offline, *self.load))


def adapt(path: Path, variant: str) -> None:
    """Make the manifest agree with the files as they are now, or remove what this package has written."""
    if variant == BARE:
        shutil.rmtree(path / DIRECTORY)
    elif variant == ADAPTED:
        reseal(path)


def _flip_payload(path: Path) -> None:
    """Flip a bit in the middle of a large tensor of a torch file or DCP file; of its pickle if it has none.

    Not of the largest of a full file: where that one is tied, its other name's copy would be loaded over it.
    """
    start, length = 0, path.stat().st_size
    if path.suffix == ".distcp":
        infos = [each for each in read_metadata(path.parent).storage_data.values() if each.relative_path == path.name]
        length, start = max((each.length, each.offset) for each in infos)
    with open_window(path) as window:
        archive = open_torch_zip(window.narrow(start, length, "item"))
        payloads = {name: archive.locate(name) for name in archive.entries}
    tensors = [each for name, each in payloads.items() if name.startswith("data/") and each.size_bytes]
    sizes = sorted({each.size_bytes for each in tensors or payloads.values()})
    size = sizes[-2] if len(tensors) > 1 and len(sizes) > 1 else sizes[-1]
    payload = next(each for each in tensors or payloads.values() if each.size_bytes == size)
    flip_bit(path, payload.offset + payload.size_bytes // 2, 3)


def _flip_middle(path: Path) -> None:
    flip_bit(path, path.stat().st_size // 2, 3)


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 100)


def _exchange(first: Path, second: Path) -> None:
    aside = first.with_name("aside")
    first.rename(aside)
    second.rename(first)
    aside.rename(second)


def _file(sharded: str, full: str) -> Callable[[Path], Path]:
    return lambda path: path / (sharded if (path / MODEL).exists() else full)


MODEL_FILE = _file(f"{MODEL}/__1_0.distcp", "pytorch_model_fsdp.bin")
OPTIMIZER_FILE = _file(f"{OPTIMIZER}/__1_0.distcp", "optimizer.bin")


def _find_cut_key(metadata: Any) -> str:
    """Return the key of a weight that is cut if the model is. Not a tied one: another name's copy would make up."""
    return next(name for name in metadata.state_dict_metadata if "blocks.1.up" in name and name.endswith("weight"))


def _remove_chunk(path: Path, late: Path) -> None:
    metadata = read_metadata(path / MODEL)
    key = _find_cut_key(metadata)
    removed = metadata.state_dict_metadata[key].chunks.pop()
    metadata.storage_data = {
        index: info
        for index, info in metadata.storage_data.items()
        if (index.fqn, index.offset) != (key, removed.offsets)
    }
    write_metadata(path / MODEL, metadata)


def _rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    state = torch.load(path, weights_only=True)
    change(state)
    torch.save(state, path)


SURPRISE = "surprise"


def _find_victim(names: Any) -> str:
    """Return a parameter that is trained, so that the optimizer's files speak of it too."""
    trained = sorted(name for name in names if "lora_A" in name or "blocks.1.norm.bias" in name)
    return str(next((name for name in trained if "lora_A" in name), trained[0]))


def _remove_key(path: Path, late: Path) -> None:
    if not (path / MODEL).exists():
        _rewrite(path / "pytorch_model_fsdp.bin", lambda state: state.pop(_find_victim(state)))
        return
    metadata = read_metadata(path / MODEL)
    key = _find_victim(metadata.state_dict_metadata)
    del metadata.state_dict_metadata[key], metadata.planner_data[key]
    metadata.storage_data = {index: info for index, info in metadata.storage_data.items() if index.fqn != key}
    write_metadata(path / MODEL, metadata)


def _add_key(path: Path, late: Path) -> None:
    if not (path / MODEL).exists():

        def add(state: dict[str, Any]) -> None:
            name = _find_victim(state)
            state[name + SURPRISE] = state[name].clone()

        _rewrite(path / "pytorch_model_fsdp.bin", add)
        return
    metadata = read_metadata(path / MODEL)
    key = _find_victim(metadata.state_dict_metadata)
    new = key + SURPRISE
    metadata.state_dict_metadata[new] = copy.deepcopy(metadata.state_dict_metadata[key])
    *stem, leaf = metadata.planner_data[key]
    metadata.planner_data[new] = (*stem, leaf + SURPRISE)
    for index, info in list(metadata.storage_data.items()):
        if index.fqn == key:
            metadata.storage_data[dataclasses.replace(index, fqn=new)] = info
    write_metadata(path / MODEL, metadata)


_OTHER_STEP = "a shard of another step is whole in itself; without checksums and fingerprints nothing tells"
_NO_SUM = "the checksums of the manifest are what protects these bytes"
_NO_FINGERPRINT = "checksums fit, and there are no fingerprints of it"
_OWN_STATES = "this package restores generators from its own files"

DISK_FAULTS = {
    fault.name: fault
    for fault in (
        DiskFault("bit flipped in model", lambda p, late: _flip_payload(MODEL_FILE(p))),
        DiskFault("bit flipped in optimizer", lambda p, late: _flip_payload(OPTIMIZER_FILE(p))),
        DiskFault(
            "bit flipped in model's .metadata",
            lambda p, late: _flip_middle(p / MODEL / ".metadata"),
            ".metadata",
            (SHARDED,),
            (WHOLE,),
            (WHOLE,),
            _NO_SUM,
        ),
        DiskFault(
            "bit flipped in optimizer's .metadata",
            lambda p, late: _flip_middle(p / OPTIMIZER / ".metadata"),
            ".metadata",
            (SHARDED,),
            (WHOLE,),
            (WHOLE,),
            _NO_SUM,
        ),
        DiskFault("bit flipped in scheduler.bin", lambda p, late: _flip_payload(p / "scheduler.bin"), "scheduler.bin"),
        DiskFault(
            "bit flipped in custom_checkpoint_0.pkl",
            lambda p, late: _flip_payload(p / "custom_checkpoint_0.pkl"),
            "custom_checkpoint_0.pkl",
            load=(WHOLE, BARE),
            why=_NO_FINGERPRINT,
        ),
        DiskFault(
            "bit flipped in random_states_1.pkl",
            lambda p, late: _flip_payload(p / "random_states_1.pkl"),
            "random_states_1.pkl",
            load=(WHOLE, BARE),
            why=_OWN_STATES,
        ),
        *(
            DiskFault(
                f"bit flipped in {name}",
                lambda p, late, name=name: _flip_middle(p / DIRECTORY / name),
                name,
                KINDS,
                (WHOLE,),
                (WHOLE,),
                _NO_SUM,
            )
            for name in ("rng_rank_00001.safetensors", "progress_rank_00001.json", "manifest.json")
        ),
        DiskFault("model truncated", lambda p, late: _truncate(MODEL_FILE(p))),
        DiskFault("optimizer truncated", lambda p, late: _truncate(OPTIMIZER_FILE(p))),
        DiskFault("random states truncated", lambda p, late: _truncate(p / "random_states_1.pkl"), "random_states_1"),
        DiskFault(
            "two ranks' shard files exchanged",
            lambda p, late: _exchange(p / MODEL / "__0_0.distcp", p / MODEL / "__1_0.distcp"),
            kinds=(SHARDED,),
        ),
        DiskFault(
            "two ranks' random states exchanged",
            lambda p, late: _exchange(
                p / DIRECTORY / "rng_rank_00000.safetensors", p / DIRECTORY / "rng_rank_00001.safetensors"
            ),
            "rng_rank_0000",
            KINDS,
            (WHOLE, ADAPTED),
            (WHOLE, ADAPTED),
        ),
        DiskFault(
            "model shard of another step",
            lambda p, late: shutil.copy(MODEL_FILE(late), MODEL_FILE(p)),
            offline=(WHOLE, ADAPTED),
            load=(WHOLE, ADAPTED),
            why=_OTHER_STEP,
        ),
        DiskFault(
            "optimizer shard of another step",
            lambda p, late: shutil.copy(OPTIMIZER_FILE(late), OPTIMIZER_FILE(p)),
            offline=(WHOLE, ADAPTED),
            load=(WHOLE, ADAPTED),
            why=_OTHER_STEP,
        ),
        DiskFault("chunk removed from the metadata", _remove_chunk, kinds=(SHARDED,)),
        DiskFault("key missing", _remove_key, "blocks."),
        DiskFault(
            "key too many",
            _add_key,
            SURPRISE,
            KINDS,
            (WHOLE, ADAPTED),
            why="without a manifest and the model nothing tells which names belong",
            verify="full",
        ),
        DiskFault(
            "rank's shard file missing",
            lambda p, late: (p / MODEL / "__1_0.distcp").unlink(),
            "__1_0.distcp",
            (SHARDED,),
        ),
        DiskFault(
            "rank's random states missing (Accelerate's)",
            lambda p, late: (p / "random_states_1.pkl").unlink(),
            "random_states_1",
            KINDS,
            (WHOLE, ADAPTED),
            (WHOLE,),
            _OWN_STATES,
        ),
        DiskFault(
            "rank's random states missing (ours)",
            lambda p, late: (p / DIRECTORY / "rng_rank_00001.safetensors").unlink(),
            "rng_rank_00001",
            KINDS,
            (WHOLE, ADAPTED),
            (WHOLE, ADAPTED),
        ),
    )
}


def list_disk_faults(kind: str) -> list[tuple[str, str]]:
    """Return every fault of a kind of checkpoint with each of its variants."""
    return [(fault.name, each) for fault in DISK_FAULTS.values() if kind in fault.kinds for each in fault.variants]
