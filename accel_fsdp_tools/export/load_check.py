"""`--verify load`: does transformers load the export, and does the model compute what the checkpoint's model computes?

In a child process, because an export itself needs no torch: the exported directory is loaded with `from_pretrained`,
the same class is built from its config and filled from the checkpoint by this package's readers, and both answer one
fixed input. Memory of the child: two models.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import RankFailedError
from ..extents import DiskTensor
from .children import make_environment

MARK = "load check: "
"""Begins the line with what a child has found."""

_SEQUENCE = 16


@dataclass(frozen=True)
class LoadCheck:
    """What loading the export with transformers showed.

    `difference` is the largest between the logits of both models, None where they were not compared (`reason`).
    """

    class_name: str
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[str, ...]
    difference: float | None
    reason: str | None = None

    @property
    def ok(self) -> bool:
        return not (self.missing or self.unexpected or self.mismatched) and self.difference in (None, 0.0)

    def __str__(self) -> str:
        keys = f"{self.class_name}.from_pretrained: "
        lists = {"missing": self.missing, "unexpected": self.unexpected, "of another shape": self.mismatched}
        shown = [f"{len(names)} keys {what} ({', '.join(names[:3])})" for what, names in lists.items() if names]
        keys += "; ".join(shown) or "all keys found, none left over"
        if self.difference is None:
            return f"{keys}; logits not compared ({self.reason})"
        if self.difference == 0.0:
            return f"{keys}; logits equal those of the checkpoint's model"
        return f"{keys}; logits differ from the checkpoint's model by up to {self.difference:.3g}"


def check_load(
    out: Path, checkpoint: Path, *, index: int | None = None, key: str | None = None, trust_remote_code: bool = False
) -> LoadCheck:
    """Load `out` with transformers in a child process and compare it with the checkpoint. See the module.

    Raises:
        RankFailedError: the child failed; the message carries what transformers said.
    """
    command = [sys.executable, "-m", __name__, str(out), str(checkpoint)]
    command += ["--index", str(index)] if index is not None else []
    command += ["--key", key] if key is not None else []
    command += ["--trust-remote-code"] if trust_remote_code else []
    return read_answer(run_child(command), out)


def run_child(command: list[str], *, text: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a check in a process of its own, which finds this package where this process has found it.

    `text` is what it can read from its standard input.
    """
    return subprocess.run(  # noqa: S603 - this interpreter, and arguments that no shell sees
        command, input=text, capture_output=True, text=True, check=False, env=make_environment()
    )


def read_answer(done: subprocess.CompletedProcess[str], out: Path) -> LoadCheck:
    """Return what a child that prints `answer` has found.

    Raises:
        RankFailedError: it failed; the message carries what it said.
    """
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise RankFailedError(
            f"transformers does not load {out}: {last}\nThe weights were proven to be the checkpoint's; look at the "
            "config (--model).",
            path=str(out),
            what="loading the export",
            cause_message=done.stderr[-4000:],
        )
    found = json.loads(lines[-1].removeprefix(MARK))
    names = {each: tuple(found[each]) for each in ("missing", "unexpected", "mismatched")}
    return LoadCheck(found["class_name"], **names, difference=found["difference"], reason=found["reason"])


def _main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--index", type=int)
    parser.add_argument("--key")
    parser.add_argument("--trust-remote-code", action="store_true")
    arguments = parser.parse_args()
    answer(_compare(arguments))
    return 0


def answer(found: dict[str, Any]) -> None:
    """Print what a child has found, for `read_answer`."""
    print(MARK + json.dumps(found))


