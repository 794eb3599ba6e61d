"""Tensors of real checkpoints copied into safetensors files, proven, and what happens when something is wrong."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from accel_fsdp_tools.errors import CheckpointIncompleteError, DamagedCheckpointError, StorageError
from accel_fsdp_tools.export import copier, planning, workers, writing
from accel_fsdp_tools.export.copying import CopyResult, copy_tensors
from accel_fsdp_tools.export.outputs import OutputFile, OutputTensor, split_into_files
from accel_fsdp_tools.export.passing import PassingSources
from accel_fsdp_tools.export.proof import Expected, OutputProof, ProofResult, list_expected, prove_tensors
from accel_fsdp_tools.export.source_checks import find_stored_crc
from accel_fsdp_tools.extents import Box, ByteRange, DiskTensor, Extent, Run, get_whole
from accel_fsdp_tools.fingerprint import Fingerprint, fingerprint_tensor
from accel_fsdp_tools.kernel import Kernel, Range
from accel_fsdp_tools.opening import open_checkpoint
from tests.checkpoints import expect_mesh_tensors, get_bytes, make_tensor, save_on_mesh
from tests.harness import run_ranks
from tests.manifests import flip_bit
from tests.test_export_outputs import DTYPES

pytestmark = pytest.mark.usefixtures("engine")

ROOT = Path(__file__).parent.parent


def plan(
    tensors: Mapping[str, DiskTensor], dtype: str | None = None, size: int | str = "50GB"
) -> tuple[OutputFile, ...]:
    """Return the files to write, floating tensors cast to `dtype` if given."""
    outputs = []
    for name, tensor in tensors.items():
        casts = dtype is not None and tensor.dtype.startswith(("float", "bfloat"))
        outputs.append(OutputTensor(name, tensor, dtype if casts and dtype else tensor.dtype))
    return split_into_files(outputs, size)


def save_plain(folder: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, DiskTensor]:
    """Write tensors one after another, at odd places, each an item with its CRC."""
    found, content = {}, bytearray(b"odd")
    path = folder / "source.raw"
    for name, tensor in tensors.items():
        data = get_bytes(tensor)
        item = ByteRange(str(path), len(content), len(data), zlib.crc32(data))
        shape = tuple(tensor.shape)
        extents = (Extent(get_whole(shape), item),) if data else ()
        found[name] = DiskTensor(name, str(tensor.dtype).removeprefix("torch."), shape, extents)
        content += data + b"."
    path.write_bytes(content)
    return found


def prove_output(
    directory: Path, files: tuple[OutputFile, ...], expected: Mapping[str, Expected], **options: Any
) -> ProofResult:
    """Read the whole output once more, at the end."""
    fingerprinted = {name for name, each in expected.items() if each.fingerprint is not None}
    proof = OutputProof(directory, files, fingerprinted)
    proof.open_files()
    proof.read_share(**options)
    return proof.conclude(expected)


def check(
    folder: Path, tensors: Mapping[str, DiskTensor], expected: Mapping[str, torch.Tensor], **options: Any
) -> CopyResult:
    """Copy, prove, and require the file that safetensors writes of `expected`, byte for byte."""
    out = folder / "out"
    out.mkdir()
    files = plan(tensors)
    proof = OutputProof(out, files, ())
    result = copy_tensors(files, out, again=proof, **options)
    save_file(
        {name: each.contiguous().clone() for name, each in expected.items()}, folder / "expected", {"format": "pt"}
    )
    assert (out / "model.safetensors").read_bytes() == (folder / "expected").read_bytes()
    proven = proof.conclude(list_expected(result))
    assert proven == prove_output(out, files, list_expected(result))
    assert proven.num_tensors == len(expected)
    assert proven.num_bytes == result.num_bytes_written == sum(each.nbytes for each in expected.values())
    return result


@pytest.fixture(scope="module")
def meshed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("meshed")
    (root / "out").mkdir()
    run_ranks(save_on_mesh, str(root / "out"), world_size=4, folder=root / "ranks")
    return root / "out"


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut into many units and blocks what is small, so that pieces have to be joined."""
    monkeypatch.setattr(planning, "UNIT_BYTES", 96)
    monkeypatch.setattr(planning, "BLOCK_BYTES", 32)
    monkeypatch.setattr(copier, "BLOCK_BYTES", 32)
    monkeypatch.setattr(copier, "_KERNEL_BLOCK_BYTES", 16)
    monkeypatch.setattr(planning, "_GATHER_BYTES", 128)
    monkeypatch.setattr("accel_fsdp_tools.export.proof.UNIT_BYTES", 80)
    monkeypatch.setattr("accel_fsdp_tools.export.proof.BLOCK_BYTES", 48)


# -- what is written -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_units")
def test_all_placements_of_four_ranks_in_small_pieces(meshed: Path, tmp_path: Path) -> None:
    """DCP: rows, columns, both, strided, replicated, transposed; all CRCs found in passing or by reading again."""
    tensors = open_checkpoint(meshed / "dcp").model.tensors
    result = check(tmp_path, tensors, expect_mesh_tensors(tensors), num_threads=3)
    items = {extent.bytes for each in tensors.values() for extent in each.extents}
    assert (result.num_items_checked, result.num_items_without_crc) == (len(items), 0)


