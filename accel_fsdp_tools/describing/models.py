"""Asking transformers what it would write for a model, without its data.

Everything that `save_pretrained` does to a state dict before it goes into files (ignored keys, ties, conversions and
renamings reverted, order) is done by transformers' own functions on a skeleton of the live model, while a tracer
follows the tensors. Nothing is built from a config, no random numbers are drawn, no rank waits for another.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import weakref
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from ..architecture.facts import ArchitectureFacts, StorageFacts, TieFacts
from ..architecture.outputs import OutputFacts
from ..errors import UnsupportedError
from ..live import describe_model
from ..manifest import ModelFacts
from .skeleton import build_skeleton
from .tracing import Opaque, Tracer

logger = logging.getLogger(__name__)

_recorded: weakref.WeakKeyDictionary[torch.nn.Module, tuple[Any, Mapping[str, Any]]] = weakref.WeakKeyDictionary()


def describe_model_architecture(model: torch.nn.Module, *, facts: ModelFacts | None = None) -> ArchitectureFacts:
    """As `describe_architecture`; `facts` is what `live.describe_model` says, where that is at hand."""
    skeleton = build_skeleton(model, facts if facts is not None else describe_model(model))
    try:
        return describe_skeleton(skeleton)
    except UnsupportedError:
        raise
    except Exception as error:  # whatever the code of an architecture raises: the caller needs to know which one
        raise UnsupportedError(
            f"What transformers would write for {type(skeleton).__name__} cannot be worked out "
            f"({type(error).__name__}: {error}). Export it with the model's own save_pretrained.",
            actual=type(skeleton).__name__,
        ) from error


def record_model_architecture(model: torch.nn.Module, facts: ModelFacts) -> Mapping[str, Any]:
    """As `record_architecture`."""
    key: Any = None
    try:
        key = (
            tuple((each.fqn, each.dtype, each.shape, each.requires_grad) for each in facts.tensors),
            facts.ties,
            _fingerprint_configs(model),
        )
        known = _recorded.get(model)
        if known is not None and known[0] == key:
            return known[1]
        body: Mapping[str, Any] = describe_model_architecture(model, facts=facts).to_dict()
        json.dumps(
            body, allow_nan=False
        )  # what cannot be written must not surface when the checkpoint is almost complete
    except Exception as error:  # a save must not fail for want of facts that only an export needs
        logger.warning(
            "the architecture of %s is not recorded, an export will need --model: %s", facts.class_name, error
        )
        body = ArchitectureFacts(facts.class_name, problem=f"{type(error).__name__}: {error}").to_dict()
    _recorded[model] = (key, body)
    return body


def _fingerprint_configs(model: torch.nn.Module) -> tuple[str, ...]:
    """Return the configs as text: users edit them while a model trains."""
    found = []
    for module in model.modules():
        config = vars(module).get("config")
        if config is not None and hasattr(config, "to_json_string"):
            found.append(config.to_json_string())
            generation = vars(module).get("generation_config")
            found.append("" if generation is None else generation.to_json_string())
            break  # the outermost holds those of its parts
    holder = next((vars(module) for module in model.modules() if "peft_config" in vars(module)), None)
    adapters: Mapping[str, Any] = {} if holder is None else holder["peft_config"]
    return (*found, *(f"{name}: {config.to_dict()}" for name, config in adapters.items()))


def describe_skeleton(skeleton: torch.nn.Module) -> ArchitectureFacts:
    """Return the facts about a model without data (`skeleton.build_skeleton`)."""
    from .adapters import describe_adapters, has_adapters

    if has_adapters(skeleton):
        return dataclasses.replace(_describe_as_they_are(skeleton), peft=describe_adapters(skeleton))
    if not _is_pretrained(skeleton):
        return _describe_as_they_are(skeleton)
    return _describe_pretrained(skeleton)


def _is_pretrained(module: torch.nn.Module) -> bool:
    from transformers import PreTrainedModel

    return isinstance(module, PreTrainedModel)


def get_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the state dict without what is no tensor (extra state)."""
    return {name: each for name, each in module.state_dict().items() if isinstance(each, torch.Tensor)}


