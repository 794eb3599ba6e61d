"""Facts about the architecture of a checkpoint that was not saved here, worked out from its config by a child process.

The export itself needs no torch and little memory; the child imports torch and transformers, answers and ends.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ..architecture.facts import ArchitectureFacts
from ..errors import CheckpointNotFoundError, ManifestError, UnsupportedError
from .children import make_environment

_MODULE = "accel_fsdp_tools.describing"
_MARK = "architecture: "
_TIMEOUT_S = 600.0


def describe_from_config(
    directory: str | Path, *, trust_remote_code: bool = False, timeout_s: float = _TIMEOUT_S
) -> ArchitectureFacts:
    """Return what `save_pretrained` writes for the model that `directory`/config.json describes.

    What only a live model knows is missing: conversions of the checkpoint that it was once loaded from, layers that
    were added, a generation config that was changed.

    Args:
        directory: with config.json, and the code that it names, if any.
        trust_remote_code: run that code.
        timeout_s: for the child process.

    Takes a few seconds and some hundred MiB in the child process, nothing here.

    Raises:
        CheckpointNotFoundError: there is no config.json.
        UnsupportedError: transformers cannot build the model; the message carries what it said.
    """
    import subprocess  # here: most exports start no other process

    directory = Path(directory).resolve()
    if not (directory / "config.json").is_file():
        raise CheckpointNotFoundError(
            f"{directory} has no config.json. Give --model the directory of the model's config.", path=str(directory)
        )
    command = [sys.executable, "-m", _MODULE, str(directory)]
    command += ["--trust-remote-code"] if trust_remote_code else []
    environment = {**make_environment(), "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(  # noqa: S603 - this interpreter, this package
            command, capture_output=True, text=True, check=False, timeout=timeout_s, env=environment, errors="replace"
        )
    except subprocess.TimeoutExpired as error:
        raise UnsupportedError(
            f"transformers did not build the model of {directory} within {timeout_s:.0f} s. Export with the names as "
            "they are (without --model), or look at its config.",
            path=str(directory),
        ) from error
    lines = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if done.returncode or not lines:
        said = (done.stderr.strip().splitlines() or ["no output"])[-1]
        hint = " Is this the config of the model that was trained, and transformers new enough for it?"
        if not trust_remote_code and ("code beside the config" in said or "trust_remote_code" in said):
            hint = " Allow its code with --trust-remote-code if you trust it."
        raise UnsupportedError(
            f"transformers cannot build the model of {directory}: {said}.{hint}",
            path=str(directory),
            actual=done.stderr[-4000:],
        )
    try:
        return ArchitectureFacts.from_dict(json.loads(lines[-1].removeprefix(_MARK)), path=str(directory))
    except (ValueError, ManifestError) as error:
        raise UnsupportedError(
            f"The answer about the model of {directory} cannot be read: {error}. Export it with its own "
            "save_pretrained.",
            path=str(directory),
        ) from error
