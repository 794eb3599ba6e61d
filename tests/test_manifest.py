"""The manifest survives the disk, and says clearly when it cannot be used."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
from tests.manifests import edit_manifest, make_checkpoint, make_manifest


def test_round_trip(tmp_path: Path) -> None:
    (tmp_path / DIRECTORY).mkdir()
    manifest = make_manifest(step=7, attempt=2)
    assert not has_manifest(tmp_path)
    write_manifest(tmp_path, manifest)
    assert has_manifest(tmp_path)
    assert read_manifest(tmp_path) == manifest
    assert manifest.order == (2, 7)


def _edit(path: Path, **changes: object) -> None:
    edit_manifest(path, lambda raw: raw.update(changes))


def test_unknown_keys_of_the_same_version_are_no_error(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "c", step=1)
    _edit(path, surprise={"a": 1})
    assert read_manifest(path).step == 1


def _rewrite(path: Path, change: Callable[[dict[str, Any]], Any], **options: Any) -> None:
    raw = json.loads((path / MANIFEST_PATH).read_text())
    change(raw)
    (path / MANIFEST_PATH).write_text(json.dumps(raw, **options))


def test_a_changed_manifest_does_not_match_its_digest(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "c", step=1)
    _rewrite(path, lambda raw: raw.update(step=2))
    with pytest.raises(ManifestError, match="its digest is") as caught:
        read_manifest(path)
    assert caught.value.expected != caught.value.actual
    _rewrite(path, lambda raw: raw.update(step=1), indent=7, sort_keys=True)
    assert read_manifest(path).step == 1, "how it is laid out does not matter"


def test_an_older_version_has_no_digest_and_this_one_must(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "c", step=1)
    _rewrite(path, lambda raw: raw.pop("digest"))
    with pytest.raises(ManifestError, match="digest"):
        read_manifest(path)
    _rewrite(path, lambda raw: raw.update(version=1))
    assert read_manifest(path).step == 1


def test_no_flipped_bit_changes_what_a_manifest_says(tmp_path: Path) -> None:
    """One bit of every byte. (The case of an exponent, which none is here, would say the same.)"""
    path = make_checkpoint(tmp_path / "c", step=1)
    good, content = read_manifest(path), (path / MANIFEST_PATH).read_bytes()
    generator = random.Random(8)
    for position in range(len(content)):
        flipped = bytearray(content)
        flipped[position] ^= 1 << generator.randrange(8)
        (path / MANIFEST_PATH).write_bytes(flipped)
        with pytest.raises((ManifestError, ManifestVersionError)):
            read_manifest(path)
    (path / MANIFEST_PATH).write_bytes(content)
    assert read_manifest(path) == good


def test_json_that_is_nested_too_deep(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "c", step=1)
    (path / MANIFEST_PATH).write_text("[" * 1_000_000)
    with pytest.raises(ManifestError, match=r"manifest\.json"):
        read_manifest(path)


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
