"""The fingerprints that a manifest records, and those of what is not a tensor (numbers among an optimizer's state)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import UnsupportedError
from ..fingerprint import Fingerprint, fingerprint_value
from ..formats.checkpoint import MODEL, OPTIMIZER, Section, name_section
from ..formats.state_files import StateFile
from ..formats.zips import open_window
from ..manifest import MANIFEST_PATH, Manifest
from ..names import clean_fqn
from .gathering import Gatherer
from .plans import Key
from .subject import PARSING_ERRORS, Subject


def read_fingerprints(subject: Subject, gather: Gatherer) -> dict[Key, Fingerprint]:
    """Return the recorded fingerprints by tensor or value; what cannot be parsed is a finding.

    Names that the checkpoint does not have are left out: some writers keep one of tied parameters only, and what is
    really missing is found by name.
    """
    if subject.manifest is None:
        return {}
    known = {
        Key(section.name, name)
        for section in subject.sections
        for name in (*section.tensors, *section.blobs, *_list_values(section))
    }
    found: dict[Key, Fingerprint] = {}
    for key, text in _iterate_recorded(subject.manifest):
        if key not in known:
            continue
        try:
            found[key] = Fingerprint.parse(text)
        except UnsupportedError as error:
            gather.note("fingerprint", f"{key.fqn}: {error}", fqn=key.fqn)
        except PARSING_ERRORS as error:
            gather.fail("manifest", f"{key.fqn}: {error}", fqn=key.fqn, path=MANIFEST_PATH)
    return found


def _iterate_recorded(manifest: Manifest) -> Iterator[tuple[Key, str]]:
    for index, model in enumerate(manifest.models):
        for tensor in model.tensors:
            if tensor.fingerprint is not None:
                yield Key(name_section(MODEL, index), tensor.fqn), tensor.fingerprint
    for index, optimizer in enumerate(manifest.optimizers):
        for name, text in optimizer.fingerprints.items():
            yield Key(name_section(OPTIMIZER, index), name), text


def sum_values(subject: Subject, recorded: Mapping[Key, Fingerprint], gather: Gatherer) -> dict[Key, Fingerprint]:
    """Return the fingerprints, as they are on disk, of those `recorded` that are no tensors."""
    found: dict[Key, Fingerprint] = {}
    for section in subject.sections:
        for name, value in (*_read_blobs(section, recorded, gather), *_list_values(section).items()):
            key = Key(section.name, name)
            if key in recorded and name not in section.tensors:
                try:
                    found[key] = fingerprint_value(_normalize(name, value))
                except UnsupportedError as error:
                    gather.note("fingerprint", f"{section.name}: {name}: {error}", fqn=name)
    return found


def _normalize(name: str, value: Any) -> Any:
    """Sort the names of a group's parameters, as those in memory are: FSDP1 flattens them in an order of its own."""
    if name.endswith(".params") and isinstance(value, list) and all(isinstance(each, str) for each in value):
        return sorted(map(clean_fqn, value))
    return value


def _read_blobs(section: Section, recorded: Mapping[Key, Fingerprint], gather: Gatherer) -> Iterator[tuple[str, Any]]:
    for name, blob in section.blobs.items():
        if Key(section.name, name) in recorded:
            try:
                with open_window(Path(blob.bytes.path)) as window:
                    part = window.narrow(blob.bytes.offset, blob.bytes.length, f"{window.label}, item {name!r}")
                    yield name, StateFile(part).value
            except PARSING_ERRORS as error:
                gather.add_error(error, fqn=name, path=blob.bytes.path)


def _list_values(section: Section) -> dict[str, Any]:
    """Return a section's values by name; a list of parameter groups by each group's options."""
    values: dict[str, Any] = {}
    for name, value in section.values.items():
        if name == "param_groups" and isinstance(value, list):
            for number, group in enumerate(value):
                if isinstance(group, dict):
                    values.update({f"{name}.{number}.{option}": each for option, each in group.items()})
        else:
            values[name] = value
    return values
