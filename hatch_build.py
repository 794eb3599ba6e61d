"""Compiles the kernel when the package is built or installed; where that does not work, there is none.

Everything that it does is done in Python then, more slowly: a missing compiler must not keep anybody from installing.
"""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = Path("accel_fsdp_tools", "kernel")


class KernelBuildHook(BuildHookInterface):
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":  # an editable installation is a wheel, too
            return
        building = _load_building(Path(self.root))
        problem = building.build_kernel()
        if problem is not None:
            self.app.display_warning(f"The compiled kernel was left out: {problem}")
            return
        build_data["artifacts"].append(str(FOLDER / building.get_library().name))
        build_data["pure_python"] = False
        # The library knows nothing of Python: it fits any version, on this platform.
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


def _load_building(root: Path) -> ModuleType:
    """Load the one module that needs nothing of the package, which is not installed yet."""
    path = root / FOLDER / "building.py"
    spec = importlib.util.spec_from_file_location("building", path)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(f"{path} is missing; the source is not whole")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
