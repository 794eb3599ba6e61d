"""What a pickled value is: a model's state dict, an optimizer's, or a dict that holds several of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import UnsupportedError
from ..names import clean_names
from .checkpoint import MODEL, OPTIMIZER, OTHER, KeyPath
from .dcp_reader import MODEL_KEYS, OPTIMIZER_KEYS
from .state_files import flatten_state, is_tensor, join_path


@dataclass(frozen=True)
class StateDict:
    """One state dict of a file: its tensors (whole or sharded, as pickled) and other values by key path."""

    kind: str
    tensors: dict[KeyPath, Any] = field(default_factory=dict)
    values: dict[KeyPath, Any] = field(default_factory=dict)


def split_state(value: Any, *, where: str, kind: str | None = None) -> dict[str, StateDict]:
    """Return the state dicts that a file's value consists of, by their kind.

    A dict with a key such as `state_dict` or `model` is a container; one of `state` and `param_groups` is an
    optimizer's; any other is a model's, or of the `kind` that the file's name says.

    Raises:
        UnsupportedError: the value is not a dict, or holds two state dicts of one kind.
        DamagedCheckpointError: it is nested without end.
    """
    if not isinstance(value, dict):
        raise UnsupportedError(
            f"{where} holds a {type(value).__name__}, not a state dict. Save model.state_dict(), or a dict that holds "
            "it under 'state_dict'.",
            path=where,
        )
    found: dict[str, StateDict] = {}
    others: dict[Any, Any] = {}
    has_own_tensors = any(is_tensor(each) for each in value.values())
    for key, each in value.items():
        inner = None if has_own_tensors or not isinstance(each, dict) else _get_kind(key)
        if inner is None:
            others[key] = each
            continue
        if inner in found:
            raise UnsupportedError(
                f"{where} holds two state dicts of one kind ({inner}). Save each to a file of its own.", path=where
            )
        found[inner] = StateDict(inner, *flatten_state(each, where=where))
    if not found:
        is_optimizer = not has_own_tensors and value.keys() >= {"state", "param_groups"}
        whole = kind or (OPTIMIZER if is_optimizer else MODEL)
        return {whole: StateDict(whole, *flatten_state(value, where=where))}
    if others:
        found[OTHER] = StateDict(OTHER, *flatten_state(others, where=where))
    return found


def _get_kind(key: Any) -> str | None:
    if key in MODEL_KEYS:
        return MODEL
    return OPTIMIZER if key in OPTIMIZER_KEYS else None


def name_tensors(kind: str, paths: Mapping[KeyPath, Any], *, where: str) -> dict[KeyPath, str]:
    """Return the name of each tensor of a state dict, wrapper prefixes removed.

    Raises:
        DamagedCheckpointError: two have the same name without them.
    """
    if kind == OPTIMIZER:
        parameters = {path[1] for path in paths if _is_parameter_state(path)}
        cleaned = clean_names(sorted(map(str, parameters)), path=where)
        return {
            path: join_path((path[0], cleaned[str(path[1])], *path[2:]) if _is_parameter_state(path) else path)
            for path in paths
        }
    joined = {path: join_path(path) for path in paths}
    if kind != MODEL:
        return joined
    shown = clean_names(joined.values(), path=where)
    return {path: shown[name] for path, name in joined.items()}


def _is_parameter_state(path: KeyPath) -> bool:
    return len(path) > 2 and path[0] == "state" and isinstance(path[1], str)
