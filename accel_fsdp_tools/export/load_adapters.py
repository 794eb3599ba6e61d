"""`--verify load` for adapters: does PEFT load them, and does the model compute what the checkpoint's model computes?

In a child process: the base model is built with the checkpoint's adapters in it, filled from the checkpoint (or from a
base model's directory, where the checkpoint holds adapters only), and gives its logits for one fixed input; then once
more with the exported adapter loaded beside them. A merged model is loaded with transformers and compared with it,
too; it computes the same but for rounding. Memory of the child: one model, two where adapters were merged.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from .adapters import Adapter, AdapterSet
from .companions import CONFIG_NAME
from .load_check import (
    RUN_ERRORS,
    answer,
    fill,
    find_class,
    make_inputs,
    measure_difference,
    read_answer,
    read_tensor,
    run_child,
    run_model,
)
from .lora import changes_base
from .plans import Plan

_EXPORTED = "exported_by_accel_fsdp_tools"


def check_adapters(
    plan: Plan, staging: Path, *, model: Path | None, index: int | None, key: str | None, trust_remote_code: bool
) -> tuple[str, bool]:
    """Load an export of adapters, or with them merged, in a child process; return what was found and if that is well.

    Args:
        plan: of the export.
        staging: where it has been written.
        model: a directory that was given, which may hold the base model.
        index, key: which model of the checkpoint.
        trust_remote_code: run code beside the base model's config.

    Raises:
        RankFailedError: the child failed; the message carries what PEFT or transformers said.
    """
    found = plan.adapters
    assert found is not None  # noqa: S101 - for the type checker
    places = [each for each in (plan.selection.assets, plan.base, model, _find_named_base(found)) if each is not None]
    config = next((each for each in places if (each / CONFIG_NAME).is_file()), None)
    weights = next((each for each in places if any(each.glob("model*.safetensors"))), None)
    if config is None or (weights is None and not found.has_base):
        what = "there is no config.json" if config is None else "the weights are not in the checkpoint"
        return f"not loaded: of the base model {what}; give --model a directory with both", True
    strange = next((each for each in found.adapters if changes_base(each)), None)
    if strange is not None:
        reason = strange.config["init_lora_weights"]
        return f"not loaded: PEFT would change the base model's weights once more ({reason})", True
    folders = {part.folder for part in plan.parts}
    described = {
        "adapters": [[each.name, each.name if each.name in folders else ""] for each in found.adapters],
        "merged": plan.is_merged,
        "config": str(config),
        "weights": None if found.has_base else str(weights),
        "model": None if model is None else str(model),
        "index": index,
        "key": key,
        "trust_remote_code": trust_remote_code,
    }
    command = [sys.executable, "-m", __name__, str(staging), str(plan.selection.path), json.dumps(described)]
    check = read_answer(run_child(command), staging)
    is_rounded = plan.is_merged and check.difference not in (None, 0.0)
    text = f"{check}{' (a merged weight is rounded once more)' if is_rounded else ''}"
    return text, replace(check, difference=None).ok if is_rounded else check.ok


def _find_named_base(found: AdapterSet) -> Path | None:
    """Return the base model's directory that an adapter's config names, if it is on this machine."""
    named = found.adapters[0].config.get("base_model_name_or_path")
    return Path(named) if isinstance(named, str) and named and Path(named).is_dir() else None


def _main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("described", type=json.loads)
    arguments = parser.parse_args()
    answer(_compare(arguments.out, arguments.checkpoint, arguments.described))
    return 0


def _compare(out: Path, checkpoint: Path, described: dict[str, Any]) -> dict[str, Any]:
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    model, cls = _build(torch, transformers, checkpoint, described)
    names = [name for name, _ in described["adapters"]]
    result: dict[str, Any] = {
        "class_name": cls.__name__,
        "missing": [],
        "unexpected": [],
        "mismatched": [],
        "difference": None,
        "reason": None,
    }
    with torch.no_grad():
        model.base_model.set_adapter(names if described["merged"] else names[0])
        try:
            inputs = make_inputs(torch, model)
            expected = run_model(torch, model, inputs)
        except RUN_ERRORS as error:
            result["reason"] = f"this architecture does not run on token ids alone: {type(error).__name__}: {error}"
            return result
        if described["merged"]:
            exported, info = cls.from_pretrained(out, output_loading_info=True, dtype="auto", local_files_only=True)
            found = run_model(torch, exported.eval(), inputs)
            result["missing"] = sorted(info["missing_keys"])
            result["unexpected"] = sorted(info["unexpected_keys"])
            result["mismatched"] = sorted(str(each) for each in info["mismatched_keys"])
            result["difference"] = measure_difference(torch, expected, found)
            return result
        result["class_name"] = "PeftModel"
        differences = []
        for number, (name, folder) in enumerate(described["adapters"]):
            model.base_model.set_adapter(name)
            expected = run_model(torch, model, inputs)
            loaded = model.load_adapter(str(out / folder), f"{_EXPORTED}_{number}")
            result["missing"] += sorted(loaded.missing_keys)
            result["unexpected"] += sorted(loaded.unexpected_keys)
            model.base_model.set_adapter(f"{_EXPORTED}_{number}")
            model.eval()
            differences.append(measure_difference(torch, expected, run_model(torch, model, inputs)))
        result["difference"] = max(differences)
    return result


def _build(torch: Any, transformers: Any, checkpoint: Path, described: dict[str, Any]) -> tuple[Any, Any]:
    """Return the checkpoint's model with its adapters, and the base model's class."""
    from peft import PeftConfig, get_peft_model, set_peft_model_state_dict

    from .adapters import find_adapters
    from .select import select_model

    selection = select_model(checkpoint, index=described["index"], key=described["key"])
    given = None if described["model"] is None else Path(described["model"])
    found = find_adapters(selection, given)
    assert found is not None  # noqa: S101 - for the type checker
    trusted = described["trust_remote_code"]
    directory = Path(described["config"])
    config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=trusted, local_files_only=True)
    cls = find_class(transformers, config, directory, trust_remote_code=trusted)
    if described["weights"] is not None:
        base = cls.from_pretrained(described["weights"], dtype="auto", local_files_only=True)
    else:
        dtype = next(each.dtype for name, each in selection.tensors.items() if ".lora_" not in name)
        base = cls._from_config(config).to(getattr(torch, dtype))
    model: Any = None
    for each in found.adapters:  # all: names in the checkpoint depend on every one
        peft_config: Any = PeftConfig.from_peft_type(**each.config)  # type: ignore[no-untyped-call]
        if model is None:
            model = get_peft_model(base, peft_config, adapter_name=each.name)
        else:
            model.add_adapter(each.name, peft_config)
    with torch.no_grad():
        if described["weights"] is None:
            fill(torch, model.state_dict(), selection.tensors)
        else:
            for each in found.adapters:
                set_peft_model_state_dict(model, _read_all(torch, each), adapter_name=each.name)
    return model.eval(), cls


def _read_all(torch: Any, adapter: Adapter) -> dict[str, Any]:
    return {name: read_tensor(torch, tensor) for name, tensor in adapter.tensors.items()}


if __name__ == "__main__":
    sys.exit(_main())
