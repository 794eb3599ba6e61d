"""Checksums, durable writes, and paths that stay inside."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import xxhash

from accel_fsdp_tools import files
from accel_fsdp_tools.errors import CheckpointIncompleteError, DamagedCheckpointError


@pytest.mark.parametrize("size", [0, 1, (1 << 20) - 1, 1 << 20, (2 << 20) + 7])
def test_checksum_is_xxh3_128_of_the_bytes(tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    (tmp_path / "f").write_bytes(data)
    assert files.compute_checksum(tmp_path / "f") == (size, xxhash.xxh3_128_hexdigest(data))


def test_sealed_files_pass_their_check(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for name in ("a/x", "b"):
        (tmp_path / name).write_bytes(os.urandom(100))
    names = files.list_files(tmp_path)
    assert names == ["a/x", "b"]
    sealed = files.seal_files(tmp_path, names)
    assert [(facts.path, facts.size_bytes) for facts in sealed] == [("a/x", 100), ("b", 100)]
    files.check_files(tmp_path, sealed)


def test_every_single_flipped_bit_is_found(tmp_path: Path) -> None:
    path = tmp_path / "f"
    data = bytearray(os.urandom(64))
    path.write_bytes(data)
    sealed = files.seal_files(tmp_path, ["f"])
    for bit in range(len(data) * 8):
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        with pytest.raises(DamagedCheckpointError, match="damaged") as caught:
            files.check_files(tmp_path, sealed)
        assert caught.value.path == str(path)
        data[bit // 8] ^= 1 << bit % 8


def test_missing_and_truncated_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"12345")
    sealed = files.seal_files(tmp_path, ["f"])
    (tmp_path / "f").write_bytes(b"1234")
    with pytest.raises(DamagedCheckpointError, match="4 bytes, 5 were written"):
        files.check_files(tmp_path, sealed, checksums=False)
    (tmp_path / "f").unlink()
    with pytest.raises(CheckpointIncompleteError, match="missing"):
        files.check_files(tmp_path, sealed, checksums=False)


@pytest.mark.parametrize("bad", ["/etc/passwd", "../x", "a/../../x", "", "a\0b", "..\\x"])
def test_paths_never_leave_their_directory(tmp_path: Path, bad: str) -> None:
    with pytest.raises(DamagedCheckpointError, match="outside"):
        files.resolve_inside(tmp_path, bad)


def test_a_link_in_a_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").symlink_to("/etc/hostname")
    with pytest.raises(DamagedCheckpointError, match="symbolic link"):
        files.list_files(tmp_path)


def test_a_failed_durable_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f.json"
    files.write_json_durably(path, {"a": 1})
    before = path.read_bytes()
    with pytest.raises(ValueError, match="JSON"):
        files.write_json_durably(path, {"a": float("nan")})

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="space"):
        files.write_json_durably(path, {"a": 2})
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["f.json"]
