"""How the kernel is compiled: by whatever C compiler there is, when the package is installed or when asked to.

Run by the build hook (`hatch_build.py`), which has nothing of this package installed: the standard library only.
"""

from __future__ import annotations

import os
import sys
import zlib
from pathlib import Path

_FOLDER = Path(__file__).parent
_FLAGS = ["-O3", "-shared", "-fPIC", "-Wall"]
_TIMEOUT_S = 120


def get_library() -> Path:
    """Return where the library that is compiled of the source as it is now lies, or would lie.

    Named after its source: one that was compiled of another would misread its callers' memory.
    """
    source = b"".join(path.read_bytes() for path in _list_sources("*.[ch]"))
    return _FOLDER / f"kernel-{zlib.crc32(source):08x}.so"


def build_kernel() -> str | None:
    """Compile the kernel into its place beside the source. Return None if it is there, or else why it is not.

    Those of other sources are removed. Replaced in one step: who has one loaded keeps it.
    """
    import platform  # all of these here: who only asks for the CRC does not wait for them
    import shlex
    import subprocess
    import tempfile

    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"it is for Linux on x86-64, and this is {sys.platform} on {platform.machine()}"
    compiler = _find_compiler()
    if compiler is None:
        return "there is no C compiler (cc, gcc or clang; CC names another)"
    try:
        library = get_library()
        with tempfile.TemporaryDirectory(dir=_FOLDER, prefix=".build-") as folder:
            built = Path(folder) / library.name
            command = [*compiler, *_FLAGS, "-o", str(built)]
            command += map(str, _list_sources("*.c"))
            done = subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S, check=False)  # noqa: S603
            if done.returncode:
                errors = done.stderr.decode(errors="replace")  # compilers may speak in another encoding than ours
                return f"{shlex.join(command)} failed:\n{errors.strip()}"
            built.replace(library)
        for other in _FOLDER.glob("kernel-*.so"):
            if other != library:
                other.unlink(missing_ok=True)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None


def _list_sources(pattern: str) -> list[Path]:
    return sorted(_FOLDER.glob(pattern))


def _find_compiler() -> list[str] | None:
    import shlex
    import shutil

    try:
        chosen = shlex.split(os.environ.get("CC", ""))
    except ValueError:  # a quote that is not closed
        chosen = []
    for command in (chosen, ["cc"], ["gcc"], ["clang"]):
        if command and shutil.which(command[0]):
            return command
    return None
