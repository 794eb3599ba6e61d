"""The zips that torch writes, alone and embedded; whatever else ends in a zip is refused."""

from __future__ import annotations

import io
import random
import struct
import zipfile
import zlib
from pathlib import Path

import pytest
import torch

from accel_fsdp_tools.errors import CheckpointIncompleteError, DamagedCheckpointError
from accel_fsdp_tools.formats import zips
from accel_fsdp_tools.formats.pickles import load_pickle
from accel_fsdp_tools.formats.zips import MemoryWindow, open_torch_zip, open_window
from tests.attacks import save_to_bytes

VALUE = {"w": torch.arange(5000, dtype=torch.float32), "b": torch.tensor([1.5, 2.5]), "n": 3}


def open_bytes(data: bytes) -> zips.TorchZip:
    return open_torch_zip(MemoryWindow(data, Path("memory"), "memory"))


@pytest.mark.parametrize("before", [0, 1, 4093])
def test_entries_and_payloads_are_found_wherever_the_zip_lies(tmp_path: Path, before: int) -> None:
    data = save_to_bytes(VALUE)
    path = tmp_path / "file.distcp"
    path.write_bytes(b"x" * before + data + b"PK\x05\x06 and more")
    with open_window(path) as window:
        archive = open_torch_zip(window.narrow(before, len(data), "item"))
        state = load_pickle(archive.read("data.pkl"), where="item")
        for name in ("w", "b"):
            key = f"data/{state[name].storage.key}"
            place = archive.locate(key)
            expected = VALUE[name].numpy().tobytes()
            assert place.size_bytes == len(expected)
            assert path.read_bytes()[place.offset : place.offset + place.size_bytes] == expected
            assert place.crc32 == zlib.crc32(expected)
            assert archive.read(key) == expected
            assert archive.read_range(key, 4, 4) == expected[4:8]
            with pytest.raises(DamagedCheckpointError):
                archive.read_range(key, 4, len(expected))
        assert archive.read("byteorder") == b"little"
        with pytest.raises(DamagedCheckpointError, match="no entry"):
            archive.locate("data/7")


def test_same_entries_as_zipfile_and_a_directory_longer_than_the_tail() -> None:
    data = save_to_bytes({str(index): torch.full((index,), 1.0) for index in range(300)})
    archive = open_bytes(data)
    with zipfile.ZipFile(io.BytesIO(data)) as reference:
        assert {f"{archive.root}/{name}" for name in archive.entries} == set(reference.namelist())
        for info in reference.infolist():
            name = info.filename.removeprefix(f"{archive.root}/")
            assert archive.read(name) == reference.read(info)
            assert archive.entries[name].crc32 == (info.CRC or None)


def test_no_checksums_when_torch_was_told_not_to_compute_them() -> None:
    computed = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        data = save_to_bytes(VALUE)
    finally:
        torch.serialization.set_crc32_options(computed)
    archive = open_bytes(data)
    assert archive.locate("data/0").crc32 is None
    assert archive.read("data/0") == VALUE["w"].numpy().tobytes()


def test_sizes_beyond_32_bits(tmp_path: Path) -> None:
    """A sparse file of 5 GB: a zip64 entry as torch writes one, without 5 GB of data."""
    size, name = 5 << 30, b"archive/data/0"
    local = struct.pack("<4s5H3I2H", b"PK\x03\x04", 0, 0x808, 0, 0, 0, 0, 0, 0, len(name), 0) + name
    second = b"archive/data.pkl"
    second_at = len(local) + size
    tail = struct.pack("<4s5H3I2H", b"PK\x03\x04", 0, 0x808, 0, 0, 0, 0, 0, 0, len(second), 0) + second + b"N."
    extra = struct.pack("<2H2Q", 1, 16, size, size)
    entry = ("<4s6H3I5H2I", b"PK\x01\x02", 0, 0, 0x808, 0, 0, 0)
    directory_at = second_at + len(tail)
    directory = struct.pack(*entry, 0, 0xFFFFFFFF, 0xFFFFFFFF, len(name), len(extra), 0, 0, 0, 0, 0) + name + extra
    extra = struct.pack("<2HQ", 1, 8, second_at)
    directory += struct.pack(*entry, 0, 2, 2, len(second), len(extra), 0, 0, 0, 0, 0xFFFFFFFF) + second + extra
    end = struct.pack("<4sQ2H2I4Q", b"PK\x06\x06", 44, 0, 0, 0, 0, 2, 2, len(directory), directory_at)
    end += struct.pack("<4sIQI", b"PK\x06\x07", 0, directory_at + len(directory), 1)
    end += struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 2, 2, len(directory), 0xFFFFFFFF, 0)
    path = tmp_path / "big"
    with path.open("wb") as file:
        file.write(local)
        file.seek(second_at)
        file.write(tail + directory + end)
    with open_window(path) as window:
        archive = open_torch_zip(window)
        assert archive.locate("data/0") == zips.Payload(len(local), size, None)
        assert archive.read("data.pkl") == b"N."