@pytest.mark.parametrize("name", ["dcp", "ranks", "hand"])
def test_all_placements_of_every_format(meshed: Path, tmp_path: Path, name: str) -> None:
    tensors = open_checkpoint(meshed / name).model.tensors
    check(tmp_path, tensors, expect_mesh_tensors(tensors))


def save_uneven(folder: str) -> None:
    """Three ranks save odd dtypes and rows that three does not divide."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (3,))
    state = {
        name: distribute_tensor(each, mesh, [Shard(1 if name.endswith("columns") else 0)]) if each.ndim else each
        for name, each in make_uneven_tensors().items()
    }
    dcp.save({"model": state}, checkpoint_id=folder)


def make_uneven_tensors() -> dict[str, torch.Tensor]:
    return {
        "rows": make_tensor(torch.float32, 101, 7),
        "few.rows": make_tensor(torch.bfloat16, 2, 3),
        "columns": make_tensor(torch.float32, 4, 11),
        "größe.naïve.重み": make_tensor(torch.float64, 5, 5),
        "steps": make_tensor(torch.int64, 4),
        "mask": make_tensor(torch.bool, 10),
        "spectrum": make_tensor(torch.complex64, 7),
        "scalar": torch.tensor(3.25),
        "empty": torch.empty(0, 4),
    }


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("uneven")
    run_ranks(save_uneven, str(root / "dcp"), world_size=3, folder=root / "ranks")
    return root / "dcp"


def test_uneven_rows_of_three_ranks(uneven: Path, tmp_path: Path) -> None:
    check(tmp_path, open_checkpoint(uneven).model.tensors, make_uneven_tensors())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("is_cut", [True, False])
def test_casts_are_those_of_torch(
    uneven: Path, tmp_path: Path, dtype: str, is_cut: bool, request: pytest.FixtureRequest
) -> None:
    if is_cut:
        request.getfixturevalue("small_units")
    values = {"w": torch.randn(31, 9), "e5m2": torch.randn(65).to(torch.float8_e5m2), "d": torch.randn(17).double()}
    tensors = {**open_checkpoint(uneven).model.tensors, **save_plain(tmp_path, values)}
    tensors = {name: each for name, each in tensors.items() if name not in ("rows", "few.rows", "größe.naïve.重み")}
    expected = {**make_uneven_tensors(), **values}
    files = plan(tensors, dtype, "1KB")
    result = copy_tensors(files, tmp_path, fingerprints={"columns": fingerprint(expected["columns"])})
    prove_output(tmp_path, files, list_expected(result))
    found = {name: each for file in files for name, each in load_file(tmp_path / file.name).items()}
    assert sorted(found) == sorted(tensors)
    for name, tensor in found.items():
        target = getattr(torch, dtype) if expected[name].is_floating_point() else expected[name].dtype
        cast = expected[name].to(target)
        assert (tensor.dtype, tensor.shape) == (cast.dtype, cast.shape)
        numbers = (
            [each.nan_to_num(1.0, torch.inf, -torch.inf) for each in (tensor, cast)] if name == "columns" else None
        )
        assert get_bytes(numbers[0] if numbers else tensor) == get_bytes(numbers[1] if numbers else cast), name


def test_every_dtype(tmp_path: Path) -> None:
    values = {f"t{index:02}": make_tensor(dtype, 3, 5) for index, dtype in enumerate(DTYPES)}
    tensors = save_plain(tmp_path, values)
    out = tmp_path / "out"
    out.mkdir()
    files = plan(tensors)
    result = copy_tensors(files, out)
    prove_output(out, files, list_expected(result))
    save_file(values, tmp_path / "expected", {"format": "pt"})
    assert (out / "model.safetensors").read_bytes() == (tmp_path / "expected").read_bytes()
    assert result.num_items_checked == len(DTYPES)


def test_overflow_is_counted_by_tensor(tmp_path: Path) -> None:
    values = {"big": torch.tensor([1e6, -1e6, 7.0, torch.inf]), "fine": torch.ones(3)}
    result = copy_tensors(plan(save_plain(tmp_path, values), "float16"), tmp_path)
    assert result.num_overflowed == 2
    assert {name: each.num_overflowed for name, each in result.tensors.items()} == {"big": 2, "fine": 0}


@pytest.mark.usefixtures("small_units")
def test_runs_views_and_shared_storages(tmp_path: Path) -> None:
    """FSDP1's flat runs, a view into a larger storage, two names for the same bytes."""
    values = torch.arange(60, dtype=torch.int32)
    data = get_bytes(values)
    path = tmp_path / "flat.raw"
    path.write_bytes(data)
    item = ByteRange(str(path), 0, len(data), zlib.crc32(data))
    first, second = Extent(Run(0, 23), item), Extent(Run(23, 37), item, start=92)
    tensors = {
        "whole": DiskTensor("whole", "int32", (60,), (second, first)),
        "again": DiskTensor("again", "int32", (6, 10), (Extent(get_whole((6, 10)), item),)),
        "view": DiskTensor("view", "int32", (7,), (Extent(get_whole((7,)), item, start=12),)),
        "turned": DiskTensor("turned", "int32", (10, 6), (Extent(get_whole((10, 6)), item, strides=(1, 10)),)),
        "every other": DiskTensor("every other", "int32", (30,), (Extent(get_whole((30,)), item, strides=(2,)),)),
    }
    expected = {
        "whole": values,
        "again": values.view(6, 10),
        "view": values[3:10],
        "turned": values.view(6, 10).t(),
        "every other": values[::2],
    }
    assert check(tmp_path, tensors, expected).num_items_checked == 1


