"""`verify="load"` of an export from memory: does transformers load it, and into the values that are in memory here?

In a child process, so that the run's memory and state are left alone: the directory is loaded with `from_pretrained`,
and every tensor of the loaded model is compared with the fingerprint of the live one. So conversions are seen in both
directions, without running either model. Memory of the child: one model.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import RankFailedError
from ..extents import get_whole
from ..fingerprint import Fingerprint
from .load_check import MARK, find_class, run_child

_SHOWN = 3


@dataclass(frozen=True)
class LoadedValues:
    """What loading the export with transformers showed.

    Attributes:
        class_name: of the loaded model.
        num_equal: tensors with the live one's fingerprint.
        differing, missing: names of those with another, and of those that the loaded model does not have.
        keys: what transformers itself reported, by kind (`missing`, `unexpected`, `mismatched`).
        num_cast: live tensors that were cast, of which only the names are compared.
    """

    class_name: str
    num_equal: int
    differing: tuple[str, ...]
    missing: tuple[str, ...]
    keys: Mapping[str, tuple[str, ...]]
    num_cast: int = 0

    @property
    def ok(self) -> bool:
        return not (self.differing or self.missing or any(self.keys.values()))

    def __str__(self) -> str:
        wrong = [_list(f"keys {kind}", names) for kind, names in self.keys.items() if names]
        text = f"{self.class_name}.from_pretrained: {'; '.join(wrong) or 'all keys found, none left over'}"
        text += f"; {self.num_equal} tensors of the loaded model equal those in memory"
        if self.num_cast:
            text += f", {self.num_cast} were cast and are not compared"
        if self.differing:
            text += f"; {_list('differ', self.differing)}"
        if self.missing:
            text += f"; {_list('are not in the loaded model', self.missing)}"
        return text


def _list(what: str, names: tuple[str, ...]) -> str:
    more = ", ..." if len(names) > _SHOWN else ""
    return f"{len(names)} {what} ({', '.join(names[:_SHOWN])}{more})"


def check_loaded_values(out: Path, kept: Mapping[str, Fingerprint], *, num_cast: int = 0) -> LoadedValues:
    """Load `out` with transformers in a child process and compare its tensors with live ones. Not collective.

    Args:
        out: an export with its config. Code beside it is not run.
        kept: fingerprints of live tensors that were not cast, by their names in the model.
        num_cast: how many others there are.

    Raises:
        RankFailedError: the child failed; the message carries what transformers said.
    """
    expected = json.dumps({name: str(fingerprint) for name, fingerprint in kept.items()})
    done = run_child([sys.executable, "-m", __name__, str(out)], text=expected)
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise RankFailedError(
            f"transformers does not load what was exported: {last}\nThe weights were proven to be those in memory; "
            "look at the model's config, or export with verify='output'.",
            path=str(out),
            what="loading the export",
            cause_message=done.stderr[-4000:],
        )
    found = json.loads(lines[-1].removeprefix(MARK))
    keys = {kind: tuple(names) for kind, names in found["keys"].items()}
    differing, missing = tuple(found["differing"]), tuple(found["missing"])
    return LoadedValues(found["class_name"], found["num_equal"], differing, missing, keys, num_cast)


def _main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    print(MARK + json.dumps(_compare(parser.parse_args().out, json.load(sys.stdin))))
    return 0


def _compare(out: Path, expected: dict[str, str]) -> dict[str, Any]:
    import transformers

    from ..fingerprint import fingerprint_tensor

    transformers.logging.set_verbosity_error()
    config = transformers.AutoConfig.from_pretrained(out, local_files_only=True)
    cls = find_class(transformers, config, out, trust_remote_code=False)
    model, info = cls.from_pretrained(out, output_loading_info=True, dtype="auto", local_files_only=True)
    tensors = model.state_dict()
    differing = []
    for name, fingerprint in expected.items():
        if name in tensors:
            tensor = tensors[name].contiguous()
            shape = tuple(tensor.shape)
            if str(fingerprint_tensor(tensor, get_whole(shape), shape)) != fingerprint:
                differing.append(name)
    missing = sorted(expected.keys() - tensors.keys())
    kinds = ("missing", "unexpected", "mismatched")
    return {
        "class_name": type(model).__name__,
        "num_equal": len(expected) - len(differing) - len(missing),
        "differing": differing,
        "missing": missing,
        "keys": {kind: sorted(map(str, info[f"{kind}_keys"])) for kind in kinds},
    }


if __name__ == "__main__":
    sys.exit(_main())
