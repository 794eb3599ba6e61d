"""Draw from a loader's samplers on trial: afterwards they keep what they kept before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from .generators import walk
from .places import get_attributes, keeps_state


@contextmanager
def unchanged_attributes(loader: Any) -> Iterator[None]:
    """Put the attributes of a user's samplers back at the end, contents of lists, dicts and arrays included.

    Generators are not: whoever draws knows the states that they have to have. What hides elsewhere (a Python iterator,
    lists in lists) isn't either, and is found by the checksum of what is drawn next.
    """
    kept = []
    for path, owner, in_sampler in walk(loader):
        if not in_sampler:
            break  # samplers come first
        attributes = get_attributes(owner)
        if attributes is not None and keeps_state(path, owner):
            contents = [(value, _copy(value)) for value in attributes.values()]
            kept.append((attributes, dict(attributes), [each for each in contents if each[1] is not None]))
    try:
        yield
    finally:
        for attributes, before, contents in kept:
            for value, content in contents:
                _fill(value, content)
            attributes.clear()
            attributes.update(before)


def _copy(value: Any) -> Any:
    import torch

    if isinstance(value, (list, dict)):
        return value.copy()
    if isinstance(value, np.ndarray):
        return value.copy() if value.flags.writeable else None
    return value.detach().clone() if isinstance(value, torch.Tensor) else None


def _fill(value: Any, content: Any) -> None:
    if isinstance(value, list):
        value[:] = content
    elif isinstance(value, dict):
        value.clear()
        value.update(content)
    elif isinstance(value, np.ndarray):
        value[...] = content
    else:
        value.detach().copy_(content)