def test_files_of_other_sizes_and_progress(uneven: Path, tmp_path: Path) -> None:
    tensors = open_checkpoint(uneven).model.tensors
    seen: list[tuple[int, int]] = []
    files = plan(tensors, size=300)
    result = copy_tensors(files, tmp_path, progress=lambda done, total: seen.append((done, total)), num_threads=1)
    assert len(files) > 2
    assert seen[-1][0] == seen[-1][1] == result.num_bytes_read
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_nothing_imports_torch(uneven: Path, tmp_path: Path) -> None:
    """And numpy, which takes as long to load as all the rest, is for casts, fingerprints and columns only."""
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "import accel_fsdp_tools.export.offline\n"
        "from accel_fsdp_tools.export.copying import copy_tensors\n"
        "from accel_fsdp_tools.export.outputs import OutputTensor, split_into_files\n"
        "from accel_fsdp_tools.export.proof import OutputProof, list_expected\n"
        "from accel_fsdp_tools.opening import open_checkpoint\n"
        "tensors = open_checkpoint(sys.argv[1]).model.tensors\n"
        "tensors = {k: v for k, v in tensors.items() if v.dtype == 'float32'}\n"
        "def export(tensors, dtype):\n"
        "    files = split_into_files([OutputTensor(k, v, dtype) for k, v in tensors.items()])\n"
        "    out = Path(sys.argv[2], dtype)\n"
        "    out.mkdir()\n"
        "    proof = OutputProof(out, files, ())\n"
        "    result = copy_tensors(files, out, again=proof)\n"
        "    proof.conclude(list_expected(result))\n"
        "    assert len(result.tensors) == len(tensors), result\n"
        "    return {'torch', 'safetensors', 'transformers', 'accelerate', 'numpy'} & set(sys.modules)\n"
        "rows = {k: v for k, v in tensors.items() if k != 'columns'}\n"
        "assert len(rows) == 3 and not export(rows, 'float32'), sorted(sys.modules)\n"
        "assert export(tensors, 'bfloat16') == {'numpy'}, sorted(sys.modules)\n"
    )
    command = [sys.executable, "-W", "error", "-c", code, str(uneven), str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr


def test_places_beyond_4_gib(tmp_path: Path) -> None:
    """In the source, in the output, and in the plan between; nothing large is written."""
    path = tmp_path / "sparse.raw"
    with path.open("wb") as file:
        file.seek((1 << 32) + 5)
        file.write(b"\x01\x02\x03")
    item = ByteRange(str(path), (1 << 32) + 5, 3, zlib.crc32(b"\x01\x02\x03"))
    check(
        tmp_path,
        {"w": DiskTensor("w", "uint8", (3,), (Extent(get_whole((3,)), item),))},
        {"w": torch.arange(1, 4).byte()},
    )
    shape = (5, 1 << 30)
    whole = DiskTensor("w", "float32", shape, (Extent(get_whole(shape), ByteRange(str(path), 9, 20 << 30)),))
    (job,) = planning.list_jobs(plan({"w": whole}, "bfloat16"))
    position = 0
    for unit in planning.plan_units([job], check_crcs=True, gather_bytes=1):
        assert isinstance(unit, planning.CopyUnit)
        assert (unit.start, unit.offset) == (position, 9 + 4 * position)
        position += unit.length
    assert position == 5 << 30
    (tmp_path / "far").touch()
    with writing.Writer(tmp_path) as writer:
        writer.write("far", 5 << 32, memoryview(b"abc"))
    with (tmp_path / "far").open("rb") as file:
        file.seek(5 << 32)
        assert file.read() == b"abc"


@pytest.mark.matrix
def test_a_tensor_beyond_4_gib(tmp_path: Path) -> None:
    """A sparse source; the last elements and the tensor behind it are found beyond 32 bits, in source and output."""
    num_bytes = (1 << 32) + 4096
    path = tmp_path / "sparse.raw"
    with path.open("wb") as file:
        file.truncate(num_bytes + 2)
        file.seek(num_bytes - 3)
        file.write(b"\x01\x02\x03\x01\x01")
    big = DiskTensor("a", "uint8", (num_bytes,), (Extent(get_whole((num_bytes,)), ByteRange(str(path), 0, num_bytes)),))
    last = ByteRange(str(path), num_bytes, 2, zlib.crc32(b"\x01\x01"))
    after = DiskTensor("b", "bool", (2,), (Extent(get_whole((2,)), last),))
    out = tmp_path / "out"
    out.mkdir()
    files = plan({"a": big, "b": after})
    try:
        result = copy_tensors(files, out, sync=False)
        prove_output(out, files, list_expected(result))
        with (out / "model.safetensors").open("rb") as stream:
            stream.seek(-6, os.SEEK_END)
            assert stream.read() == b"\x00\x01\x02\x03\x01\x01"
        assert (out / "model.safetensors").stat().st_size > 1 << 32
    finally:
        (out / "model.safetensors").unlink(missing_ok=True)


# -- fingerprints ----------------------------------------------------------------------------------------------------


def fingerprint(tensor: torch.Tensor) -> Fingerprint:
    shape = tuple(tensor.shape)
    return fingerprint_tensor(tensor.contiguous(), get_whole(shape), shape)


@pytest.mark.usefixtures("small_units")
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_sources_are_what_the_manifest_recorded(meshed: Path, tmp_path: Path, dtype: str | None) -> None:
    """Whatever the placement, and also of tensors that are cast; then the output, by the same fingerprints."""
    tensors = open_checkpoint(meshed / "dcp").model.tensors
    recorded = {name: fingerprint(each) for name, each in expect_mesh_tensors(tensors).items()}
    files = plan(tensors, dtype)
    result = copy_tensors(files, tmp_path, fingerprints=recorded)
    assert {name: each.fingerprint for name, each in result.tensors.items()} == recorded
    if dtype is None:
        proof = prove_output(tmp_path, files, list_expected(result, recorded))
        assert proof.num_fingerprints == proof.num_tensors == len(recorded)


@pytest.mark.parametrize("dtype", [None, "float16"])
def test_a_source_that_is_not_what_was_in_memory(tmp_path: Path, dtype: str | None) -> None:
    """The CRC is right: the bytes were already wrong when they were written."""
    values = {"good": torch.randn(9), "bad": torch.randn(50)}
    tensors = save_plain(tmp_path, values)
    recorded = {name: fingerprint(each) for name, each in values.items()}
    recorded["bad"] = fingerprint(values["bad"].flip(0))
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(DamagedCheckpointError, match=r"'bad'.*not what was in memory") as caught:
        copy_tensors(plan(tensors, dtype), out, fingerprints=recorded)
    assert caught.value.fqn == "bad"
    assert list(out.iterdir()) == []
    result = copy_tensors(plan(tensors), out, vouched=recorded)
    with pytest.raises(DamagedCheckpointError, match=r"'bad'.*not what was in memory"):
        prove_output(out, plan(tensors), list_expected(result, recorded))


def test_no_crc_where_a_fingerprint_will_vouch(uneven: Path, tmp_path: Path) -> None:
    """From the live tensor to the output in one comparison; items that others need are checked."""
    tensors = dict(open_checkpoint(uneven).model.tensors)
    names = [name for name, each in tensors.items() if each.numel]
    recorded = {name: fingerprint(each) for name, each in make_uneven_tensors().items()}
    vouched = {name: recorded[name] for name in names[1:]}
    tensors["again"] = replace(tensors[names[-1]], fqn="again")
    files = plan(tensors)
    result = copy_tensors(files, tmp_path, vouched=vouched)
    needed = {extent.bytes for name in (names[0], "again") for extent in tensors[name].extents if extent.part.numel}
    assert result.num_items_checked == len(needed)
    assert {name for name, each in result.tensors.items() if each.crc32 is None} == set(vouched)
    proof = prove_output(tmp_path, files, list_expected(result, vouched))
    assert (proof.num_tensors, proof.num_fingerprints) == (len(tensors), len(vouched))
    with pytest.raises(ValueError, match="nothing to compare it with"):
        prove_output(tmp_path, files, list_expected(result))


@pytest.mark.parametrize("what", ["source", "output"])
def test_what_a_fingerprint_finds_is_told_apart(tmp_path: Path, what: str) -> None:
    """A file of the checkpoint that has changed since it was written, or the output: the same fingerprint is wrong."""
    values = {"good": torch.randn(9), "bad": torch.randn(50)}
    tensors = save_plain(tmp_path, values)
    recorded = {name: fingerprint(each) for name, each in values.items()}
    source, out = tmp_path / "source.raw", tmp_path / "out"
    out.mkdir()
    if what == "source":
        flip_bit(source, tensors["bad"].extents[0].offset + 7)
    result = copy_tensors(plan(tensors), out, vouched=recorded)
    if what == "output":
        path = out / "model.safetensors"
        flip_bit(path, path.stat().st_size - 7)
    with pytest.raises(DamagedCheckpointError) as caught:
        prove_output(out, plan(tensors), list_expected(result, recorded))
    assert caught.value.path == str(source if what == "source" else out / "model.safetensors")
    assert ("CRC-32" if what == "source" else "is not what was read") in str(caught.value)
    if what == "source":  # summed beforehand, or on the way
        with pytest.raises(DamagedCheckpointError, match="CRC-32"):
            prove_tensors(list(tensors.values()), recorded)
        (out / "model.safetensors").unlink()
        with pytest.raises(DamagedCheckpointError, match="CRC-32"):
            copy_tensors(plan(tensors), out, fingerprints=recorded)


@pytest.mark.parametrize("is_cut", [True, False])
def test_sources_are_compared_without_copying(
    meshed: Path, tmp_path: Path, is_cut: bool, request: pytest.FixtureRequest
) -> None:
    if is_cut:
        request.getfixturevalue("small_units")
    tensors = open_checkpoint(meshed / "dcp").model.tensors
    recorded = {name: fingerprint(each) for name, each in expect_mesh_tensors(tensors).items()}
    assert prove_tensors(list(tensors.values()), recorded) == len(tensors)
    assert prove_tensors(list(tensors.values()), {"norm.hsdp": recorded["norm.hsdp"]}, num_threads=1) == 1
    for name in ("rows.both", "cube.columns", "bf16.transposed"):
        other = {**recorded, name: recorded["vector.hsdp"]}
        with pytest.raises(DamagedCheckpointError, match=f"'{name}': what the checkpoint's files hold"):
            prove_tensors(list(tensors.values()), other)


def cut_rows(tensor: DiskTensor, name: str, first: int, rows: int, *, turned: bool = False) -> DiskTensor:
    """Return rows of a matrix that lies in one piece as a tensor of their own, or as the transpose of that."""
    (extent,) = tensor.extents
    columns = tensor.shape[1]
    shape = (columns, rows) if turned else (rows, columns)
    start = first * columns * 4
    return DiskTensor(
        name, "float32", shape, (Extent(get_whole(shape), extent.bytes, (1, columns) if turned else None, start),)
    )


@pytest.mark.parametrize(
    "how", ["passing", "cast", "turned", "left out", "twice", "tied", "not whole", "in small units"]
)
def test_what_is_cut_out_of_a_fused_tensor_is_compared_with_its_fingerprint(
    tmp_path: Path, how: str, request: pytest.FixtureRequest
) -> None:
    """Summed on the way where each byte is used once and as it lies; else it's left to be read beforehand."""
    if how == "in small units":
        request.getfixturevalue("small_units")
    values = {"plain": torch.randn(5), "fused": torch.randn(7, 9), "other": torch.randn(3)}
    tensors = save_plain(tmp_path, values)
    fused = tensors["fused"]
    recorded = fingerprint(values["fused"])
    rows = {"a": (0, 2), "b": (2, 4), "c": (6, 1)}
    outputs = {
        name: cut_rows(fused, name, *each, turned=how == "turned" and name == "b") for name, each in rows.items()
    }
    expected = {name: values["fused"][first : first + count] for name, (first, count) in rows.items()}
    if how == "left out":
        del outputs["c"], expected["c"]
    if how == "twice":
        outputs["d"], expected["d"] = replace(outputs["a"], fqn="d"), expected["a"]
    if how == "turned":
        expected["b"] = expected["b"].T
    if how == "not whole":
        fused = replace(fused, extents=(replace(fused.extents[0], strides=(1, 7)),))
    sources = {"fused": (fused, recorded)} | ({"tied": (fused, recorded)} if how == "tied" else {})
    everything = {"plain": tensors["plain"], **outputs}
    files = plan(everything, "bfloat16" if how == "cast" else None)
    passing = PassingSources(sources, files[0].tensors)
    if how not in ("passing", "cast", "in small units"):
        assert passing.expected == {}
        return
    assert passing.expected == sources

    def copy(folder: str, passing: PassingSources) -> bytes:
        out = tmp_path / folder
        out.mkdir()
        proof = OutputProof(out, files, ())
        proof.conclude(list_expected(copy_tensors(files, out, proven=outputs, passing=passing, again=proof)))
        return (out / "model.safetensors").read_bytes()

    dtype = torch.bfloat16 if how == "cast" else torch.float32
    wanted = {name: each.to(dtype).contiguous() for name, each in {"plain": values["plain"], **expected}.items()}
    save_file(wanted, tmp_path / "expected", {"format": "pt"})
    assert copy("right", passing) == (tmp_path / "expected").read_bytes()
    wrong = PassingSources({"fused": (fused, fingerprint(values["fused"].flip(0)))}, files[0].tensors)
    with pytest.raises(DamagedCheckpointError, match="'fused': what the checkpoint's files hold"):
        copy("wrong", wrong)
    flip_bit(tmp_path / "source.raw", fused.extents[0].offset + 200)
    with pytest.raises(DamagedCheckpointError, match="CRC-32") as caught:
        copy("damaged", passing)
    assert caught.value.fqn == "fused"


# -- the proof -------------------------------------------------------------------------------------------------------


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, tuple[OutputFile, ...], dict[str, Expected]]:
    """Two tensors of equal shape, cast, written and proven."""
    values = {name: torch.randn(40, 10, generator=torch.Generator().manual_seed(len(name))) for name in ("a", "bb")}
    files = plan(save_plain(tmp_path, values), "bfloat16")
    out = tmp_path / "out"
    out.mkdir()
    expected = list_expected(copy_tensors(files, out))
    prove_output(out, files, expected)
    return out, files, expected


