"""The table of the documentation: configuration times fault, and what caught it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from tests.matrix import CONFIGURATIONS, NOT_RUN, Cell
from tests.matrix_disk import ADAPTED, BARE, DISK_FAULTS, WHOLE
from tests.matrix_memory import MEMORY_FAULTS

NARROW = "float32 checkpoint loaded into a bf16 model"

_HEAD = """# What verification catches

Written by `pytest -m matrix tests/test_verify_matrix.py`; the default test run takes a sample of it. Every
configuration is prepared by a real Accelerator, trained, saved by `save_state` and loaded by `load_state` into spoiled
objects of fresh processes, with sharded and full state dicts, on 2 and on 4 ranks. A clean load verifies in every one
of them. Then each fault is planted, found, and undone. [Verify](verify.md) says what the codes mean.
"""

_MEMORY = """
## Faults in memory, after the load

What `verify_model` says, in mode "auto" (fingerprints, then the disk for what they say differs) / in mode "full". Every
finding names the tensor, and where one rank alone was changed, that rank. All ranks get the same report. The last
column: what `load_state` raises, and what names the cast where `strict=False` lets it through; empty where the model is
bf16 already, and for some of the larger numbers of ranks.
"""

_DISK = """
## Faults on disk, before the load

On as few ranks as the configuration runs on in full; on more ranks the faults are dealt out to the configurations.
"manifest adapted": its checksums were made to fit, so that only what was in memory at the save (fingerprints), the CRCs
that torch stores and the structure can tell. "no manifest": what plain Accelerate writes. Every finding and error names
the tensor or the file; an error is raised on every rank. "-": not caught.
"""


@dataclass(frozen=True)
class Record:
    """What one tool said of one fault in one cell; no codes: it found nothing."""

    cell: Cell
    fault: str
    tool: str
    codes: tuple[str, ...]
    variant: str = ""


def write_table(records: list[Record]) -> str:
    """Return the page."""
    lines = [_HEAD, "| configuration | prepared |", "| --- | --- |"]
    for each in CONFIGURATIONS.values():
        how = f"wrapped before `prepare`: {each.by_hand}" if each.by_hand else "by Accelerate"
        lines.append(f"| {each.name} | {how} |")
    lines += [f"| {name} | **not run**: {reason} |" for name, reason in NOT_RUN.items()]
    lines += [_MEMORY, *_list_memory(records), _DISK, *_list_disk(records), *_list_reasons()]
    return "\n".join(lines) + "\n"


def _list_memory(records: list[Record]) -> Iterable[str]:
    faults = [*MEMORY_FAULTS, NARROW]
    yield "| configuration | state dict | ranks | " + " | ".join(faults) + " |"
    yield "| --- | --- | --- |" + " --- |" * len(faults)
    found: dict[Cell, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for each in records:
        if not each.variant:
            found[each.cell][each.fault].append(", ".join(f"`{code}`" for code in each.codes) or "-")
    rows: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for cell, by_fault in found.items():
        cells = [_join(by_fault.get(fault, [])) for fault in faults]
        rows[(cell.configuration, cell.kind.removesuffix("_STATE_DICT"), *cells)].append(cell.world)
    for (name, kind, *cells), worlds in rows.items():
        yield f"| {name} | {kind} | {', '.join(map(str, worlds))} | {' | '.join(cells)} |"


def _join(said: list[str]) -> str:
    return "" if not said else said[0] if len(set(said)) == 1 else " / ".join(said)


def _list_disk(records: list[Record]) -> Iterable[str]:
    """One line per fault, variant and kind of state dict for all configurations that agree."""
    yield "| fault | | state dict | `verify_checkpoint` | `load_state` | in configurations (cells) |"
    yield "| --- | --- | --- | --- | --- | --- |"
    said: dict[tuple[str, str, str], dict[Cell, list[str]]] = defaultdict(lambda: defaultdict(list))
    for each in records:
        if each.variant:
            key = each.fault, each.variant, each.cell.kind.removesuffix("_STATE_DICT")
            said[key][each.cell].append(", ".join(f"`{code}`" for code in each.codes) or "-")
    for fault in DISK_FAULTS:
        for variant in (WHOLE, ADAPTED, BARE):
            for (name, which, kind), cells in said.items():
                if (name, which) != (fault, variant):
                    continue
                groups: dict[tuple[str, ...], list[Cell]] = defaultdict(list)
                for cell, words in cells.items():
                    groups[tuple(words)].append(cell)
                largest = max(groups.values(), key=len)
                for words, group in groups.items():
                    names = list(dict.fromkeys(cell.configuration for cell in group))
                    everyone = len(groups) == 1
                    shown = "all" if everyone else "all others" if group is largest else ", ".join(names)
                    yield f"| {name} | {variant} | {kind} | {words[0]} | {words[1]} | {shown} ({len(group)}) |"


def _list_reasons() -> Iterable[str]:
    yield "\nNot demanded, because nothing could know it, or because nothing needs it:\n"
    for fault in DISK_FAULTS.values():
        absent = [
            f"{tool}, {variant}"
            for tool, variants in (("`verify_checkpoint`", fault.offline), ("`load_state`", fault.load))
            for variant in (WHOLE, ADAPTED, BARE)
            if variant not in variants
        ]
        if absent and fault.why:
            yield f"- {fault.name} ({'; '.join(absent)}): {fault.why}"
