"""What the loaders of one restore share until each has been iterated again."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import DataProgressError, DataProgressWarning
from .generators import FoundGenerator, GeneratorState, Path, format_path, is_newly_seeded, read_state


@dataclass
class _Expectation:
    generator: Any
    path: Path
    states: list[GeneratorState]
    until_any_batch: bool


class RestoreSession:
    """Watches the generators that decide an order, and who puts the RNG of the save back.

    Between a restore and a loader's first batch nobody else may draw from its samplers' generators: the order
    would change in silence. Seeding them is fine (some scripts do, every epoch). A loader that was between passes
    is watched only until any loader is iterated: then training goes on, and its generators may move.
    """

    def __init__(self, *, strict: bool, data_resume: str = "skip") -> None:
        self.strict = strict
        self.data_resume = data_resume
        self._expected: dict[int, _Expectation] = {}
        self._is_rng_due = True

    def expect(
        self,
        found: Iterable[FoundGenerator],
        allowed: Iterable[Mapping[Path, GeneratorState]],
        *,
        until_any_batch: bool,
    ) -> None:
        """Remember the states that a loader's generators may have when it is iterated next."""
        for item in found:
            states = [states[item.path] for states in allowed if item.path in states]
            if not item.decides_order or not states:
                continue
            fresh = _Expectation(item.generator, item.path, [], until_any_batch)
            entry = self._expected.setdefault(id(item.generator), fresh)
            entry.states.extend(states)
            entry.until_any_batch = entry.until_any_batch and until_any_batch

    def check(self, found: Iterable[FoundGenerator], *, forget: bool) -> None:
        """Raise DataProgressError (or warn, if not strict) if a generator was drawn from since the restore.

        Args:
            forget: the loader is being iterated now; from here on its generators may move.
        """
        entries = [self._expected.get(id(item.generator)) for item in found]
        if forget:
            over = {id(item.generator) for item in found}
            self._expected = {
                key: entry for key, entry in self._expected.items() if key not in over and not entry.until_any_batch
            }
        for entry in entries:
            if entry is not None:
                self._check_entry(entry)

    def _check_entry(self, entry: _Expectation) -> None:
        present = read_state(entry.generator)
        if any(present.is_same(state) for state in entry.states) or is_newly_seeded(entry.generator):
            return
        name = format_path(entry.path)
        text = (
            f"the generator {name} of a sampler was drawn from between load_state and the first batch, so the order "
            "would not be the saved one. Iterate only the loader itself (it goes on where the checkpoint was: no "
            "skip_first_batches, no look at its sampler), or seed the generator anew."
        )
        if self.strict:
            raise DataProgressError(text, generator=name)
        warnings.warn(text, DataProgressWarning, stacklevel=4)

    def take_rng_turn(self) -> bool:
        """True once: the first loader to go on puts the RNG back as it was at the save, later ones leave it."""
        is_due, self._is_rng_due = self._is_rng_due, False
        return is_due