@pytest.mark.parametrize("place", ["first", "last", "exchange", "shift", "zeros"])
def test_a_wrong_write_is_found(written: tuple[Path, tuple[OutputFile, ...], dict[str, Expected]], place: str) -> None:
    out, files, expected = written
    path = out / files[0].name
    data = bytearray(path.read_bytes())
    start, middle, _ = files[0].offsets
    if place == "first":
        data[start] ^= 1
    elif place == "last":
        data[-1] ^= 0x80
    elif place == "exchange":
        data[start:] = data[middle:] + data[start:middle]
    elif place == "shift":
        data[start:middle] = data[start - 2 : middle - 2]
    else:
        data[middle - 64 : middle] = bytes(64)
    path.write_bytes(data)
    with pytest.raises(DamagedCheckpointError, match="is not what was read") as caught:
        prove_output(out, files, expected)
    assert caught.value.fqn == ("bb" if place == "last" else "a")
    assert caught.value.path == str(path)


@pytest.mark.parametrize("what", ["dtype", "shape", "name", "metadata", "longer", "shorter", "gone", "offsets"])
def test_a_wrong_header_or_size_is_found(
    written: tuple[Path, tuple[OutputFile, ...], dict[str, Expected]], what: str
) -> None:
    out, files, expected = written
    path = out / files[0].name
    data = path.read_bytes()
    changed = {
        "dtype": data.replace(b'"BF16"', b'"F16" ', 1),
        "shape": data.replace(b"[40,10]", b"[10,40]", 1),
        "name": data.replace(b'"bb"', b'"bc"', 1),
        "metadata": data.replace(b'"pt"', b'"tf"', 1),
        "longer": data + b"\0",
        "shorter": data[:-1],
        "offsets": data.replace(b"[0,800]", b"[8,808]", 1),
    }
    path.unlink()
    if what != "gone":
        assert changed[what] != data
        path.write_bytes(changed[what])
    with pytest.raises(CheckpointIncompleteError if what == "gone" else DamagedCheckpointError):
        prove_output(out, files, expected)