def get_shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the whole shapes of tensors."""
    return {name: tuple(each.shape) for name, each in tensors.items()}


def find_ties(module: torch.nn.Module) -> list[tuple[str, ...]]:
    """Return the groups of names that are one tensor, in the order of the model."""
    groups: dict[int, list[str]] = {}
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for name, tensor in [*owner._parameters.items(), *owner._buffers.items()]:
            if tensor is not None and name not in owner._non_persistent_buffers_set:
                groups.setdefault(id(tensor), []).append(f"{prefix}.{name}" if prefix else name)
    return [tuple(dict.fromkeys(names)) for names in groups.values() if len(set(names)) > 1]


def _describe_as_they_are(module: torch.nn.Module) -> ArchitectureFacts:
    """Return the facts about a model for which nobody converts anything: names as they are."""
    tensors = get_tensors(module)
    shapes = get_shapes(tensors)
    return ArchitectureFacts(
        class_name=type(module).__name__,
        shapes=shapes,
        outputs=tuple(OutputFacts(name, shape, source=name) for name, shape in shapes.items()),
        ties=tuple(TieFacts(names[0], others=names[1:]) for names in find_ties(module)),
        num_parameters=sum(each.numel() for each in module.parameters()),
        transformers_version=_get_version(),
    )


def _describe_pretrained(model: Any) -> ArchitectureFacts:
    from transformers.core_model_loading import revert_weight_conversion

    for attribute, what in (
        ("hf_quantizer", "is quantized, and what is written depends on the quantizer"),
        ("_hf_peft_config_loaded", "holds adapters itself (add_adapter); wrap it with peft.get_peft_model instead"),
    ):
        if vars(model).get(attribute):
            raise UnsupportedError(f"{type(model).__name__} {what}.", actual=type(model).__name__)
    state = get_tensors(model)
    shapes = get_shapes(state)
    ignored = tuple(sorted(name for name in model._keys_to_ignore_on_save or () if name in state))
    for name in ignored:
        del state[name]
    ties = tuple(_describe_tie(model, names, state) for names in find_ties(model) if set(names) <= set(state))
    for tie in ties:
        for name in tie.dropped:
            del state[name]
    with torch.no_grad(), Tracer() as tracer:
        # Plain tensors: what is converted must not be tied, and no parameter.
        sources = {name: torch.empty(each.shape, dtype=each.dtype, device="meta") for name, each in state.items()}
        for name, tensor in sources.items():
            tracer.add_source(name, tensor)
        written = revert_weight_conversion(model, dict(sources))
    return ArchitectureFacts(
        class_name=type(model).__name__,
        shapes=shapes,
        outputs=tuple(describe_output(name, tensor, tracer) for name, tensor in written.items()),
        storages=tuple(_find_storages(written)),
        ties=ties,
        ignored=ignored,
        num_parameters=int(model.num_parameters()),
        config=describe_config(model),
        generation_config=_describe_generation(model),
        is_transformers=True,
        is_remote_code=bool(model.is_remote_code()),
        transformers_version=_get_version(),
    )


def _describe_tie(model: Any, names: tuple[str, ...], state: Mapping[str, torch.Tensor]) -> TieFacts:
    """Return which of the names transformers keeps."""
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    try:
        kept = list(remove_tied_weights_from_state_dict({name: state[name] for name in names}, model))
    except RuntimeError:  # a tie that the class does not know of
        return TieFacts(names[0], others=names[1:])
    return TieFacts(kept[0], dropped=tuple(name for name in names if name not in kept), others=tuple(kept[1:]))


def describe_output(name: str, tensor: torch.Tensor, tracer: Tracer) -> OutputFacts:
    """Return what a tensor that goes into a file is made of."""
    shape, value = tuple(tensor.shape), tracer.find(tensor)
    if (source := tracer.find_source(tensor)) is not None:
        return OutputFacts(name, shape, source=source)
    if isinstance(value, Opaque):
        return OutputFacts(name, shape, operation=value.operation, sources=value.sources)
    if not value.moves:
        return OutputFacts(name, shape, operation="an empty tensor")
    return OutputFacts(name, shape, moves=value.moves)


def _find_storages(written: Mapping[str, torch.Tensor]) -> Iterator[StorageFacts]:
    """Yield the groups of outputs that are views of one memory, and single ones that are a view of part of it."""
    groups: dict[int, list[int]] = {}
    tensors = list(written.values())
    for index, tensor in enumerate(tensors):
        if tensor.numel():
            groups.setdefault(tensor.untyped_storage()._cdata, []).append(index)
    for indices in groups.values():
        first = tensors[indices[0]]
        numel = first.untyped_storage().nbytes() // first.element_size()
        if len(indices) > 1 or numel != first.numel():
            starts = [at for at, index in enumerate(indices) if not at or index != indices[at - 1] + 1]
            ends = [*starts[1:], len(indices)]
            yield StorageFacts(
                numel, tuple((indices[start], end - start) for start, end in zip(starts, ends, strict=True))
            )


def describe_config(model: Any) -> dict[str, Any]:
    """Return the content of config.json: the config with the model's dtype and its class."""
    config = copy.deepcopy(model.config)
    config.dtype = str(model.dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__]
    if hasattr(config, "transformers_weights"):
        del config.transformers_weights
    body: dict[str, Any] = json.loads(config.to_json_string(use_diff=True))
    return body


def _describe_generation(model: Any) -> dict[str, Any] | None:
    config = getattr(model, "generation_config", None) if model.can_generate() else None
    if config is None:
        return None
    body: dict[str, Any] = json.loads(config.to_json_string(use_diff=True, keys_to_pop=["compile_config"]))
    return body


def _get_version() -> str | None:
    try:
        return version("transformers")
    except PackageNotFoundError:
        return None
