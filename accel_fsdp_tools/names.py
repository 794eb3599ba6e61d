"""Names of parameters without what wrappers put into them."""

from __future__ import annotations

import re
from collections.abc import Iterable

from .errors import DamagedCheckpointError

_WRAPPERS = re.compile(r"(^|\.)(_fsdp_wrapped_module|_fpw_module|_orig_mod|_checkpoint_wrapped_module)(?=\.|$)")
_PARALLEL = "module."


def clean_fqn(name: str) -> str:
    """Remove the prefixes that FSDP1, torch.compile and activation checkpointing put into names, at any depth."""
    return _WRAPPERS.sub("", name).lstrip(".")


def clean_names(names: Iterable[str], *, path: str) -> dict[str, str]:
    """Return the clean name of each of a model's names.

    A leading `module.` is DistributedDataParallel's if every name has it; otherwise the model has such a module.

    Raises:
        DamagedCheckpointError: two names are the same once cleaned: which of the two tensors is meant is unknown.
    """
    cleaned = {name: clean_fqn(name) for name in names}
    if cleaned and all(name.startswith(_PARALLEL) for name in cleaned.values()):
        cleaned = {name: clean_fqn(clean.removeprefix(_PARALLEL)) for name, clean in cleaned.items()}
    owners: dict[str, str] = {}
    for name, clean in cleaned.items():
        other = owners.setdefault(clean, name)
        if other != name:
            raise DamagedCheckpointError(
                f"{path}: {other!r} and {name!r} are both {clean!r} without wrapper prefixes, so it is unknown which "
                "of the two is the tensor. Remove one of them and save the file again.",
                path=path,
                fqn=clean,
                actual=(other, name),
            )
    return cleaned


def list_adapter_names(fqn: str, adapters: Iterable[str]) -> list[str]:
    """Return the names under which PEFT's own files know a tensor of its adapters: without the adapter's name."""
    return [fqn.replace(f".modules_to_save.{adapter}.", ".").replace(f".{adapter}.", ".") for adapter in adapters]
