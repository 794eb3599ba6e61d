"""LoRA's arithmetic: which weights an adapter changes, by which matrices and factors. As PEFT does it, without torch.

PEFT's order of operations and its dtypes are kept: the product in float32, times the scaling, rounded to the adapter's
dtype, added to the weight in float32 and rounded to the weight's. Only the product of two matrices may come out
otherwise, in the last bits: libraries add up in orders of their own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import MismatchError, UnsupportedError
from ..extents import DiskTensor, Shape
from .adapters import PREFIX, Adapter, parse_lora_name

DTYPES = ("float32", "bfloat16", "float16")

_VARIANTS = {
    "use_dora": "DoRA scales each column by a norm that is learned",
    "use_qalora": "QA-LoRA pools its input",
    "use_bdlora": "its matrices are block-diagonal",
    "arrow_config": "Arrow chooses among adapters at every token",
    "alora_invocation_tokens": "it is active after certain tokens only",
    "velora_config": "VeLoRA",
    "monteclora_config": "MonteCLoRA samples its weights",
    "kasa_config": "KaSA",
    "trainable_token_indices": "single rows of the embeddings are trained, too",
    "target_parameters": "it changes parameters (of fused experts) that are no module's weight",
    "layer_replication": "layers of the base model are repeated",
    "megatron_config": "Megatron's layers",
    "ensure_weight_tying": "adapters of tied layers are tied",
}
_CHANGES_BASE = ("pissa", "corda", "olora", "lora_ga", "loftq", "orthogonal")


@dataclass(frozen=True)
class Update:
    """What one adapter adds to one weight: `scaling` times `b @ a`, or times `b` for a bias.

    Attributes:
        a, b: on disk; of convolutions with dimensions of the kernel behind.
        is_transposed: the weight is stored the other way round (embeddings, GPT-2's Conv1D).
        is_rounded: rounded to the weight's dtype before it is added (embeddings), not only after.
    """

    a: DiskTensor | None
    b: DiskTensor
    scaling: float
    is_transposed: bool = False
    is_rounded: bool = False

    @property
    def inputs(self) -> tuple[DiskTensor, ...]:
        return (self.b,) if self.a is None else (self.a, self.b)


@dataclass(frozen=True)
class LoraParts:
    """One adapter, sorted out.

    Attributes:
        layers: the tensors of every module that it changes, by the module's name in the base model: `lora_A`, `lora_B`
            and so on, `bias` for that of `lora_B`.
        replaced: whole tensors of the base model that were trained or saved with it, by their names there.
        copied: those of them that were trained as copies of modules (`modules_to_save`).
    """

    config: Mapping[str, Any]
    layers: Mapping[str, Mapping[str, DiskTensor]] = field(default_factory=dict)
    replaced: Mapping[str, DiskTensor] = field(default_factory=dict)
    copied: frozenset[str] = frozenset()


def check_mergeable(adapter: Adapter, *, is_own_base: bool) -> None:
    """Make sure that an adapter is plain LoRA.

    Args:
        is_own_base: the base model's weights are those that it was trained on, from the same checkpoint.

    Raises:
        UnsupportedError: it is something else; the message says what.
    """
    kind, config = adapter.config.get("peft_type"), adapter.config
    reason = None
    if kind != "LORA":
        reason = f"it is {kind}, and only LoRA is merged here"
    else:
        reason = next((why for key, why in _VARIANTS.items() if config.get(key)), None)
    start = config.get("init_lora_weights")
    if reason is None and isinstance(start, str) and start.lower() == "mica":
        reason = "MiCA"
    if reason is not None:
        raise UnsupportedError(
            f"The adapter {adapter.name!r} cannot be merged: {reason}. Export it as an adapter (without "
            "--merge-adapter) and merge it with PEFT's merge_and_unload.",
            actual=kind,
        )
    if changes_base(adapter) and not is_own_base:
        raise UnsupportedError(
            f"The adapter {adapter.name!r} began with {start}, which changes the base model's weights: it belongs to "
            "those in the run's checkpoints, not to the original ones. Take them from there with --merge-adapter "
            "checkpoint.",
            actual=start,
        )


def changes_base(adapter: Adapter) -> bool:
    """Whether PEFT changes the base model's weights when it makes this adapter (PiSSA and others)."""
    start = adapter.config.get("init_lora_weights")
    return isinstance(start, str) and start.lower().startswith(_CHANGES_BASE)


def sort_out(adapter: Adapter) -> LoraParts:
    """Return a LoRA adapter's tensors by what they do.

    Raises:
        UnsupportedError: a module's tensors are not those of plain LoRA.
    """
    layers: dict[str, dict[str, DiskTensor]] = {}
    replaced: dict[str, DiskTensor] = {}
    copied = set()
    modules = [f".{each}." for each in adapter.config.get("modules_to_save") or ()]
    for name, tensor in adapter.tensors.items():
        found = parse_lora_name(name)
        if found is None:
            plain = name.removeprefix(PREFIX).replace(".base_layer.", ".")
            replaced[plain] = tensor
            if ".base_layer." not in name and any(each in f".{plain}" for each in modules):
                copied.add(plain)
            continue
        module, part, rest = found
        layers.setdefault(module, {})["bias" if rest == "bias" else part] = tensor
    for module, parts in layers.items():
        if parts.keys() - {"bias"} not in ({"lora_A", "lora_B"}, {"lora_embedding_A", "lora_embedding_B"}):
            raise UnsupportedError(
                f"The adapter {adapter.name!r} has {', '.join(sorted(parts))} for {module}, which is not plain LoRA. "
                "Export it as an adapter and merge it with PEFT.",
                fqn=module,
                actual=sorted(parts),
            )
    return LoraParts(adapter.config, layers, replaced, frozenset(copied))


def build_updates(parts: LoraParts, shapes: Mapping[str, Shape]) -> dict[str, Update]:
    """Return what an adapter adds to which tensors of the base model, by their names there.

    Args:
        parts: of the adapter.
        shapes: of the base model's tensors, in its order.

    Raises:
        UnsupportedError: a module's weight is none of `shapes` (fused experts, attention in one module), or which way
            round it is stored cannot be told.
        MismatchError: a matrix has a shape that does not fit the weight or the config.
    """
    unknown = sorted(module for module in parts.layers if f"{module}.weight" not in shapes)
    if unknown:
        raise UnsupportedError(
            f"The adapter changes {', '.join(unknown[:4])}{' and others' if len(unknown) > 4 else ''}, and the base "
            "model has no such module with a weight of its own (fused experts, or attention in one module; or it is "
            "another model). Export it as an adapter and merge it with PEFT.",
            actual=tuple(unknown),
        )
    sides = _find_sides(parts, shapes)
    updates: dict[str, Update] = {}
    for module, tensors in parts.layers.items():
        weight = f"{module}.weight"
        is_embedding = "lora_embedding_A" in tensors
        a = tensors["lora_embedding_A" if is_embedding else "lora_A"]
        b = tensors["lora_embedding_B" if is_embedding else "lora_B"]
        scaling = _find_scaling(parts.config, module, a)
        updates[weight] = Update(a, b, scaling, sides[module], is_embedding)
        if "bias" in tensors:
            if shapes.get(f"{module}.bias") != tensors["bias"].shape:
                raise MismatchError(f"The adapter has a bias for {module}, and the base model has none of its shape.")
            updates[f"{module}.bias"] = Update(None, tensors["bias"], scaling)
    for name, update in updates.items():
        strange = [each.fqn for each in update.inputs if each.dtype not in DTYPES]
        if strange:
            raise UnsupportedError(
                f"{strange[0]} has a dtype in which PEFT does not merge the same everywhere; {', '.join(DTYPES)} are "
                "merged here.",
                fqn=name,
            )
    return updates


def _find_scaling(config: Mapping[str, Any], module: str, a: DiskTensor) -> float:
    rank = int(_match(config.get("rank_pattern") or {}, module, config["r"]))
    alpha = float(_match(config.get("alpha_pattern") or {}, module, config["lora_alpha"]))
    if a.shape[0] != rank:
        raise MismatchError(
            f"{a.fqn} has the rank {a.shape[0]} and adapter_config.json says {rank}: the config is of another adapter.",
            fqn=a.fqn,
            expected=rank,
            actual=a.shape[0],
        )
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _match(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """As PEFT looks values up: the first pattern that matches the end of the name, whole components of it."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)


def _find_sides(parts: LoraParts, shapes: Mapping[str, Shape]) -> dict[str, bool]:
    """Return which weights are stored the other way round: told by shapes, for square ones by those beside them."""
    sides: dict[str, bool] = {}
    square: list[str] = []
    for module, tensors in parts.layers.items():
        shape = shapes[f"{module}.weight"]
        if "lora_embedding_A" in tensors:
            a, b = tensors["lora_embedding_A"], tensors["lora_embedding_B"]
            fits, fits_turned = False, shape == (a.shape[1], b.shape[0])
        else:
            a, b = tensors["lora_A"], tensors["lora_B"]
            fits = shape == (b.shape[0], *a.shape[1:])
            fits_turned = len(shape) == 2 and shape == (a.shape[1], b.shape[0])
        is_chain = a.shape[0] == b.shape[1] and b.numel == b.shape[0] * b.shape[1]
        if not is_chain or not (fits or fits_turned):
            raise MismatchError(
                f"The adapter's matrices for {module} are {list(a.shape)} and {list(b.shape)}, and its weight is "
                f"{list(shape)}: they are of another model, or of a grouped convolution, which PEFT does not merge.",
                fqn=module,
                expected=shape,
                actual=(a.shape, b.shape),
            )
        if fits and fits_turned:
            square.append(module)
        else:
            sides[module] = fits_turned
    linear = {module: side for module, side in sides.items() if "lora_A" in parts.layers[module]}
    for module in square:
        alike = {side for other, side in linear.items() if _get_last(other) == _get_last(module)}
        known = alike or set(linear.values())
        if len(known) > 1:
            raise UnsupportedError(
                f"The weight of {module} is square, and whether it is stored as (in, out) or (out, in) cannot be told: "
                "the model has both. Export the adapter and merge it with PEFT.",
                fqn=module,
            )
        sides[module] = known.pop() if known else bool(parts.config.get("fan_in_fan_out"))
    return sides


def _get_last(module: str) -> str:
    return module.rpartition(".")[2]


def join_updates(found: Iterable[Mapping[str, Update]], order: Iterable[str]) -> dict[str, tuple[Update, ...]]:
    """Return the updates of several adapters by tensor, in the order in which PEFT adds them."""
    every = list(found)
    joined = {name: tuple(each[name] for each in every if name in each) for name in order}
    return {name: updates for name, updates in joined.items() if updates}
