"""The manifest survives the disk, and says clearly when it cannot be used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from accel_fsdp_tools.errors import DamagedCheckpointError, ManifestError, ManifestVersionError
from accel_fsdp_tools.manifest import (
    DIRECTORY,
    MANIFEST_PATH,
    VERSION,
    has_manifest,
    read_manifest,
    write_manifest,
)
from tests.manifests import make_checkpoint, make_manifest


def test_round_trip(tmp_path: Path) -> None:
    (tmp_path / DIRECTORY).mkdir()
    manifest = make_manifest(step=7, attempt=2)
    assert not has_manifest(tmp_path)
    write_manifest(tmp_path, manifest)
    assert has_manifest(tmp_path)
    assert read_manifest(tmp_path) == manifest
    assert manifest.order == (2, 7)


def _edit(path: Path, **changes: object) -> None:
    raw = json.loads((path / MANIFEST_PATH).read_text())
    raw.update(changes)
    (path / MANIFEST_PATH).write_text(json.dumps(raw))


def test_unknown_keys_of_the_same_version_are_no_error(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "c", step=1)
    _edit(path, surprise={"a": 1})
    assert read_manifest(path).step == 1


def test_a_newer_version_is_refused_with_advice(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "c", step=1)
    _edit(path, version=VERSION + 1)
    with pytest.raises(ManifestVersionError, match="Upgrade") as caught:
        read_manifest(path)
    assert (caught.value.expected, caught.value.actual) == (VERSION, VERSION + 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"format": "other"},
        {"version": "1"},
        {"step": "many"},
        {"files": [{"path": "x"}]},
        {"lineage": None},
        {"states": {"model": {}}},
        {"models": 3},
    ],
)
def test_damage_is_a_manifest_error(tmp_path: Path, changes: dict[str, object]) -> None:
    path = make_checkpoint(tmp_path / "c", step=1)
    _edit(path, **changes)
    with pytest.raises(ManifestError, match=r"manifest\.json"):
        read_manifest(path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"null"])
def test_garbage_is_a_manifest_error(tmp_path: Path, content: bytes) -> None:
    path = make_checkpoint(tmp_path / "c", step=1)
    (path / MANIFEST_PATH).write_bytes(content)
    with pytest.raises(ManifestError, match=r"manifest\.json"):
        read_manifest(path)


def test_a_file_outside_the_checkpoint_is_refused(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "c", step=1)
    _edit(path, files=[{"path": "../../etc/passwd", "size_bytes": 1, "checksum": "0"}])
    with pytest.raises(DamagedCheckpointError, match="outside"):
        read_manifest(path)
