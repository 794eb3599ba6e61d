"""The data contract of a loader: what has to be the same for a position in it to mean the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NAMES = {
    "dataset_length": "length of the dataset",
    "batch_size": "batch size",
    "drop_last": "drop_last",
    "split_batches": "split_batches",
    "even_batches": "even_batches",
    "num_processes": "number of data-parallel processes",
    "batch_sampler": "class of the batch sampler",
    "sampler": "class of the sampler",
    "num_samples": "number of samples drawn per epoch",
    "num_workers": "num_workers",
    "num_batches": "number of batches",
}


def get_index_sampler(loader: Any) -> Any:
    """What the DataLoader draws indices from: its batch sampler, or its sampler without automatic batching."""
    base = getattr(loader, "base_dataloader", loader)
    return base.batch_sampler if base.batch_sampler is not None else base.sampler


def get_num_processes(loader: Any) -> int:
    """How many processes share the data of this loader (fewer than ranks under tensor parallelism)."""
    for owner in (get_index_sampler(loader), loader.dataset):
        if isinstance(getattr(owner, "num_processes", None), int):
            return int(owner.num_processes)
    state = loader.__dict__.get("state")  # Dispatcher
    if state is None and is_iterable(loader):  # each process has shards of its own, and nothing in the loader says so
        from accelerate.state import PartialState

        state = PartialState()
    return int(getattr(state, "num_processes", 1))


def is_iterable(loader: Any) -> bool:
    """Whether the loader's dataset is a stream (torch remembers a `len` of it and warns later: don't ask)."""
    from torch.utils.data import IterableDataset

    return isinstance(loader.dataset, IterableDataset)


def describe_contract(loader: Any) -> dict[str, Any]:
    """The facts of a loader that a saved position depends on, JSON-able."""
    outer = get_index_sampler(loader)
    inner = outer
    while hasattr(inner, "batch_sampler"):
        inner = inner.batch_sampler
    sampler = getattr(inner, "sampler", None)
    return {
        "dataset_length": _measure(loader.dataset),
        "batch_size": _as_fact(getattr(inner, "batch_size", getattr(loader, "batch_size", None))),
        "drop_last": _as_fact(getattr(inner, "drop_last", getattr(loader, "_drop_last", None))),
        "split_batches": bool(getattr(outer, "split_batches", getattr(loader, "split_batches", False))),
        "even_batches": _as_fact(getattr(outer, "even_batches", None)),
        "num_processes": get_num_processes(loader),
        "batch_sampler": _name_class(inner),
        "sampler": _name_class(sampler),
        "num_samples": _measure(sampler),
        "num_workers": int(getattr(loader, "num_workers", 0)),
        "num_batches": None if is_iterable(loader) else _measure(loader),
        "fingerprint": _get_fingerprint(loader.dataset),
    }


def list_differences(saved: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Each fact that differs, in words with both values; empty if the contracts agree."""
    return list(find_differences(saved, here).values())


def find_differences(saved: Mapping[str, Any], here: Mapping[str, Any]) -> dict[str, str]:
    """The same by the name of the fact."""
    texts: dict[str, str] = {}
    for name, label in _NAMES.items():
        if name == "num_batches" and texts:
            break  # follows from the others
        before, now = saved.get(name), here.get(name)
        if before != now:
            texts[name] = f"{label}: saved {before!r}, now {now!r}"
    return texts


def describe_other_data(saved: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
    """Say that a dataset of Hugging Face calls itself another one now; None if it doesn't.

    No difference to refuse: a step that can't be hashed gives the same data another fingerprint in every process.
    """
    before, now = saved.get("fingerprint"), here.get("fingerprint")
    if before == now or None in (before, now):
        return None
    return f"the dataset's fingerprint is {now}, it was {before} at the save: make sure that its items are the same"


def measure_batch(loader: Any) -> tuple[int | None, int | None]:
    """Samples that all processes together get per batch, and samples per epoch; None where not known."""
    facts = describe_contract(loader)
    batch_size = facts["batch_size"]
    if not isinstance(batch_size, int):
        return None, None
    per_batch = batch_size if facts["split_batches"] else batch_size * facts["num_processes"]
    limit = facts["num_samples"] if facts["num_samples"] is not None else facts["dataset_length"]
    return per_batch, limit


def _get_fingerprint(dataset: Any) -> str | None:
    value = getattr(dataset, "_fingerprint", None)
    return value if isinstance(value, str) else None


def _measure(value: Any) -> int | None:
    try:
        return len(value)
    except (TypeError, NotImplementedError, AttributeError):
        return None


def _as_fact(value: Any) -> Any:
    return value if isinstance(value, (bool, int, str, type(None))) else repr(value)


def _name_class(value: Any) -> str | None:
    return None if value is None else f"{type(value).__module__}.{type(value).__qualname__}"