def copy_proven(tensors: Mapping[str, DiskTensor], out: Path, dtype: str | None = None, **options: Any) -> ProofResult:
    """Copy and prove in one pass, as an export does; stored CRCs vouch for what is kept."""
    out.mkdir()
    files = plan(tensors, dtype)
    crcs = {
        output.name: crc
        for file in files
        for output in file.tensors
        if output.dtype == output.source.dtype and (crc := find_stored_crc(output.source)) is not None
    }
    proof = OutputProof(out, files, ())
    result = copy_tensors(files, out, again=proof, vouched=crcs, **options)
    return proof.conclude(list_expected(result, stored_crcs=crcs))


@pytest.mark.usefixtures("small_units")
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_write_to_a_wrong_place_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, dtype: str | None
) -> None:
    """All bytes read are right, one block goes elsewhere: over one that was proven, or over one still to come."""
    values = {name: torch.randn(100) for name in ("a", "b", "c")}
    tensors = save_plain(tmp_path, values)
    copy_proven(tensors, tmp_path / "right", dtype)
    right, copy = writing.Writer.write, Kernel.copy
    late = 20 if engine == "python" else 12  # blocks, or units
    for number, distance in ((1, 32), (5, -64), (late, 200), (late, -4)):
        count = 0

        def copy_range(self: Kernel, what: Range, number: int = number, distance: int = distance) -> bool:
            nonlocal count
            count += 1
            what.target_offset += distance if count == number else 0
            return copy(self, what)

        def write(
            self: writing.Writer,
            name: str,
            offset: int,
            data: memoryview,
            number: int = number,
            distance: int = distance,
        ) -> None:
            nonlocal count
            count += bool(offset)  # the header apart
            right(self, name, offset + (distance if count == number else 0), data)

        with monkeypatch.context() as patch:
            if engine == "kernel":
                patch.setattr(Kernel, "copy", copy_range)
            else:
                patch.setattr(writing.Writer, "write", write)
            with pytest.raises(DamagedCheckpointError, match=r"'[abc]' is not what was read"):
                copy_proven(tensors, tmp_path / f"out{number}{distance}", dtype, num_threads=1)


