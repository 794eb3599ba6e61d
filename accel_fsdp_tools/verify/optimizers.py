"""Whether a model and its optimizer describe the same parameters."""

from __future__ import annotations

import re
from collections import Counter

from ..extents import DiskTensor, Shape
from ..formats.checkpoint import Section
from ..manifest import Manifest
from ..names import clean_fqn
from .gathering import Gatherer
from .subject import Subject

# States that have one element for each of the parameter's; factored ones (Adafactor) have other shapes.
_ELEMENTWISE = {
    "exp_avg",
    "exp_avg_sq",
    "max_exp_avg_sq",
    "momentum_buffer",
    "square_avg",
    "grad_avg",
    "exp_inf",
}
_SHOWN = 5


def check_optimizers(subject: Subject, gather: Gatherer) -> None:
    """Compare each optimizer with the model of its place: names and shapes of the parameters."""
    for index, optimizer in subject.optimizers.items():
        model = subject.models.get(index)
        if model is None or model.is_flat or optimizer.is_flat:
            continue
        states = _list_states(optimizer)
        if not states:
            continue
        if all(isinstance(name, int) for name in states):
            _compare_unnamed(model, optimizer, states, gather)
            continue
        named = {clean_fqn(str(name)): each for name, each in states.items()}
        _compare_names(index, subject.manifest, model, optimizer, named, gather)
        _compare_shapes(model, optimizer, named, gather)


def _list_states(optimizer: Section) -> dict[str | int, dict[str, DiskTensor]]:
    """Return the tensors of each parameter's state, by the name or number that the optimizer gives the parameter."""
    states: dict[str | int, dict[str, DiskTensor]] = {}
    for tensor in optimizer.tensors.values():
        path = tensor.key_path
        if len(path) > 2 and path[0] == "state":
            states.setdefault(path[1], {})[str(path[-1])] = tensor
    for path in (*(blob.key_path for blob in optimizer.blobs.values()), *map(_split, optimizer.values)):
        if len(path) > 2 and path[0] == "state":
            states.setdefault(path[1], {})
    return states


def _split(name: str) -> tuple[str | int, ...]:
    """Return the key path of a value such as `state.layers.0.weight.step`, which is known by its joined name only."""
    match = re.fullmatch(r"state\.(.+)\.([^.]+)", name)
    if match is None:
        return (name,)
    parameter = match[1]
    return "state", int(parameter) if parameter.isdecimal() else parameter, match[2]


def _compare_names(
    index: int,
    manifest: Manifest | None,
    model: Section,
    optimizer: Section,
    states: dict[str, dict[str, DiskTensor]],
    gather: Gatherer,
) -> None:
    facts = manifest.models[index] if manifest is not None and index < len(manifest.models) else None
    ties = {name: set(group) for group in facts.ties for name in group} if facts is not None else {}
    known = model.tensors.keys() | {name for group in ties.values() for name in group}
    unknown = sorted(states.keys() - known)
    if unknown:
        gather.fail(
            "parameters",
            f"{optimizer.name} holds the state of {len(unknown)} parameter(s) that {model.name} does not have: "
            f"{_list(unknown)}. They are not of one save.",
            path=optimizer.path,
            fqn=unknown[0],
            names=unknown[:100],
        )
    if facts is None or manifest is None or index >= len(manifest.optimizers):
        _note_stateless(model, optimizer, states, gather)
        return
    recorded = manifest.optimizers[index]
    trainable = {tensor.fqn for tensor in facts.tensors if tensor.requires_grad}
    distinct = {min(ties.get(name, {name})) for name in trainable}
    present = {min(ties.get(name, {name})) for name in (*states, *recorded.stateless)}
    missing = sorted(distinct - present)
    # With fewer parameters than the model trains, the optimizer had only some of them, or flat ones.
    if missing and not recorded.is_empty and recorded.num_parameters >= len(distinct):
        gather.fail(
            "parameters",
            f"{optimizer.name} lacks the state of {len(missing)} parameter(s) that had one: {_list(missing)}. Use "
            "another checkpoint.",
            path=optimizer.path,
            fqn=missing[0],
            names=missing[:100],
        )


def _note_stateless(
    model: Section, optimizer: Section, states: dict[str, dict[str, DiskTensor]], gather: Gatherer
) -> None:
    without = sorted(
        name
        for name, tensor in model.tensors.items()
        if name not in states and tensor.dtype.startswith(("float", "bf"))
    )
    if without:
        gather.note(
            "stateless",
            f"{len(without)} tensor(s) of {model.name} have no state in {optimizer.name}: frozen, buffers, tied, or "
            f"without a gradient so far ({_list(without)})",
        )


def _list(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")


def _compare_shapes(
    model: Section, optimizer: Section, states: dict[str, dict[str, DiskTensor]], gather: Gatherer
) -> None:
    for name, state in states.items():
        parameter = model.tensors.get(name)
        if parameter is None:
            continue
        for key, tensor in state.items():
            if key in _ELEMENTWISE and tensor.shape not in ((), parameter.shape):
                gather.fail(
                    "shape",
                    f"{optimizer.name}: {key} of {name} has the shape {list(tensor.shape)}, the parameter has "
                    f"{list(parameter.shape)}",
                    fqn=tensor.fqn,
                    path=optimizer.path,
                    expected=list(parameter.shape),
                    actual=list(tensor.shape),
                )


def _compare_unnamed(
    model: Section, optimizer: Section, states: dict[str | int, dict[str, DiskTensor]], gather: Gatherer
) -> None:
    """Numbers say nothing about names, but there can't be more states of a shape than parameters of it."""
    wanted: Counter[Shape] = Counter(
        next(each.shape for key, each in state.items() if key in _ELEMENTWISE)
        for state in states.values()
        if state.keys() & _ELEMENTWISE
    )
    wanted.pop((), None)
    available = Counter(tensor.shape for tensor in model.tensors.values())
    too_many = wanted - available
    if too_many:
        shape, count = next(iter(too_many.items()))
        gather.fail(
            "parameters",
            f"{optimizer.name} holds the states of {wanted[shape]} parameter(s) of the shape {list(shape)}, "
            f"{model.name} has {wanted[shape] - count}. They are not of one save.",
            path=optimizer.path,
        )
    gather.note(
        "unnamed_optimizer",
        f"{optimizer.name} numbers its parameters and does not name them: only their shapes were compared",
    )