def _compare(arguments: argparse.Namespace) -> dict[str, Any]:
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    config = transformers.AutoConfig.from_pretrained(
        arguments.out, trust_remote_code=arguments.trust_remote_code, local_files_only=True
    )
    cls = find_class(transformers, config, arguments.out, trust_remote_code=arguments.trust_remote_code)
    model, info = cls.from_pretrained(arguments.out, output_loading_info=True, dtype="auto", local_files_only=True)
    result: dict[str, Any] = {
        "class_name": type(model).__name__,
        "missing": sorted(info["missing_keys"]),
        "unexpected": sorted(info["unexpected_keys"]),
        "mismatched": sorted(str(each) for each in info["mismatched_keys"]),
        "difference": None,
        "reason": None,
    }
    model.eval()
    with torch.no_grad():
        try:
            inputs = make_inputs(torch, model)
            first = run_model(torch, model, inputs)
        except RUN_ERRORS as error:
            result["reason"] = f"this architecture does not run on token ids alone: {type(error).__name__}: {error}"
            return result
        _fill_from_checkpoint(torch, model, arguments)
        second = run_model(torch, model, inputs)
    result["difference"] = measure_difference(torch, first, second)
    return result


RUN_ERRORS = (ValueError, TypeError, KeyError, AttributeError, RuntimeError, NotImplementedError, IndexError)
"""What models raise that want other inputs than token ids."""


def measure_difference(torch: Any, first: Any, second: Any) -> float:
    """Return the largest difference of two results: 0 for equal bits only, infinite where one has a NaN."""
    if torch.equal(first.view(torch.uint8), second.view(torch.uint8)):
        return 0.0
    difference = float((first.double() - second.double()).abs().max())
    return difference if difference > 0 else float("inf")  # NaN on one side compares as nothing


def find_class(transformers: Any, config: Any, directory: Path, *, trust_remote_code: bool) -> Any:
    """Return the class that a config names."""
    for name in config.architectures or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    if getattr(config, "auto_map", None) and trust_remote_code:
        from transformers.dynamic_module_utils import get_class_from_dynamic_module

        kind = next(key for key in config.auto_map if key.startswith("AutoModel"))
        return get_class_from_dynamic_module(config.auto_map[kind], str(directory))
    raise ValueError(f"{config.architectures} is no class of transformers; code of its own runs only when allowed")


def make_inputs(torch: Any, model: Any) -> dict[str, Any]:
    """Return token ids for one sequence, the same in every run."""
    table = model.get_input_embeddings()
    generator = torch.Generator().manual_seed(0)
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or _SEQUENCE
    shape = (1, min(_SEQUENCE, limit))
    inputs = {"input_ids": torch.randint(0, table.weight.shape[0], shape, generator=generator)}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"].flip(1)
    return inputs


def run_model(torch: Any, model: Any, inputs: dict[str, Any]) -> Any:
    """Return the logits, or what comes first where there are none."""
    torch.manual_seed(0)
    output = model(**inputs)
    found = output.logits if getattr(output, "logits", None) is not None else output[0]
    return found.contiguous()


def _fill_from_checkpoint(torch: Any, model: Any, arguments: argparse.Namespace) -> None:
    """Overwrite the model's tensors, one at a time, with the checkpoint's; names are those of the live model."""
    from .select import select_model

    tensors = select_model(arguments.checkpoint, index=arguments.index, key=arguments.key).tensors
    fill(torch, model.state_dict(), tensors)


def fill(torch: Any, live: dict[str, Any], tensors: Mapping[str, DiskTensor]) -> None:
    """Overwrite tensors in place, one at a time, with those of the same name on disk; others become NaN.

    Args:
        torch: the module.
        live: `model.state_dict()`, which shares memory with the model and holds no buffers that are computed.
        tensors: on disk.
    """
    for each in live.values():
        if each.is_floating_point():
            each.fill_(float("nan"))  # what the checkpoint does not fill shows in the logits
    for name, tensor in tensors.items():
        if name in live and tensor.numel:
            live[name].copy_(read_tensor(torch, tensor))


def read_tensor(torch: Any, tensor: DiskTensor) -> Any:
    """Return a tensor of a checkpoint as torch's."""
    from ..formats.reading import read_part

    data = torch.frombuffer(read_part(tensor), dtype=getattr(torch, tensor.dtype))
    return data.reshape(tensor.shape)


if __name__ == "__main__":
    sys.exit(_main())