@pytest.mark.usefixtures("small_units")
def test_zeros_cannot_go_to_a_wrong_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    """They would be found at the right one all the same, since files are made of zeros. So none are written."""
    values = {"a": torch.ones(40), "b": torch.zeros(80), "c": torch.tensor([0.0, 0.0, 1.0]), "d": torch.zeros(3)}
    tensors = save_plain(tmp_path, values)
    written: list[bytes] = []
    right, copy = writing.Writer.write, Kernel.copy

    def copy_range(self: Kernel, what: Range) -> bool:
        if not any(os.pread(what.source, what.count * what.source_size, what.source_offset)):
            what.target_offset = 8  # where it would do harm
        return copy(self, what)

    def write(self: writing.Writer, name: str, offset: int, data: memoryview) -> None:
        written.append(bytes(data))
        right(self, name, offset, data)

    monkeypatch.setattr(writing.Writer, "write", write)
    monkeypatch.setattr(Kernel, "copy", copy_range)
    copy_proven(tensors, tmp_path / "out")
    assert all(any(data) for data in written)
    assert sum(map(len, written[1:])) == (40 * 4 + 3 * 4 if engine == "python" else 0)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(found[name], value) for name, value in values.items())


@pytest.mark.parametrize("what", ["source", "output", "alias", "header"])
def test_stored_crcs_vouch_for_the_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, what: str
) -> None:
    """One comparison from the stored items to the output, for each tensor that is made of them."""
    if engine == "kernel" and what != "source":
        pytest.skip("planted in writes of Python")
    tensors = save_plain(tmp_path, {"good": torch.randn(9), "bad": torch.randn(50)})
    tensors["c"] = replace(tensors["bad"], fqn="c")  # the same items twice
    assert find_stored_crc(tensors["bad"]) == tensors["bad"].extents[0].bytes.crc32
    source = tmp_path / "source.raw"
    right = os.pwrite
    if what == "source":
        flip_bit(source, tensors["bad"].extents[0].offset + 7)

    def write(descriptor: int, data: memoryview, offset: int) -> int:
        written = bytearray(data)
        if offset and len(data) == 200 and (what != "alias" or offset >= wrong_from):
            written[7] ^= 1
        if what == "header" and offset:
            right(descriptor, b" ", 9)
        return right(descriptor, written if what in ("output", "alias") else data, offset)

    wrong_from = plan(tensors)[0].offsets[1]
    monkeypatch.setattr(os, "pwrite", write)
    with pytest.raises(DamagedCheckpointError) as caught:
        copy_proven(tensors, tmp_path / "out", num_threads=1)
    assert caught.value.path == str(source if what == "source" else tmp_path / "out" / "model.safetensors")
    expected = {"source": "CRC-32", "output": "'bad' is not what was read", "alias": "'c' is not", "header": "header"}
    assert expected[what] in str(caught.value)


