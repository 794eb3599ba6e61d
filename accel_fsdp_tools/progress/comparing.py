"""What differs between saved loaders and those that are prepared here, in words; nothing here changes anything."""

from __future__ import annotations

from collections.abc import Sequence

from .carry import find_argument, share_an_order
from .contract import describe_contract, describe_other_data, find_differences, list_differences
from .follow import Follower
from .records import LoaderProgress


def compare(item: LoaderProgress, follower: Follower) -> list[str]:
    """Each difference between a saved loader and one here, without its number."""
    if item.kind != follower.kind.name:
        advice = ""
        if "stateful" in item.kind and "stateful" not in follower.kind.name:
            advice = "; it was saved with use_stateful_dataloader=True (pip install 'accel-fsdp-tools[stateful]')"
        return [f"kind of loader: saved {item.kind!r}, now {follower.kind.name!r}{advice}"]
    return list_differences(item.contract, describe_contract(follower.loader))


def list_all_differences(saved: Sequence[LoaderProgress], followers: Sequence[Follower]) -> list[str]:
    """Each difference, naming the loader; empty if all positions mean the same here."""
    texts = _compare_numbers(saved, followers)
    for item, follower in zip(saved, followers, strict=False):
        texts.extend(f"loader {item.index}: {text}" for text in compare(item, follower))
    return texts


def find_changes(saved: Sequence[LoaderProgress], followers: Sequence[Follower]) -> list[tuple[str, str | None]]:
    """The same, each with the argument of a load that permits it ("elastic", "dataset", ...), or None."""
    changes: list[tuple[str, str | None]] = [(text, None) for text in _compare_numbers(saved, followers)]
    for item, follower in zip(saved, followers, strict=False):
        if share_an_order(item.kind, follower.kind.name):
            found = find_differences(item.contract, describe_contract(follower.loader))
            changes.extend((f"loader {item.index}: {text}", find_argument(name)) for name, text in found.items())
        else:
            changes.extend((f"loader {item.index}: {text}", None) for text in compare(item, follower))
    return changes


def list_notes(saved: Sequence[LoaderProgress], followers: Sequence[Follower]) -> list[str]:
    """What differs and may be all right."""
    pairs = zip(saved, followers, strict=False)
    found = [(item.index, describe_other_data(item.contract, describe_contract(each.loader))) for item, each in pairs]
    return [f"dataloader {index}: {text}" for index, text in found if text is not None]


def _compare_numbers(saved: Sequence[LoaderProgress], followers: Sequence[Follower]) -> list[str]:
    if len(saved) == len(followers):
        return []
    return [f"number of prepared dataloaders: saved {len(saved)}, now {len(followers)}"]
