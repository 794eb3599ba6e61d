"""The command line: flags, exit codes, what is printed where, and how fast it starts."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_fsdp_tools.cli import main as cli
from accel_fsdp_tools.cli import tables
from accel_fsdp_tools.cli.main import build_parser, main
from accel_fsdp_tools.cli.progress import ByteProgress
from accel_fsdp_tools.findings import Finding, Severity, VerifyReport
from accel_fsdp_tools.formats.zips import open_torch_zip, open_window

ROOT = Path(__file__).parent.parent

FLAGS = {
    "verify": {
        "path": "PATH",
        "--scan": None,
        "--fingerprints": None,
        "--no-crc": None,
        "--allow-object": "NAME",
        "--threads": "N",
        "--json": None,
        "--quiet": None,
        "--help": None,
    },
    "export": {
        "path": "CKPT",
        "out": "OUT",
        "--dtype": None,
        "--max-shard-size": "SIZE",
        "--model": "DIR",
        "--model-index": "N",
        "--key": "KEY",
        "--state": None,
        "--base": "DIR",
        "--only": "PATTERN",
        "--adapter": "NAME",
        "--merge-adapter": "BASE",
        "--untie": None,
        "--allow-missing": None,
        "--allow-unexpected": None,
        "--trust-remote-code": None,
        "--overwrite": None,
        "--verify": None,
        "--dry-run": None,
        "--report": None,
        "--threads": "N",
        "--json": None,
        "--quiet": None,
        "--help": None,
    },
    "list": {"root": "ROOT", "--check": None, "--max-resumes": "N", "--json": None, "--help": None},
    "prune": {
        "root": "ROOT",
        "--keep-last": "N",
        "--keep-every": "K",
        "--keep-best": "METRIC:MODE[:N]",
        "--keep-every-hours": "T",
        "--dry-run": None,
        "--json": None,
        "--help": None,
    },
    "pin": {"path": "PATH", "--undo": None, "--help": None},
    "health": {
        "root": "RUN_DIR",
        "--max-age": "SECONDS",
        "--max-phase-age": "SECONDS",
        "--startup-grace": "SECONDS",
        "--this-host": None,
        "--exit-as-run": None,
        "--json": None,
        "--help": None,
    },
    "rehearse": {
        "--steps": "N",
        "--kill-at": "N",
        "--save-at": "N",
        "--kill-rank": "RANK",
        "--elastic": "N:M",
        "--elastic-args": "ARGS",
        "--tolerance": "X",
        "--timeout": "SECONDS",
        "--html": "FILE",
        "--json": None,
        "--dir": "DIR",
        "--keep": None,
        "command": "-- COMMAND",
        "--help": None,
    },
    "supervise": {"root": "RUN_DIR", "command": "COMMAND", "--grace": "SECONDS", "--help": None},
}
"""Every command's flags and the names of their values. People's scripts use them: add, don't change."""


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good"
    path.mkdir()
    torch.save({"weight": torch.arange(1000.0)}, path / "pytorch_model.bin")
    return path


@pytest.fixture
def bad(good: Path, tmp_path: Path) -> Path:
    path = tmp_path / "bad"
    shutil.copytree(good, path)
    file = path / "pytorch_model.bin"
    with open_window(file) as window:
        offset = open_torch_zip(window).locate("data/0").offset
    data = bytearray(file.read_bytes())
    data[offset + 77] ^= 1
    file.write_bytes(data)
    return path


def test_flags_are_frozen() -> None:
    parser = build_parser()
    (commands,) = (action for action in parser._actions if action.choices and not action.option_strings)
    found: dict[str, dict[str, Any]] = {}
    for name, command in dict(commands.choices or {}).items():  # type: ignore[call-overload]
        found[name] = {
            max(action.option_strings, key=len, default=action.dest): action.metavar for action in command._actions
        }
    assert found == FLAGS
    assert set(cli.COMMANDS) == set(FLAGS)


def test_exit_codes(good: Path, bad: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(good)]) == 0
    assert main(["verify", str(bad)]) == 3
    for wrong in (
        [],
        ["nonsense"],
        ["verify"],
        ["verify", str(good), "--nonsense"],
        ["verify", str(good), "--threads", "0"],
        ["verify", str(tmp_path / "nothing")],
        ["verify", str(tmp_path)],
    ):
        assert main(wrong) == 2, wrong
    assert "holds 2 checkpoints; name one of them: bad, good" in capsys.readouterr().err
    assert main(["--help"]) == main(["verify", "--help"]) == main(["--version"]) == 0


