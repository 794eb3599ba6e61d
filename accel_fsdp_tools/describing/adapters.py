"""What PEFT would write for a model with adapters, and what the model is without them.

Both from the skeleton: the adapter's tensors by PEFT's own `get_peft_model_state_dict`, and the base model by putting
every wrapped layer back in its place, so that its facts are those of the model that the adapters were put into.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from ..architecture.facts import AdapterFacts, ArchitectureFacts, PeftFacts
from .tracing import Tracer


def has_adapters(module: Any) -> bool:
    """Whether a module is PEFT's, with adapters in the model that it holds."""
    return type(module).__module__.startswith("peft.") and hasattr(module, "peft_config")


def describe_adapters(skeleton: Any) -> PeftFacts:
    """Return the facts about the adapters of a model without data. What fails is recorded with the reason."""
    configs = skeleton.peft_config
    active = skeleton.active_adapters
    active = active() if callable(active) else active
    adapters: list[AdapterFacts] = []
    base: ArchitectureFacts | None = None
    names: Mapping[str, str] = {}
    problems: list[str] = []
    for name, config in configs.items():
        try:
            adapters.append(_describe_adapter(skeleton, name, config))
        except Exception as error:  # PEFT has many methods; what it raises is all that can be said
            problems.append(f"adapter {name!r}: {type(error).__name__}: {error}")
    try:
        base, names = _describe_base(skeleton, tuple(active))
    except Exception as error:  # likewise: no merged model then, the adapters can be written all the same
        problems.append(f"base model: {type(error).__name__}: {error}")
    return PeftFacts(tuple(adapters), tuple(active), base, names, "; ".join(problems) or None)


def _describe_adapter(skeleton: Any, name: str, config: Any) -> AdapterFacts:
    from peft import get_peft_model_state_dict

    from .models import describe_output, get_tensors

    state = get_tensors(skeleton)
    with torch.no_grad(), Tracer() as tracer, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of embeddings that are saved too, at every save
        sources = {key: torch.empty(each.shape, dtype=each.dtype, device="meta") for key, each in state.items()}
        for key, tensor in sources.items():
            tracer.add_source(key, tensor)
        written = get_peft_model_state_dict(
            skeleton, state_dict=dict(sources), adapter_name=name, save_embedding_layers=_choose_embeddings(config)
        )
    outputs = tuple(describe_output(key, tensor, tracer) for key, tensor in written.items())
    return AdapterFacts(name, _describe_config(skeleton, config), outputs)


def _choose_embeddings(config: Any) -> Any:
    """Return what PEFT's "auto" decides, without asking the hub: a save must not wait for a network."""
    base = getattr(config, "base_model_name_or_path", None)
    if not base or os.path.isfile(os.path.join(base, "config.json")):  # noqa: PTH113, PTH118 - as PEFT looks
        return "auto"
    from peft.utils.other import EMBEDDING_LAYER_NAMES

    targets = getattr(config, "target_modules", None) or ()
    if getattr(config, "trainable_token_indices", None) is not None or isinstance(targets, str):
        return False
    return any(name in targets for name in EMBEDDING_LAYER_NAMES)


def _describe_config(skeleton: Any, config: Any) -> dict[str, Any]:
    """Return the content of adapter_config.json."""
    config = copy.deepcopy(config)
    inner = skeleton.base_model if config.is_prompt_learning else skeleton.base_model.model
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = vars(inner).get("name_or_path") or None
    config.inference_mode = True
    body = {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
    if config.task_type is None:
        cls = type(inner)
        body["auto_mapping"] = {"base_model_class": cls.__name__, "parent_library": cls.__module__}
    return {key: _to_plain(value) for key, value in body.items()}


def _to_plain(value: Any) -> Any:
    """Turn enumerations and sets, which PEFT has in its configs, into what JSON holds."""
    if isinstance(value, Mapping):
        return {str(key): _to_plain(each) for key, each in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if isinstance(value, (list, tuple)):
        return [_to_plain(each) for each in value]
    return getattr(value, "value", value) if isinstance(value, str) else value


def _describe_base(skeleton: Any, active: tuple[str, ...]) -> tuple[ArchitectureFacts, dict[str, str]]:
    """Return the facts about the model without adapters, and the names in the checkpoint of its tensors."""
    from .models import describe_skeleton

    full = {id(tensor): name for name, tensor in _iterate_tensors(skeleton)}
    base = build_base(skeleton, active)
    facts = describe_skeleton(base)
    names = {name: full[id(tensor)] for name, tensor in _iterate_tensors(base) if name in facts.shapes}
    return facts, names


def build_base(skeleton: Any, active: tuple[str, ...] = ()) -> Any:
    """Return a skeleton of the model without adapters, with what `active` ones have trained in place of it."""
    return _strip(_find_base(skeleton), active, {})


def _find_base(skeleton: Any) -> Any:
    from peft.tuners.tuners_utils import BaseTuner

    inner = skeleton.base_model
    return inner.model if isinstance(inner, BaseTuner) else inner


def _strip(module: Any, active: tuple[str, ...], known: dict[int, Any]) -> Any:
    """Return a copy of a tree of modules in which layers that PEFT wrapped are in their place again."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

    if id(module) in known:
        return known[id(module)]
    if isinstance(module, BaseTunerLayer):
        parts = vars(module)["_modules"]
        if "base_layer" not in parts:
            raise TypeError(f"{type(module).__name__} holds no base layer")
        return _strip(parts["base_layer"], active, known)
    if isinstance(module, AuxiliaryTrainingWrapper):
        if not isinstance(module, ModulesToSaveWrapper):
            raise TypeError(f"{type(module).__name__} trains a part of a tensor")
        trained = module._modules["modules_to_save"]
        chosen = next((trained[name] for name in active if name in trained), module._modules["original_module"])
        return _strip(chosen, active, known)
    stripped: Any = object.__new__(type(module))
    vars(stripped).update(vars(module))
    known[id(module)] = stripped
    vars(stripped)["_modules"] = {
        name: None if child is None else _strip(child, active, known) for name, child in module._modules.items()
    }
    return stripped


def _iterate_tensors(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return parameters and buffers under each of their names."""
    return [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
