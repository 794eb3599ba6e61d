"""Following tensors through code that only moves elements about: views and copies, recorded on the meta device.

transformers' own conversion runs on tensors without data, and a dispatch mode keeps, for every tensor that comes out
of an operation, the arrangement of source elements that it holds. So there is no list of conversions to keep up to
date: whatever is made of slices, permutations, reshapes, joins and copies is understood, and the rest says so.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..architecture import moves
from ..architecture.moves import Arrangement, TooManyMovesError, arrange_source
from ..parts import Shape


@dataclass(frozen=True)
class Opaque:
    """A tensor that an operation computed, or rearranged in a way that is not followed, from these sources."""

    operation: str
    sources: tuple[str, ...]


Value = Arrangement | Opaque


class Tracer(TorchDispatchMode):  # type: ignore[misc]
    """Knows what every tensor made while it is active is made of. Tensors that it has seen stay alive with it."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, tuple[torch.Tensor, Value]] = {}
        self._names: dict[int, str] = {}
        self._shapes: dict[str, Shape] = {}
        self._spoiled: dict[int, tuple[torch.Tensor, Opaque]] = {}  # storages that were written to in place

    def add_source(self, name: str, tensor: torch.Tensor) -> None:
        """Follow `tensor` from now on under `name`."""
        self._set(tensor, arrange_source(name, tuple(tensor.shape)))
        self._names[id(tensor)] = name
        self._shapes[name] = tuple(tensor.shape)

    def find(self, tensor: torch.Tensor) -> Value:
        """Return what a tensor holds; one that was not made of any source is a constant, and so opaque."""
        if self._spoiled and (spoiled := self._spoiled.get(tensor.untyped_storage()._cdata)) is not None:
            return spoiled[1]
        known = self._known.get(id(tensor))
        return Opaque("a constant", ()) if known is None else known[1]

    def find_source(self, tensor: torch.Tensor) -> str | None:
        """Return the name of the source that a tensor is, or is a plain copy of; None if it is anything else."""
        value = self.find(tensor)
        if not tensor.numel():
            return self._names.get(id(tensor))
        if isinstance(value, Opaque) or len(value.moves) != 1:
            return None
        source = value.moves[0].source
        return source if value.is_copy(source, self._shapes[source]) else None

    def _set(self, tensor: torch.Tensor, value: Value) -> None:
        self._known[id(tensor)] = (tensor, value)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        result = func(*args, **kwargs)
        inputs = list(_iterate_tensors((*args, *kwargs.values())))
        outputs = list(_iterate_tensors((result,)))
        values = [self.find(each) for each in inputs]
        if not any(isinstance(value, Arrangement) or value.sources for value in values):
            return result
        name = func.overloadpacket.__name__
        found: Sequence[Value] | None = None
        rule = _RULES.get(name)
        writes = _read_signature(func).writes
        if rule is not None and not writes and all(isinstance(value, Arrangement) for value in values):
            found = self._apply(rule, func, args, kwargs, outputs)
        if found is None:
            sources = dict.fromkeys(source for value in values for source in _get_sources(value))
            earlier = next((value.operation for value in values if isinstance(value, Opaque) and value.sources), name)
            found = [Opaque(earlier, tuple(sources))] * len(outputs)
        for output, value in zip(outputs, found, strict=True):
            self._set(output, value)
            if writes and isinstance(value, Opaque):
                self._spoiled[output.untyped_storage()._cdata] = (output, value)
        return result

    def _apply(
        self, rule: _Rule, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[torch.Tensor]
    ) -> list[Arrangement] | None:
        """Return the arrangements of the outputs, None where the rule does not cover this call."""
        signature = _read_signature(func)
        given = {**signature.defaults, **dict(zip(signature.names, args, strict=False)), **kwargs}
        if given.get("dtype") is not None and given["dtype"] != given["self"].dtype:
            return None
        try:
            values = rule(self, given, outputs)
        except TooManyMovesError:
            return None
        # What torch made is the measure: a rule that is wrong about a shape is wrong about the elements.
        if values is None or [value.shape for value in values] != [tuple(each.shape) for each in outputs]:
            return None
        return values

    def arrange(self, tensor: torch.Tensor) -> Arrangement:
        value = self.find(tensor)
        assert isinstance(value, Arrangement)  # noqa: S101 - `__torch_dispatch__` has looked
        return value


class _Signature(NamedTuple):
    names: tuple[str, ...]
    defaults: Mapping[str, Any]
    writes: bool  # changes one of its arguments


@functools.lru_cache(maxsize=256)
def _read_signature(func: Any) -> _Signature:
    arguments = func._schema.arguments
    return _Signature(
        names=tuple(each.name for each in arguments),
        defaults={each.name: each.default_value for each in arguments if each.has_default_value()},
        writes=any(each.alias_info is not None and each.alias_info.is_write for each in arguments),
    )


_Rule = Callable[[Tracer, dict[str, Any], list[torch.Tensor]], list[Arrangement] | None]


