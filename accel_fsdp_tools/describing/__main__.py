"""`python -m accel_fsdp_tools.describing CONFIG_DIR`: the facts about an architecture, from its config alone.

The child process of `export.foreign`: builds the model without data (on the meta device) and prints the facts as JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

_MARK = "architecture: "


def build_from_config(directory: Path, *, trust_remote_code: bool) -> Any:
    """Return the model that a directory's config.json describes, on the meta device. Nothing is fetched.

    Raises:
        Whatever transformers raises for this config.
    """
    import torch
    import transformers
    from transformers import initialization
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    options = {"trust_remote_code": trust_remote_code, "local_files_only": True}
    config = transformers.AutoConfig.from_pretrained(directory, **options)
    names = config.architectures or []
    auto_map = getattr(config, "auto_map", None) or {}
    cls = next((getattr(transformers, name) for name in names if hasattr(transformers, name)), None)
    remote = next((auto_map[key] for key in auto_map if key.startswith("AutoModel")), None)
    if remote is not None and (trust_remote_code or cls is None):
        if not trust_remote_code:
            raise ValueError(f"the class {remote} is code beside the config, which is run only when that is allowed")
        cls = get_class_from_dynamic_module(remote, str(directory), local_files_only=True)
    if cls is None:
        # Without a class the heads are unknown; the config alone says what kind of model it is.
        cls = transformers.AutoModelForCausalLM._model_mapping.get(type(config), None)
    if cls is None:
        raise ValueError(f"config.json names no class of transformers {transformers.__version__}: {names}")
    with torch.device("meta"), initialization.meta_device_safe_creation_ops():
        return cls._from_config(config, attn_implementation="eager")


def main(arguments: list[str] | None = None) -> int:
    """Print the facts; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--trust-remote-code", action="store_true")
    options = parser.parse_args(arguments)

    import transformers

    from . import describe_architecture

    transformers.logging.set_verbosity_error()
    model = build_from_config(options.directory, trust_remote_code=options.trust_remote_code)
    print(_MARK + json.dumps(describe_architecture(model).to_dict()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
