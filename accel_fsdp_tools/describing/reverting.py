"""Conversions that only transformers can compute, one group of tensors at a time.

A live export calls `revert` on what its ranks have gathered. As a program, `python -m
accel_fsdp_tools.describing.reverting CONFIG_DIR`, this is the child process of `export.reverting`: over its standard
input it gets the tensors of a group, and answers with the bytes it is asked for. Lines of JSON, each followed by as
many raw bytes as it says.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ..architecture.outputs import write_outputs
from .__main__ import build_from_config

if TYPE_CHECKING:
    import torch

NUM_HELD = 2
"""Groups that are kept at a time: two threads work on neighbours."""


def build_reference(model: torch.nn.Module) -> torch.nn.Module:
    """Return what `revert` needs to know about a live model: a copy without data, and without adapters.

    Not collective; memory: the modules' attributes.
    """
    from ..live import describe_model
    from .adapters import build_base, has_adapters
    from .skeleton import build_skeleton

    skeleton = build_skeleton(model, describe_model(model))
    return build_base(skeleton) if has_adapters(skeleton) else skeleton


def describe_conversions(model: Any) -> str:
    """Return a digest of what `revert` does with a model: what becomes of what, and what operations are made with.

    Args:
        model: from `build_reference`.

    Raises:
        Whatever the code of an architecture raises.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    from .models import describe_skeleton

    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:  # as transformers does
        conversions = get_model_conversion_mapping(model, add_legacy=False)
    reverse = [each.reverse_transform() for each in conversions]
    names = list(model.state_dict())
    operations = [
        [type(each).__qualname__, sorted(item for item in getattr(each, "__dict__", {}).items() if _is_plain(item[1]))]
        for conversion in reverse
        if any(conversion.rename_source_key(name)[1] is not None for name in names)  # a loaded model keeps no others
        for each in getattr(conversion, "operations", ())
    ]
    outputs = write_outputs(describe_skeleton(model).outputs)
    return hashlib.sha256(json.dumps([outputs, operations]).encode()).hexdigest()


def _is_plain(value: Any) -> bool:
    """Whether two values that are alike are written alike: what shows where it lies in memory is not."""
    if isinstance(value, list | tuple):
        return all(_is_plain(each) for each in value)
    return value is None or isinstance(value, bool | int | float | str)


def revert(model: Any, sources: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what `save_pretrained` would write of some of a model's tensors, by name, row by row in memory.

    Args:
        model: of which transformers takes class, config and conversions; its data is not looked at.
        sources: whole tensors by their names in the model. All that is converted together must be among them.

    Raises:
        Whatever the code of an architecture raises.
    """
    import torch
    from transformers.core_model_loading import revert_weight_conversion

    with torch.no_grad():
        return {name: each.contiguous() for name, each in revert_weight_conversion(model, dict(sources)).items()}


def serve(model: Any, requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer until there are no more requests. Memory: two groups of tensors, before and after the conversion.

    - `{"convert": GROUP, "sources": [[name, dtype, shape], ...]}` and their bytes: the answer is
      `{"outputs": {name: [dtype, shape]}}` or `{"error": TEXT}`
    - `{"read": GROUP, "name": NAME, "start": BYTE, "length": BYTES}`: the bytes

    Raises:
        EOFError: a request ends too early.
    """
    import torch

    from ..fingerprint import view_bytes

    held: dict[str, dict[str, torch.Tensor]] = {}
    while line := requests.readline():
        request = json.loads(line)
        if "read" in request:
            tensor, start = held[request["read"]][request["name"]], request["start"]
            answers.write(view_bytes(tensor)[start : start + request["length"]])
        else:
            sources = {
                name: _receive(requests, getattr(torch, dtype), shape) for name, dtype, shape in request["sources"]
            }
            while len(held) >= NUM_HELD:
                del held[next(iter(held))]
            answer = _convert(model, sources, held, request["convert"])
            answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


def _receive(requests: BinaryIO, dtype: Any, shape: list[int]) -> Any:
    import torch

    from ..fingerprint import view_bytes

    tensor = torch.empty(shape, dtype=dtype)
    target = view_bytes(tensor)
    while target:
        count = requests.readinto(target)  # type: ignore[attr-defined] # buffered readers have it
        if not count:
            raise EOFError("the tensor is not whole")
        target = target[count:]
    return tensor


def _convert(model: Any, sources: dict[str, Any], held: dict[str, dict[str, Any]], group: str) -> dict[str, Any]:
    try:
        held[group] = revert(model, sources)
    except Exception as error:  # whatever the code of an architecture raises
        return {"error": f"{type(error).__name__}: {error}"}
    return {
        "outputs": {
            name: [str(each.dtype).removeprefix("torch."), list(each.shape)] for name, each in held[group].items()
        }
    }


def main(arguments: list[str] | None = None) -> int:
    """Serve standard input; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--trust-remote-code", action="store_true")
    options = parser.parse_args(arguments)

    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what anybody prints is no answer
    import transformers

    transformers.logging.set_verbosity_error()
    model = build_from_config(options.directory, trust_remote_code=options.trust_remote_code)
    serve(model, sys.stdin.buffer, answers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
