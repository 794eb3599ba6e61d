"""The files beside the weights: config, generation config, tokenizer or processor, chat template, remote code.

Copied as they are, never executed; only the config is edited, so that it says what the tensors are.
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import CheckpointNotFoundError, DamagedCheckpointError, UsageError
from ..files import write_durably

CONFIG_NAME = "config.json"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")

_NAMES = (
    "generation_config.json",
    "tokenizer*.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "*vocab*.json",
    "merges.txt",
    "*.spm",
    "spiece.model",
    "sentencepiece*.model",
    "normalizer.json",
    "chat_template*",
    "additional_chat_templates/*",
    "preprocessor_config.json",
    "processor_config.json",
    "image_processor_config.json",
    "video_preprocessor_config.json",
    "feature_extractor_config.json",
)
_WEIGHTS = ("model*.safetensors", "model.safetensors.index.json")
_TOKENIZERS = ("tokenizer*", "vocab*", "*vocab*.json", "*.spm", "spiece.model", "preprocessor_config.json")


@dataclass(frozen=True)
class Companions:
    """What goes beside the weights: the parsed config, and files to copy by their name in the output."""

    config: Mapping[str, Any] | None = None
    files: Mapping[str, Path] = field(default_factory=dict)

    @property
    def has_tokenizer(self) -> bool:
        return any(fnmatch.fnmatch(name, pattern) for name in self.files for pattern in _TOKENIZERS)


def resolve_model(model: str | Path, *, weights: bool = False) -> Path:
    """Return the local directory for `--model`: a directory, or the cached or downloaded files of a hub id.

    Args:
        model: directory or hub id.
        weights: fetch its weights, too.

    Raises:
        CheckpointNotFoundError: it is neither, or cannot be fetched.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.is_file() and path.name == CONFIG_NAME:
        return path.parent
    if not _HUB_ID.fullmatch(str(model)) or path.exists():
        raise CheckpointNotFoundError(
            f"{model} is no directory with a config.json, and no hub id either.", path=str(model)
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        patterns = [CONFIG_NAME, "adapter_config.json", "*.py", *_NAMES, *(_WEIGHTS if weights else ())]
        return Path(snapshot_download(str(model), allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise CheckpointNotFoundError(
            f"{model} is no local directory, and cannot be fetched from the hub ({type(error).__name__}: {error}). "
            "Give --model a directory with the model's config.json.",
            path=str(model),
        ) from error


def find_companions(directories: Sequence[Path]) -> Companions:
    """Return what the first of `directories` that has each file holds; later ones fill in what is missing.

    Raises:
        DamagedCheckpointError: a config is no JSON object.
    """
    config: Mapping[str, Any] | None = None
    files: dict[str, Path] = {}
    for directory in directories:
        found = _list_files(directory)
        if CONFIG_NAME in found and config is None:
            config = read_config(found[CONFIG_NAME])
            if config.get("auto_map"):
                files.update({name: path for name, path in found.items() if name.endswith(".py")})
        tokenizer_known = Companions(files=files).has_tokenizer
        for name, path in found.items():
            is_tokenizer = Companions(files={name: path}).has_tokenizer
            if any(fnmatch.fnmatch(name, pattern) for pattern in _NAMES) and not (is_tokenizer and tokenizer_known):
                files.setdefault(name, path)
    return Companions(config, files)


def _list_files(directory: Path) -> dict[str, Path]:
    paths = [*directory.iterdir(), *(directory / "additional_chat_templates").glob("*")]
    # The hub's cache holds links; what is copied are the files.
    return {path.relative_to(directory).as_posix(): path for path in sorted(paths) if path.is_file()}


def read_config(path: Path) -> dict[str, Any]:
    """Return a config.json.

    Raises:
        DamagedCheckpointError: it is no JSON object.
    """
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DamagedCheckpointError(
            f"{path} cannot be read: {error}. Give --model a directory with a whole config.json.", path=str(path)
        ) from error
    if not isinstance(config, dict):
        raise DamagedCheckpointError(f"{path} is no JSON object: it is no model's config.", path=str(path))
    return config


def set_dtype(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return the config with the dtype of the tensors that it lies beside, in sub-configs too where they state one."""
    edited: dict[str, Any] = {}
    for key, value in config.items():
        is_sub = isinstance(value, Mapping) and (key.endswith("_config") or key in ("encoder", "decoder"))
        if is_sub and key != "quantization_config":
            edited[key] = set_dtype(value, dtype) if _states_dtype(value) else dict(value)
        elif key not in ("dtype", "torch_dtype"):
            edited[key] = value
    edited["dtype"] = dtype
    return edited


def _states_dtype(config: Mapping[str, Any]) -> bool:
    return bool(config.get("dtype") or config.get("torch_dtype"))


def get_dtype(config: Mapping[str, Any]) -> str | None:
    """Return the dtype that a config states, without `torch.`."""
    found = config.get("dtype") or config.get("torch_dtype")
    return str(found).removeprefix("torch.") if isinstance(found, str) else None


def write_companions(directory: Path, companions: Companions) -> list[str]:
    """Write config and files into `directory` and return their names.

    Raises:
        UsageError: a name would lie outside the directory.
    """
    if companions.config is not None:
        # As transformers writes it, byte for byte.
        text = json.dumps(companions.config, indent=2, sort_keys=True) + "\n"
        write_durably(directory / CONFIG_NAME, text.encode())
    for name, source in companions.files.items():
        target = directory / name
        if directory.resolve() not in target.resolve().parents:
            raise UsageError(f"{name} would be written outside of {directory}.", path=name)
        target.parent.mkdir(exist_ok=True)
        write_durably(target, source.read_bytes())
    return [*([CONFIG_NAME] if companions.config is not None else []), *companions.files]