def test_where_no_stored_crc_vouches(tmp_path: Path) -> None:
    """Part of an item, or none stored: the output is compared with what was read."""
    tensors = save_plain(tmp_path, {"a": torch.randn(9)})
    item = tensors["a"].extents[0].bytes
    half = DiskTensor("a", "float32", (4,), (Extent(Run(0, 4), item),))
    bare = replace(tensors["a"], extents=(Extent(get_whole((9,)), replace(item, crc32=None)),))
    turned = DiskTensor("a", "float32", (3, 3), (Extent(get_whole((3, 3)), item, strides=(1, 3)),))
    for number, tensor in enumerate((half, bare, turned)):
        assert find_stored_crc(tensor) is None
        assert copy_proven({"a": tensor}, tmp_path / str(number)).num_tensors == 1


# -- what is refused -------------------------------------------------------------------------------------------------


def expect_failure(
    tmp_path: Path, tensors: Mapping[str, DiskTensor], error: type[Exception], match: str, **options: Any
) -> Any:
    """Require the failure, and that nothing is left of the output."""
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(error, match=match) as caught:
        copy_tensors(plan(tensors), out, **options)
    assert list(out.iterdir()) == []
    return caught.value


@pytest.mark.parametrize("is_cut", [True, False])
@pytest.mark.parametrize("name", ["rows", "columns", "steps"])
def test_a_wrong_crc(uneven: Path, tmp_path: Path, name: str, is_cut: bool, request: pytest.FixtureRequest) -> None:
    """One bit of a chunk flipped on disk: copied in one piece, in several, and gathered."""
    if is_cut:
        request.getfixturevalue("small_units")
    tensors = dict(open_checkpoint(uneven).model.tensors)
    extent = tensors[name].extents[-1]
    data = bytearray(Path(extent.bytes.path).read_bytes())
    data[extent.offset + 3] ^= 0x10
    copy = tmp_path / "damaged"
    copy.write_bytes(data)
    damaged = [replace(each, bytes=replace(each.bytes, path=str(copy))) for each in tensors[name].extents[-1:]]
    tensors[name] = replace(tensors[name], extents=(*tensors[name].extents[:-1], *damaged))
    error = expect_failure(tmp_path, tensors, DamagedCheckpointError, "CRC-32")
    assert (error.fqn, error.path) == (name, str(copy))
    result = copy_tensors(plan(tensors), tmp_path / "out", check_crcs=False)
    assert result.num_items_checked == 0


@pytest.mark.parametrize("fault", ["hole", "overlap", "outside"])
def test_chunks_that_do_not_tile(tmp_path: Path, fault: str) -> None:
    (tensor,) = save_plain(tmp_path, {"w": torch.randn(6, 4)}).values()
    item = tensor.extents[0].bytes
    second = {"hole": Box((4, 0), (2, 4)), "overlap": Box((2, 0), (4, 4)), "outside": Box((3, 0), (4, 4))}[fault]
    extents = (Extent(Box((0, 0), (3, 4)), item), Extent(second, item))
    error = expect_failure(
        tmp_path, {"w": replace(tensor, extents=extents)}, DamagedCheckpointError, "'w' is not whole"
    )
    assert error.fqn == "w"
    lacks = {"hole": "lack 4 elements", "overlap": "hold 4 elements twice", "outside": "reach beyond"}
    assert lacks[fault] in str(error)


@pytest.mark.parametrize("kind", ["rows", "columns"])
def test_a_source_that_is_cut_off_or_gone(uneven: Path, tmp_path: Path, kind: str) -> None:
    tensors = dict(open_checkpoint(uneven).model.tensors)
    extent = tensors[kind].extents[0]
    copy = tmp_path / "short"
    copy.write_bytes(Path(extent.bytes.path).read_bytes()[: extent.offset + 5])
    moved = replace(extent, bytes=replace(extent.bytes, path=str(copy)))
    tensors[kind] = replace(tensors[kind], extents=(moved, *tensors[kind].extents[1:]))
    error = expect_failure(tmp_path, tensors, DamagedCheckpointError, f"'{kind}': .*short ends before byte")
    assert (error.fqn, error.path) == (kind, str(copy))
    copy.unlink()
    (tmp_path / "out").rmdir()
    error = expect_failure(tmp_path, tensors, CheckpointIncompleteError, f"'{kind}': .*missing")
    assert error.fqn == kind


def test_a_source_that_cannot_be_read(tmp_path: Path) -> None:
    tensors = save_plain(tmp_path, {"w": torch.randn(3)})
    (tmp_path / "source.raw").unlink()
    (tmp_path / "source.raw").mkdir()
    expect_failure(tmp_path, tensors, DamagedCheckpointError, "'w': .*source.raw cannot be read: Is a directory")