def test_what_does_not_fit_into_the_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345678")
    with open_window(path) as window:
        assert window.read(2, 3) == b"345"
        for start, length in ((0, 9), (-1, 2), (5, -1), (9, 1)):
            with pytest.raises(DamagedCheckpointError) as caught:
                window.read(start, length)
            assert caught.value.path == str(path)
            with pytest.raises(DamagedCheckpointError, match="belongs to another save"):
                window.narrow(start, length, "item")
        path.write_bytes(b"1")
        with pytest.raises(DamagedCheckpointError, match="cut off"):
            window.read(0, 8)


def test_what_is_no_file(tmp_path: Path) -> None:
    import os

    with pytest.raises(CheckpointIncompleteError, match="missing"), open_window(tmp_path / "absent"):
        pass
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(DamagedCheckpointError, match="not a regular file"), open_window(path):
            pass


def _write_zip(*names: str, compress: bool = False, comment: bytes = b"") -> bytes:
    stream = io.BytesIO()
    method = zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED
    with zipfile.ZipFile(stream, "w", method) as archive:
        for name in names:
            archive.writestr(name, b"\x80\x02N." * 20)
        archive.comment = comment
    return stream.getvalue()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (_write_zip("archive/data.pkl", compress=True), "compressed"),
        (_write_zip("archive/data.pkl", "archive/DATA.PKL"), "repeated"),
        (_write_zip("archive/data.pkl", "other/data.pkl"), "misplaced"),
        (_write_zip("data.pkl"), "misplaced"),
        (_write_zip("archive/däta.pkl"), "name"),
        (_write_zip("archive/data.pkl", comment=b"x"), "does not end"),
        (_write_zip("archive/data.pkl") + b"\0", "does not end"),
        (b"\0" + _write_zip("archive/data.pkl"), "wrong place"),
        (_write_zip("archive/data.pkl") * 2, "wrong place"),
        (_write_zip(), "wrong place"),
        (b"PK\x03\x04", "too short"),
        (b"", "too short"),
    ],
)
def test_zips_that_torch_does_not_write(data: bytes, reason: str) -> None:
    with pytest.raises(DamagedCheckpointError, match=reason):
        open_bytes(data)


def test_a_name_is_never_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    archive = open_bytes(_write_zip("archive/../../up", "archive//etc/passwd"))
    assert archive.read("../../up") == b"\x80\x02N." * 20
    assert list(tmp_path.iterdir()) == []


def test_every_cut_and_random_damage_is_an_error_of_ours() -> None:
    data = save_to_bytes({"w": torch.ones(300), "n": [1, 2]})
    generator = random.Random(0)
    for length in range(0, len(data), 7):
        with pytest.raises(DamagedCheckpointError):
            open_bytes(data[:length])
    unnoticed = 0
    for _ in range(3000):
        damaged = bytearray(data)
        place = generator.randrange(len(data))
        damaged[place] ^= 1 << generator.randrange(8)
        try:
            archive = open_bytes(bytes(damaged))
            same = all(archive.read(name) == open_bytes(data).read(name) for name in archive.entries)
            unnoticed += not same
        except (DamagedCheckpointError, KeyError):
            continue
    assert unnoticed == 0  # padding and dates may flip, contents may not
