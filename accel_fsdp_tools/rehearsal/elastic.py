"""What has to be the same where a run resumes on another number of ranks, and is.

Parameters and optimizer at the resume, bit for bit; then at every update the samples that all ranks together are handed
(in any order), the learning rate, and the loss, as far as rounding and dropout leave it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from .comparing import ORDER, Difference, Thing, compare_beginnings, get_losses, get_lrs
from .records import Attempt, Record


def compare_elastic(straight: Attempt, resumed: Attempt, *, tolerance: float) -> list[Difference]:
    """Return what differs that has to be the same, the first and most causal difference first.

    Args:
        tolerance: how far the mean losses of an update may be apart, relative to the larger.
    """
    found = list(compare_beginnings(straight, resumed))
    for step in range(resumed.first_step + 1, min(straight.last_step, resumed.last_step) + 1):
        found += _compare_step(step, straight.get_step(step), resumed.get_step(step), tolerance)
    return sorted(found, key=lambda each: (each.step, ORDER[each.thing]))


def _compare_step(
    step: int, first: Sequence[Record], second: Sequence[Record], tolerance: float
) -> Iterator[Difference]:
    one, other = _count_samples(first), _count_samples(second)
    if one is not None and other is not None and one != other:
        num_same = (one & other).total()
        yield Difference(
            step, Thing.SAMPLES, 0, f"{one.total()} samples", f"{other.total()}, {num_same} of them the same"
        )
    rates, other_rates = get_lrs(first[0]), get_lrs(second[0])
    if any(abs(one - other) > 1e-9 * max(abs(one), abs(other)) for one, other in zip(rates, other_rates, strict=False)):
        yield Difference(step, Thing.LEARNING_RATE, 0, rates, other_rates)
    loss, other_loss = _average(first), _average(second)
    if loss is not None and other_loss is not None and not _is_close(loss, other_loss, tolerance):
        yield Difference(step, Thing.LOSS, 0, loss, other_loss)


def _count_samples(records: Sequence[Record]) -> Counter[str] | None:
    """All samples of an update, None if they cannot be told apart."""
    batches = [batch for record in records for batch in record["batches"]]
    if not all(batch.get("samples") for batch in batches):
        return None
    return Counter(sample for batch in batches for sample in batch["samples"])


def _average(records: Sequence[Record]) -> float | None:
    losses = [loss for record in records for loss in get_losses(record)]
    return sum(losses) / len(losses) if losses else None


def _is_close(one: float, other: float, tolerance: float) -> bool:
    return abs(one - other) <= tolerance * max(abs(one), abs(other))