def test_errors_are_one_line_and_bugs_keep_their_traceback(
    good: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from accel_fsdp_tools import verify

    def fail(error: BaseException) -> None:
        def raise_it(*args: Any, **kwargs: Any) -> None:
            raise error

        monkeypatch.setattr(verify, "verify_checkpoint", raise_it)

    fail(OSError(5, "Input/output error"))
    assert main(["verify", str(good)]) == 1
    assert capsys.readouterr().err == "error: [Errno 5] Input/output error\n"
    fail(KeyboardInterrupt())
    assert main(["verify", str(good)]) == 130
    fail(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        main(["verify", str(good)])


def test_output_for_people(good: Path, bad: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["verify", str(bad)])
    out, err = capsys.readouterr()
    assert err == "", "no progress in a log of a second"
    lines = out.splitlines()
    assert lines[0] == str(bad)
    assert lines[-1].startswith("DIFFERENT: this is not what was saved (1 failure, ")
    assert any(line.startswith("failure  crc ") and "pytorch_model.bin  weight" in line for line in lines)
    assert max(map(len, lines[1:])) <= 100
    main(["verify", "--quiet", str(bad)])
    out = capsys.readouterr().out
    assert "failure  crc" in out
    assert "no_manifest" not in out
    assert main(["verify", "--quiet", str(good)]) == 0
    assert capsys.readouterr() == ("", "")


def test_output_for_machines(bad: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--json", "--scan", "--threads", "1", str(bad)]) == 3
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    assert report["mode"] == "offline: structure, crcs, values"
    (failure,) = (each for each in report["findings"] if each["severity"] == "failure")
    assert (failure["code"], failure["path"], failure["fqn"]) == ("crc", "pytorch_model.bin", "weight")
    assert main(["verify", "--json", "--no-crc", str(bad)]) == 0


def test_a_class_can_be_allowed(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(Finding("x", Severity.NOTE, "y"), good / "custom_checkpoint_0.pkl")
    assert main(["verify", str(good)]) == 3
    assert "unsafe_pickle" in capsys.readouterr().out
    names = [f"accel_fsdp_tools.findings.{name}" for name in ("Finding", "Severity")]
    main(["verify", str(good), *(part for name in names for part in ("--allow-object", name))])
    assert "unsafe_pickle" not in capsys.readouterr().out


def test_a_long_table_is_aligned() -> None:
    findings = tuple(
        Finding(code, severity, f"{'word ' * 40}/a/path/{'x' * 120}", fqn="layers.0.weight", path="file", rank=3)
        for code, severity in (("crc", Severity.FAILURE), ("a_long_code", Severity.NOTE))
    )
    report = VerifyReport("/c", "offline", findings, {"files": 1, "bytes": 3_000_000_000}, 1.0, omitted=7)
    lines = tables.format_report(report).splitlines()
    assert "3.00 GB in 1.00 s (3.00 GB/s)" in lines[2]
    starts = [line.index("file  layers.0.weight  rank 3") for line in lines if "layers.0.weight" in line]
    assert len(starts) == 2
    assert len(set(starts)) == 1
    assert all(line.startswith(" " * starts[0]) for line in lines if line.strip().startswith("word"))
    assert "... and 7 more failure(s) of the kinds above" in lines
    assert lines[-1].endswith("(8 failures, 1 note)")


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_a_bar_on_a_terminal_and_lines_in_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    for stream in (_Terminal(), io.StringIO()):
        with ByteProgress(stream, "verify") as progress:
            for _ in range(50):
                now += 0.5
                progress(int(now * 1e9), 100_000_000_000)
            progress(int(now * 1e9), 100_000_000_000)  # too soon for another
        text = stream.getvalue()
        if stream.isatty():
            assert "\r" in text
            assert "verify [####" in text
            assert text.endswith(" \r"), "it is wiped at the end"
        else:
            assert text.startswith("verify: ")
            assert 2 <= len(text.splitlines()) <= 3
            assert "\r" not in text


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_modules_run_without_a_warning(good: Path) -> None:
    for name in ("accel_fsdp_tools.verify", "accel_fsdp_tools.cli"):
        command = [] if name.endswith("verify") else ["verify"]
        result = _run(name, *command, str(good))
        assert (result.returncode, result.stderr) == (0, ""), result
        assert "OK: nothing differs" in result.stdout
        assert (
            f"usage: {'python -m accel_fsdp_tools.verify' if not command else 'accel-fsdp verify'}"
            in _run(name, *command, "--help").stdout
        )


def test_a_reader_that_stops_reading_is_no_error(good: Path) -> None:
    result = subprocess.run(
        f"{sys.executable} -m accel_fsdp_tools.verify {good} | true",
        shell=True,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.stderr == ""


def _read_childrens_cpu_s() -> float:
    """Of those that have ended: other than a clock, it does not count what else the machine does."""
    times = os.times()
    return times.children_user + times.children_system


def test_help_starts_fast_and_without_heavy_imports() -> None:
    code = (
        "import sys\n"
        "from accel_fsdp_tools.cli.main import main\n"
        "main(['--help'])\n"
        "heavy = {'torch', 'numpy', 'accelerate', 'rich', 'typer', 'xxhash'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    seconds = []
    for _ in range(5):
        begin = _read_childrens_cpu_s()
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True, timeout=60)
        seconds.append(_read_childrens_cpu_s() - begin)
    assert 0 < min(seconds) < 0.3, seconds
