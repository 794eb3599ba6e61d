"""What holds the project's files together: layers, commands, extras."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = None

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "accel_fsdp_tools"

# From the bottom to the top; a module imports only from lower layers (docs/design.md, section 3). A package counts as
# one module and may do inside as it likes. New modules are added here, as low as they can be.
LAYERS: list[set[str]] = [
    {"kernel"},
    {"crc", "errors", "findings", "meter", "host_copies", "numpy_memory", "parts", "phases"},
    {"rehearsal"},
    {"extents", "names", "meetings", "files", "layout", "permissions", "retention", "upstream"},
    {"architecture", "arguments", "placements", "ranks", "weighted_sums"},
    {"background", "formats"},
    {"fingerprint", "rng", "manifest", "ownership", "quarantine", "records"},
    {"model_changes", "opening", "progress", "commit", "report", "statistics", "disk_values"},
    {"rank_state", "rank_objects", "survey", "verify", "views", "disk_checks"},
    {"export"},
    {"damage", "holding", "keeping", "latest", "position", "running"},
    {"buffers"},
    {"live"},
    {
        "assets",
        "contract",
        "delegate",
        "describing",
        "load_notes",
        "optimizer_io",
        "options",
        "pace",
        "shards",
        "steps",
    },
    {"live_merging", "live_writing", "local_digests", "optimizer_shards", "rank_sums", "save_checks"},
    {"live_reverting"},
    {"compare_live", "live_fingerprints", "live_planning", "prepared", "sealing"},
    {"live_proving", "proven"},
    {"changed_load", "compare_disk", "compare_recorded"},
    {"export_live", "inventory", "load_objects", "rank_restore", "tracking", "verify_live"},
    {"completing", "recording", "verify_states"},
    {"save", "load"},
    {"resuming"},
    {"run_loads", "run_saves"},
    {"checkpointer", "cpu_fsdp", "trainer"},
    {"cli"},
]
# `report` is vocabulary for the mechanisms above it; everything below `live` starts without torch, as does `--help`.
WITHOUT_TORCH = {"cli"}.union(*LAYERS[: LAYERS.index({"live"})])


def _find_modules() -> dict[str, list[Path]]:
    """Top-level modules of the package, `__init__` excepted, with their files."""
    modules: dict[str, list[Path]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts != ("__init__",):
            # `python -m accel_fsdp_tools.<command>` is a command of the command line, wherever the file has to lie.
            modules.setdefault("cli" if parts[-1] == "__main__" else parts[0], []).append(path)
    return modules


def _find_imports(path: Path) -> set[str]:
    """Top-level modules of the package that a file imports, wherever in the file, types included."""
    package = path.relative_to(ROOT).parent.parts
    imported = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported += [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = list(package[: len(package) - node.level + 1]) if node.level else []
            start += node.module.split(".") if node.module else []
            imported += [[*start, alias.name] for alias in node.names]
    return {parts[1] for parts in imported if parts[0] == PACKAGE.name and len(parts) > 1}


def test_every_module_has_its_layer() -> None:
    listed = set[str]().union(*LAYERS)
    assert set(_find_modules()) <= listed, "add new modules to LAYERS, as low as they can be"


def test_imports_go_downward_only() -> None:
    level = {module: index for index, layer in enumerate(LAYERS) for module in layer}
    wrong = [
        f"{path.relative_to(ROOT)} imports {imported}"
        for module, paths in _find_modules().items()
        for path in paths
        for imported in _find_imports(path) - {module}
        if module in level and imported in level and level[imported] >= level[module]
    ]
    assert wrong == []


def _list_light_modules() -> list[str]:
    paths = [path for module, paths in _find_modules().items() if module in WITHOUT_TORCH for path in paths]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]
    return [PACKAGE.name, *(name.removesuffix(".__init__") for name in names)]


def test_low_layers_start_without_torch() -> None:
    code = (
        f"import sys\n"
        f"for name in {_list_light_modules()!r}:\n"
        f"    __import__(name)\n"
        f"    heavy = {{'torch', 'accelerate', 'transformers', 'datasets'}} & set(sys.modules)\n"
        f"    assert not heavy, f'importing {{name}} imports {{sorted(heavy)}}'\n"
    )
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr


def _read_bash_lines(path: Path) -> list[str]:
    """The commands in the `bash` blocks of a Markdown file."""
    blocks = re.findall(r"```bash\n(.*?)```", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    return [line.strip() for block in blocks for line in block.splitlines() if line.strip()]


def test_ci_runs_the_test_command_of_the_readme() -> None:
    commands = [line for line in _read_bash_lines(ROOT / "README.md") if line.endswith("-m pytest")]
    assert len(commands) == 1
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert commands[0] in lines
    assert "-c constraints.txt" in commands[0]


def test_demo_command_of_the_readme_exists() -> None:
    assert "bash examples/demo.sh" in _read_bash_lines(ROOT / "README.md")
    for script in (ROOT / "examples" / "demo.sh", ROOT / ".ci" / "run"):
        assert script.stat().st_mode & 0o111, f"{script.name} is not executable"
        assert subprocess.run(["bash", "-n", script], check=False).returncode == 0


@pytest.mark.skipif(tomllib is None, reason="tomllib is new in Python 3.11")
@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", ".ci/run", "examples/demo.sh"])
def test_named_extras_exist(name: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    found = re.findall(r'-e "?\.\[([\w,-]+)\]', (ROOT / name).read_text())
    found += re.findall(r"accel-fsdp-tools\[([\w,-]+)\]", (ROOT / name).read_text())
    assert found or name.endswith(".md")
    assert {extra for each in found for extra in each.split(",")} <= set(extras)


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/index.md"])
def test_links_to_files_lead_somewhere(name: str) -> None:
    path = ROOT / name
    targets = re.findall(r"\]\(([^)#\s]+)", path.read_text(encoding="utf-8"))
    missing = [target for target in targets if "://" not in target and not (path.parent / target).resolve().exists()]
    assert missing == []


def test_public_names_import() -> None:
    import accel_fsdp_tools

    for name in accel_fsdp_tools.__all__:
        assert getattr(accel_fsdp_tools, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = accel_fsdp_tools.nonsense


def test_ci_runs_with_the_oldest_versions_that_are_allowed() -> None:
    """What is pinned is also the oldest allowed; where that ends, CI needs a second leg (CONTRIBUTING.md)."""
    pinned = dict(re.findall(r"^([\w-]+)==([\d.]+)$", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE))
    allowed = dict(re.findall(r'"(torch|accelerate|transformers)>=([\d.]+)"', (ROOT / "pyproject.toml").read_text()))
    assert set(allowed) == {"torch", "accelerate", "transformers"}
    for name, version in allowed.items():
        assert pinned[name].startswith(f"{version}."), f"{name} is pinned to {pinned[name]}, {version} is allowed"