def _iterate_tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among arguments or results; operators nest them in lists, no deeper."""
    for each in values:
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, (list, tuple)):
            yield from (inner for inner in each if isinstance(inner, torch.Tensor))


def _get_sources(value: Value) -> tuple[str, ...]:
    if isinstance(value, Opaque):
        return value.sources
    return tuple(move.source for move in value.moves)


def _keep(tracer: Tracer, given: dict[str, Any], outputs: list[torch.Tensor]) -> list[Arrangement]:
    return [tracer.arrange(given["self"])]


def _reshape(tracer: Tracer, given: dict[str, Any], outputs: list[torch.Tensor]) -> list[Arrangement] | None:
    value, shape = tracer.arrange(given["self"]), tuple(outputs[0].shape)
    return [moves.reshape(value, shape)] if math.prod(value.shape) == math.prod(shape) else None


def _permute(tracer: Tracer, given: dict[str, Any], outputs: list[torch.Tensor]) -> list[Arrangement]:
    value = tracer.arrange(given["self"])
    return [moves.permute(value, [_wrap(dim, value.shape) for dim in given["dims"]])]


def _transpose(tracer: Tracer, given: dict[str, Any], outputs: list[torch.Tensor]) -> list[Arrangement]:
    value = tracer.arrange(given["self"])
    order = list(range(len(value.shape)))
    # `t` has no dimensions to name, and leaves vectors as they are.
    first, second = (_wrap(given.get(name, default), value.shape) for name, default in (("dim0", 0), ("dim1", -1)))
    if order:
        order[first], order[second] = order[second], order[first]
    return [moves.permute(value, order)]


def _select(tracer: Tracer, given: dict[str, Any], outputs: list[torch.Tensor]) -> list[Arrangement]:
    value = tracer.arrange(given["self"])
    dim = _wrap(given["dim"], value.shape)
    index = int(given["index"])
    return [moves.select(value, dim, index + value.shape[dim] if index < 0 else index)]


def _slice(tracer: Tracer, given: dict[str, Any], outputs: list[torch.Tensor]) -> list[Arrangement]:
    value = tracer.arrange(given["self"])
    dim = _wrap(given["dim"], value.shape)
    start, end, step = slice(given["start"], given["end"], given["step"]).indices(value.shape[dim])
    found = moves.narrow(value, dim, start, max(end - start, 0))
    return [found if step == 1 else moves.take_every(found, dim, step)]


def _split(tracer: Tracer, given: dict[str, Any], outputs: list[torch.Tensor]) -> list[Arrangement]:
    value = tracer.arrange(given["self"])
    dim = _wrap(given["dim"], value.shape)
    found, start = [], 0
    for output in outputs:
        found.append(moves.narrow(value, dim, start, output.shape[dim]))
        start += output.shape[dim]
    return found


def _unbind(tracer: Tracer, given: dict[str, Any], outputs: list[torch.Tensor]) -> list[Arrangement]:
    value = tracer.arrange(given["self"])
    dim = _wrap(given["dim"], value.shape)
    return [moves.select(value, dim, index) for index in range(len(outputs))]


def _squeeze(tracer: Tracer, given: dict[str, Any], outputs: list[torch.Tensor]) -> list[Arrangement]:
    value = tracer.arrange(given["self"])
    dims = given.get("dim", range(len(value.shape)))
    wanted = {_wrap(dim, value.shape) for dim in ([dims] if isinstance(dims, int) else dims)}
    for dim in sorted(wanted, reverse=True):
        if dim < len(value.shape) and value.shape[dim] == 1:
            value = moves.drop_dim(value, dim)
    return [value]


def _cat(tracer: Tracer, given: dict[str, Any], outputs: list[torch.Tensor]) -> list[Arrangement] | None:
    tensors = given["tensors"]
    if any(each.dtype != outputs[0].dtype or each.dim() != outputs[0].dim() for each in tensors):
        return None
    values = [tracer.arrange(each) for each in tensors]
    return [moves.concatenate(values, _wrap(given["dim"], values[0].shape))]


def _stack(tracer: Tracer, given: dict[str, Any], outputs: list[torch.Tensor]) -> list[Arrangement] | None:
    tensors = given["tensors"]
    if any(each.dtype != outputs[0].dtype for each in tensors):
        return None
    return [moves.stack([tracer.arrange(each) for each in tensors], _wrap(given["dim"], tuple(outputs[0].shape)))]


def _wrap(dim: int, shape: Shape) -> int:
    return dim + len(shape) if dim < 0 else dim


_RULES: dict[str, _Rule] = {
    **dict.fromkeys(("alias", "clone", "contiguous", "detach", "lift_fresh", "_to_copy", "to"), _keep),
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "_reshape_alias", "unsqueeze", "flatten"), _reshape),
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "unsafe_split"), _split),
    "permute": _permute,
    "transpose": _transpose,
    "t": _transpose,
    "select": _select,
    "slice": _slice,
    "unbind": _unbind,
    "squeeze": _squeeze,
    "cat": _cat,
    "stack": _stack,
}