def test_a_target_that_cannot_be_written(tmp_path: Path) -> None:
    """A directory that isn't there, one where even root may not create files, a file that exists."""
    files = plan(save_plain(tmp_path, {"w": torch.randn(3)}))
    for directory in (tmp_path / "nowhere", Path("/proc")):
        with pytest.raises(StorageError, match="cannot be written") as caught:
            copy_tensors(files, directory)
        assert caught.value.path == str(directory / "model.safetensors")
    (tmp_path / "model.safetensors").write_bytes(b"mine")
    with pytest.raises(StorageError, match="exists already"):
        copy_tensors(files, tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == b"mine"


@pytest.mark.parametrize("when", ["reserving", "writing"])
def test_a_full_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, when: str) -> None:
    tensors = save_plain(tmp_path, {"w": torch.randn(300), "b": torch.randn(3)})
    if when == "reserving":
        monkeypatch.setattr(writing, "_find_fallocate", lambda: lambda descriptor, size: errno.ENOSPC)
    else:
        right = os.pwrite

        def write(descriptor: int, data: memoryview, offset: int) -> int:
            if len(data) == 1200:
                raise OSError(errno.ENOSPC, "full")
            return right(descriptor, data[:5], offset)  # short writes go on where they stopped

        monkeypatch.setattr(os, "pwrite", write)
        monkeypatch.setattr(Kernel, "copy", lambda *_: False)  # it has failed, and Python finds out why
    expect_failure(tmp_path, tensors, StorageError, "the storage is full")


def test_a_limit_on_the_size_of_files(tmp_path: Path) -> None:
    """A real limit, of a process of its own."""
    code = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from accel_fsdp_tools.export.copying import copy_tensors\n"
        "from accel_fsdp_tools.export.outputs import OutputTensor, split_into_files\n"
        "from accel_fsdp_tools.opening import open_checkpoint\n"
        "from accel_fsdp_tools.errors import StorageError\n"
        "tensors = open_checkpoint(sys.argv[1]).model.tensors\n"
        "files = split_into_files([OutputTensor(k, v, v.dtype) for k, v in tensors.items()])\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try:\n"
        "    copy_tensors(files, Path(sys.argv[2]))\n"
        "except StorageError as error:\n"
        "    assert 'does not allow so large a file' in str(error), error\n"
        "    assert list(Path(sys.argv[2]).iterdir()) == []\n"
        "else:\n"
        "    raise SystemExit('no error')\n"
    )
    save_file({"w": torch.randn(1000)}, tmp_path / "source.safetensors")
    (tmp_path / "out").mkdir()
    command = [sys.executable, "-c", code, str(tmp_path / "source.safetensors"), str(tmp_path / "out")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr


def test_a_file_system_that_cannot_reserve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"w": torch.randn(300)}
    for function in (None, lambda descriptor, size: errno.EOPNOTSUPP):
        monkeypatch.setattr(writing, "_find_fallocate", lambda found=function: found)
        folder = tmp_path / str(function is None)
        folder.mkdir()
        check(folder, save_plain(folder, values), values)


# -- the parts -------------------------------------------------------------------------------------------------------


def test_the_first_failure_stops_all_threads() -> None:
    done: list[int] = []

    class Worker:
        def __enter__(self) -> Any:
            return self.do

        def __exit__(self, *_: object) -> None:
            done.append(-1)

        def do(self, unit: int) -> None:
            if unit == 5:
                raise ValueError("unit 5")
            done.append(unit)

    with pytest.raises(ValueError, match="unit 5"):
        workers.run_units(iter(range(100_000)), Worker, 3)
    assert done.count(-1) == 3
    assert len(done) < 100_000

    def fail() -> Any:
        yield 1
        raise KeyError("planning")

    with pytest.raises(KeyError, match="planning"):
        workers.run_units(fail(), Worker, 2)


def test_ranges() -> None:
    assert list(planning.cut(7, 3)) == [(0, 3), (3, 3), (6, 1)]
    assert list(planning.cut(3, 3)) == [(0, 3)]
    assert list(planning.cut(0, 3)) == []


def test_spans_end_to_end() -> None:
    assert planning.chain_spans([(4, 2), (0, 4), (6, 1)], 7) == [1, 0, 2]
    assert planning.chain_spans([(4, 2), (0, 3)], 6) is None
    assert planning.chain_spans([(0, 8)], 6) is None
    assert planning.chain_spans([], 0) == []


def test_threads() -> None:
    assert workers.count_threads(5) == 5
    assert workers.count_threads(0) == 1
    assert 1 <= workers.count_threads(None) <= workers.MAX_THREADS


def test_memory_does_not_grow_with_the_tensor(tmp_path: Path) -> None:
    """Peak of what is allocated: rows that are copied, columns that are gathered, a cast."""
    import tracemalloc

    path = tmp_path / "sparse.raw"
    with path.open("wb") as file:
        file.truncate(1 << 26)
    item = ByteRange(str(path), 0, 1 << 26)
    shape = (1 << 12, 1 << 12)
    half = (1 << 12, 1 << 11)
    columns = tuple(Extent(Box((0, index << 11), half), ByteRange(str(path), index << 25, 1 << 25)) for index in (0, 1))
    tensors = {
        "rows": DiskTensor("rows", "float32", shape, (Extent(get_whole(shape), item),)),
        "columns": DiskTensor("columns", "float32", shape, columns),
    }
    files = plan(tensors, "bfloat16")
    tracemalloc.start()
    try:
        copy_tensors(files, tmp_path, num_threads=2, sync=False)
        assert tracemalloc.get_traced_memory()[1] < 50e6
    finally:
        tracemalloc.stop()
