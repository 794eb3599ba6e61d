"""Pickles that could run code when loaded, each as a finding of its own. Nothing is executed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from ..formats.allowed import TORCH_STATE
from ..formats.dcp import DcpItem, read_dcp_metadata
from ..formats.scan import CUSTOM_KIND, DCP_ITEMS_KIND, DCP_METADATA_KIND, list_pickles
from ..formats.torch_files import scan_torch_file
from ..formats.zips import open_window
from .gathering import Gatherer
from .subject import PARSING_ERRORS, Subject


def check_pickles(subject: Subject, gather: Gatherer, *, allow_objects: Iterable[str] = ()) -> None:
    """Scan every pickle that a load would open.

    `formats.scan` does the same before a load and stops at the first; here all are named. `allow_objects` are classes
    that registered objects may consist of.
    """
    advice = "Nothing was executed. If it is of a registered object that you trust, allow {name}; else don't load it."
    custom = TORCH_STATE.with_objects(allow_objects, advice)
    for path, kind in _list_pickles(subject, gather):
        try:
            if kind == DCP_METADATA_KIND:
                _scan_items(path, gather)
            elif kind != DCP_ITEMS_KIND:
                with open_window(path) as window:
                    gather.counts["pickles"] += scan_torch_file(
                        window, allow=custom if kind == CUSTOM_KIND else TORCH_STATE
                    )
        except PARSING_ERRORS as error:
            gather.add_error(error, path=path)


def _list_pickles(subject: Subject, gather: Gatherer) -> Iterator[tuple[Path, str]]:
    if not subject.is_whole:
        names = {str(file.path) for file in subject.files.values()}
        try:
            yield from ((path, kind) for path, kind in list_pickles(subject.root) if str(path) in names)
        except PARSING_ERRORS as error:
            gather.add_error(error, path=subject.root)
        return
    try:
        yield from list_pickles(subject.root)
    except PARSING_ERRORS as error:
        gather.add_error(error, path=subject.root)


def _scan_items(path: Path, gather: Gatherer) -> None:
    """Scan the items that one metadata file lists; reading it has scanned the file itself."""
    by_file: dict[str, dict[DcpItem, None]] = {}
    for item in read_dcp_metadata(path.parent, name=path.name).items:
        if not item.transforms:  # what was compressed or encrypted is reported by the reader
            by_file.setdefault(item.file, {})[item] = None
    gather.counts["pickles"] += 1
    for file, items in by_file.items():
        try:
            with open_window(path.parent / file) as window:
                for item in items:
                    label = f"{window.label}, item {item.fqn!r}"
                    try:
                        part = window.narrow(item.offset, item.length, label)
                        gather.counts["pickles"] += scan_torch_file(part, allow=TORCH_STATE, nested=True)
                    except PARSING_ERRORS as error:
                        gather.add_error(error, fqn=item.fqn, path=path.parent / file)
        except PARSING_ERRORS as error:
            gather.add_error(error, path=path.parent / file)
