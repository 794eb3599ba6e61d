"""The compiled kernel says what Python says, in wide registers and narrow ones, and is used only if it can be trusted.

That everything built on it does the same with it and without: the modules that use the fixture `engine`.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accel_fsdp_tools import kernel
from accel_fsdp_tools.export.casting import cast_block
from accel_fsdp_tools.kernel import CRC_READ, CRC_WRITTEN, READ_AGAIN, SUM_AGAIN, SUM_READ, Kernel, Range, building
from accel_fsdp_tools.weighted_sums import MASK, Sums
from tests.engines import forget, use_engine

BLOCK = 1 << 18  # bytes under one multiplier


@pytest.fixture(scope="module", params=[512, 256])
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """The kernel in a copy of its own, since the choice of registers is the library's."""
    with use_engine("kernel"), pytest.MonkeyPatch.context() as patch:
        copy = tmp_path_factory.mktemp("library") / "kernel.so"
        shutil.copy(building.get_library(), copy)
        patch.setattr(kernel, "get_library", lambda: copy)
        found, problem = kernel._load(is_narrow=request.param == 256)
        assert found is not None, problem
        if found.num_bits != request.param:
            pytest.skip(f"the processor has no registers of {request.param} bits")
        yield found


def make_bytes(size: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def sum_in_python(position: int, data: np.ndarray[Any, np.dtype[np.uint8]]) -> tuple[int, int]:
    with use_engine("python"):
        sums = Sums()
        sums.add_run(position, data)
        return sums.total & MASK, sums.weighted & MASK


@pytest.mark.parametrize("size", [0, 1, 7, 8, 15, 63, 64, 65, 255, 256, 511, 512, 513, 4097, 100_003])
def test_crcs_of_any_size_and_alignment(library: Kernel, size: int) -> None:
    data = make_bytes(size + 3)
    for skip in range(3):
        block = data[skip : skip + size]
        for before in (0, 1, 0xFFFFFFFF, zlib.crc32(b"before")):
            found = library.compute_crc32(block.ctypes.data, size, before)
            assert found == zlib.crc32(block.tobytes(), before)
            assert library.combine_crc32(before, zlib.crc32(block.tobytes()), size) == found


@pytest.mark.parametrize(
    ("position", "size"),
    [
        *((position, size) for position in (0, 1, 5, 8) for size in (1, 7, 8, 9, 60, 1000)),
        (BLOCK - 4, 8),  # a word on either side
        (BLOCK - 24, 48),
        (3, BLOCK),  # no block whole
        (0, BLOCK),
        (0, 5 * BLOCK),  # a group and one
        (BLOCK // 2, 2 * BLOCK + 40),  # ends before the place where it starts, and after it
        (BLOCK - 80, 3 * BLOCK + 77),
        ((1 << 40) + 8 * 77, 4 * BLOCK + 3),
    ],
)
def test_sums_are_those_of_numpy(library: Kernel, position: int, size: int) -> None:
    data = make_bytes(size + 1, seed=position % 97)
    for skip in (0, 1):
        block = data[skip : skip + size]
        assert library.compute_sums(position, block.ctypes.data, size) == sum_in_python(position, block)


def test_sums_of_random_runs(library: Kernel) -> None:
    data = make_bytes(6 * BLOCK)
    random = np.random.default_rng(3)
    for _ in range(40):
        position, start, size = (int(random.integers(limit)) for limit in (1 << 45, BLOCK, 5 * BLOCK))
        block = data[start : start + size]
        assert library.compute_sums(position, block.ctypes.data, size) == sum_in_python(position, block)


@pytest.mark.parametrize("length", [1, 2, 4, 6, 8, 12, 64, 100, 4096])
def test_sums_of_rows_are_those_of_numpy(library: Kernel, length: int) -> None:
    unit = max(unit for unit in (1, 2, 4) if length % unit == 0)
    data = make_bytes(50 * length, seed=length).reshape(50, length)
    steps = np.random.default_rng(length).integers(length, BLOCK // 3, 50) // unit * unit + unit * (length // unit)
    positions = np.cumsum(steps)
    with use_engine("python"):
        sums = Sums()
        sums.add_rows(positions, data, unit)
    found = library.compute_row_sums(positions.ctypes.data, 50, data.ctypes.data, length)
    assert found == (sums.total & MASK, sums.weighted & MASK)


@pytest.mark.parametrize("count", [0, 1, 15, 16, 4095, 4096, 4097, 300_000])
def test_casts_are_those_of_python(library: Kernel, count: int) -> None:
    values = np.random.default_rng(count).integers(0, 1 << 32, count, dtype=np.uint32)
    edges = np.array([0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0xFFFFFFFF, 0x3F808000, 1], np.uint32)
    values[: len(edges)] = edges[:count]
    for (source, target), number in kernel.CASTS.items():
        bits = values if source == "float32" else values.astype(np.uint16)
        found, expected = (np.empty(count, {"float32": np.uint32, "bfloat16": np.uint16}[target]) for _ in range(2))
        num_overflowed = library.cast(number, bits.ctypes.data, found.ctypes.data, count)
        with use_engine("python"):
            counts = cast_block(memoryview(bits).cast("B"), source, target, memoryview(expected).cast("B"))
        assert (found.tobytes(), num_overflowed) == (expected.tobytes(), counts.num_overflowed)


UNDEFINED = """
import numpy as np
from pathlib import Path
from accel_fsdp_tools import kernel

kernel.get_library = lambda: Path(LIBRARY)
found, problem = kernel._load(is_narrow=IS_NARROW)
assert found is not None, problem
data = np.random.default_rng(5).integers(0, 256, 2_500_000, dtype=np.uint8)
out = np.empty_like(data)
for skip, size in [(0, 100_000), (1, 300), (3, 2_400_001), (0, 0)]:
    found.compute_sums(5 + skip, data.ctypes.data + skip, size)
    found.compute_crc32(data.ctypes.data + skip, size, 7)
    for cast in kernel.CASTS.values():
        found.cast(cast, data.ctypes.data + skip, out.ctypes.data + skip, size // 4)
"""


@pytest.mark.parametrize("is_narrow", [False, True])
def test_nothing_that_it_does_is_undefined(tmp_path: Path, is_narrow: bool) -> None:
    """Compiled so that the process ends where the language does not say what happens."""
    compiler = shutil.which("gcc") or shutil.which("clang")
    if compiler is None or kernel.find_kernel() is None:
        pytest.skip("there is no compiler with a sanitizer, or no kernel for this processor")
    flags = ["-O1", "-shared", "-fPIC", "-fsanitize=undefined", "-fsanitize-undefined-trap-on-error"]
    library = tmp_path / "kernel.so"
    sources = map(str, building._list_sources("*.c"))
    subprocess.run([compiler, *flags, "-o", str(library), *sources], check=True, timeout=120)
    script = UNDEFINED.replace("LIBRARY", repr(str(library))).replace("IS_NARROW", repr(is_narrow))
    root = Path(kernel.__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, timeout=120, check=False)
    assert done.returncode == 0


class Copied:
    """One call of `copy`, of float32 elements from an odd place to an odd place; the file is read over a hole."""

    def __init__(self, library: Kernel, folder: Path, values: bytes, what: int, **changes: Any) -> None:
        self.source, self.target = folder / "source", folder / "target"
        self.source.write_bytes(b"odd" + values)
        self.target.write_bytes(b"start")
        os.truncate(self.target, 5 + 4 * len(values))
        self.buffer, self.cast = (ctypes.create_string_buffer(1 << 12) for _ in range(2))
        source, target = os.open(self.source, os.O_RDONLY), os.open(self.target, os.O_RDWR)
        sizes = {
            "count": len(values) // 4,
            "source_size": 4,
            "target_size": 4,
            "buffer_size": 1 << 12,
            "block": 1 << 12,
        }
        places = {"source_offset": 3, "target_offset": 5, "again_offset": 5, "start": 1000, "sum_start": 7}
        given = {**sizes, **places, "what": what, "source": source, "target": target, "again": target, **changes}
        self.range = Range(buffer=ctypes.addressof(self.buffer), cast_buffer=ctypes.addressof(self.cast), **given)
        self.is_done = library.copy(self.range)
        os.close(source)
        os.close(target)


def test_a_copy_and_what_it_finds(library: Kernel, tmp_path: Path) -> None:
    values = make_bytes(40_000).tobytes()
    copied = Copied(library, tmp_path, values, CRC_READ | SUM_READ | READ_AGAIN | SUM_AGAIN)
    assert copied.is_done
    assert copied.target.read_bytes()[:40_005] == b"start" + values
    found, sums = copied.range, sum_in_python(4000, np.frombuffer(values, np.uint8))
    assert found.crc_read == zlib.crc32(values)
    sums_read = sum_in_python(28, np.frombuffer(values, np.uint8))
    assert (found.sums_read.total, found.sums_read.weighted) == sums_read
    assert (found.sums_again.total, found.sums_again.weighted) == sums
    again = Copied(library, tmp_path, values, READ_AGAIN).range
    assert (again.crc_again, again.crc_read, again.sums_again.total) == (zlib.crc32(values), 0, 0)


def test_a_copy_with_a_cast(library: Kernel, tmp_path: Path) -> None:
    values = np.random.default_rng(1).standard_normal(10_000).astype(np.float32)
    values[17], values[9_000] = 3.4e38, np.inf
    expected = bytearray(20_000)
    counts = cast_block(memoryview(values).cast("B"), "float32", "bfloat16", memoryview(expected))
    copied = Copied(library, tmp_path, values.tobytes(), CRC_WRITTEN | READ_AGAIN | SUM_AGAIN, cast=1, target_size=2)
    assert copied.is_done
    assert copied.target.read_bytes()[5:20_005] == expected
    found = copied.range
    assert (found.crc_written, found.num_overflowed, counts.num_overflowed) == (zlib.crc32(expected), 1, 1)
    again = (found.sums_again.total, found.sums_again.weighted)
    assert again == sum_in_python(2000, np.frombuffer(expected, np.uint8))


@pytest.mark.parametrize(
    "what", ["source ends", "no source", "not to be written", "not to be read", "small", "no room"]
)
def test_a_copy_that_fails_says_so(library: Kernel, tmp_path: Path, what: str) -> None:
    changes = {
        "source ends": {"count": 251},
        "no source": {"source": 9999},
        "not to be written": {"target": os.open(os.devnull, os.O_RDONLY)},
        "not to be read": {"again_offset": 1 << 40},
        "small": {"buffer_size": 100},
        "no room": {"block": 3},
    }
    copied = Copied(library, tmp_path, make_bytes(1000).tobytes(), READ_AGAIN, **changes[what])
    assert not copied.is_done


def test_zeros_are_not_written(library: Kernel, tmp_path: Path) -> None:
    values = make_bytes(4096).tobytes() + bytes(8192) + b"\1" * 100
    copied = Copied(library, tmp_path, values, READ_AGAIN, target_offset=4096, again_offset=4096)
    assert copied.is_done
    assert copied.target.read_bytes()[4096 : 4096 + len(values)] == values
    copied = Copied(library, tmp_path, bytes(9000), READ_AGAIN, target=os.open(os.devnull, os.O_RDONLY))
    assert copied.is_done  # nothing had to be written


def test_it_is_not_used_where_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with use_engine("python"):
        assert kernel.find_kernel() is None
        assert kernel.VARIABLE in kernel.describe_kernel()[1]


@pytest.mark.parametrize("what", ["missing", "no library", "another library", "old processor", "wrong", "wrong sums"])
def test_it_is_not_used_if_it_cannot_be_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    with use_engine("kernel"):
        copy = tmp_path / "kernel.so"
        if what == "no library":
            copy.write_bytes(b"no library")
        elif what != "missing":
            shutil.copy(building.get_library(), copy)
        if what == "wrong":
            monkeypatch.setattr(Kernel, "combine_crc32", lambda *_: 1)
        if what == "wrong sums":
            monkeypatch.setattr(Kernel, "compute_sums", lambda *_: (1, 1))
        if what == "old processor":
            monkeypatch.setattr(kernel, "_declare", lambda library: setattr(library, "kernel_prepare", lambda _: 0))
        if what == "another library":
            copy = Path("libc.so.6")
        monkeypatch.setattr(kernel, "get_library", lambda: copy)
        forget()
        assert kernel.find_kernel() is None
        expected = {
            "old processor": "the processor has no",
            **dict.fromkeys(("wrong", "wrong sums"), "its checksums are wrong"),
        }
        assert expected.get(what, "no compiled kernel") in kernel.describe_kernel()[1]


@pytest.mark.parametrize("compiler", ["other", "no words", "false", "strange", "missing"])
def test_it_is_compiled_by_what_there_is(tmp_path: Path, compiler: str) -> None:
    """In a copy of its folder, as the build hook loads it, with nothing of the package."""
    if not (shutil.which("cc") or shutil.which("gcc")):
        pytest.skip("there is no C compiler")
    folder = tmp_path / "kernel"
    shutil.copytree(Path(building.__file__).parent, folder, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    environment = {name: value for name, value in os.environ.items() if name != "CC"}
    strange = tmp_path / "strange"  # its messages are in no encoding of ours
    strange.write_text("#!/bin/sh\nprintf 'failed \\377\\n' >&2\nexit 1\n")
    strange.chmod(0o755)
    environment |= {
        "other": {"CC": "no-such-compiler -O9"},  # it is not there: the usual ones are tried
        "no words": {"CC": "gcc 'not closed"},
        "false": {"CC": "false"},
        "strange": {"CC": str(strange)},
        "missing": {"PATH": str(tmp_path)},
    }[compiler]
    command = [sys.executable, "-c", "import building; print(building.build_kernel())"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=True)
    is_there = compiler in ("other", "no words")
    assert len(list(folder.glob("kernel-*.so"))) == is_there
    expected = {"false": "failed", "strange": "failed", "missing": "no C compiler"}.get(compiler, "None")
    assert expected in done.stdout
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


def test_a_command_compiles_it_where_it_is_missing(tmp_path: Path) -> None:
    """In a clone that is not installed: nothing there, then there, then changed, then left out."""
    if not (shutil.which("cc") or shutil.which("gcc")):
        pytest.skip("there is no C compiler")
    package = Path(kernel.__file__).parent.parent
    folder = tmp_path / package.name / "kernel"
    shutil.copytree(package / "kernel", folder, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    (tmp_path / package.name / "__init__.py").touch()

    def run(*arguments: str, **variables: str) -> tuple[int, str]:
        command = [sys.executable, "-m", f"{package.name}.kernel", *arguments]
        environment = {**os.environ, kernel.VARIABLE: "", **variables}
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        return done.returncode, done.stdout + done.stderr

    def find() -> list[tuple[str, int]]:
        return [(path.name, path.stat().st_mtime_ns) for path in folder.glob("*.so")]

    code, output = run(CC="false")
    assert (code, find()) == (1, [])
    assert "was not compiled" in output
    code, output = run()
    assert (code, "is in use" in output) == (0, True), output
    (first,) = find()
    assert run()[0] == 0
    assert find() == [first]
    assert run("--rebuild")[0] == 0
    ((name, when),) = find()
    assert (name, when > first[1]) == (first[0], True)
    with (folder / "crc.c").open("a") as source:
        source.write("/* changed */")
    assert run()[0] == 0
    (second,) = find()
    assert second[0] != first[0]
    code, output = run(**{kernel.VARIABLE: "off"})
    assert (code, kernel.VARIABLE in output, find()) == (1, True, [second])
