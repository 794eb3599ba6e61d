"""What lies in a root: states, the choice of a resume, records, quarantine, and the commands on top; no training."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
import uuid
from pathlib import Path
from typing import Any

import pytest

from accel_fsdp_tools import latest_checkpoint, records
from accel_fsdp_tools.cli.list import format_age, format_size
from accel_fsdp_tools.cli.main import main
from accel_fsdp_tools.commit import PARTIAL, find_checkpoints, open_staging
from accel_fsdp_tools.errors import CheckpointNotFoundError, ManifestVersionError, StorageError, UsageError
from accel_fsdp_tools.keeping import prune_root
from accel_fsdp_tools.manifest import MANIFEST_PATH, Lineage, read_manifest
from accel_fsdp_tools.ownership import RootLock
from accel_fsdp_tools.quarantine import QUARANTINE, list_set_aside, set_aside
from accel_fsdp_tools.records import CHECKSUMS, RECORDS, SIZES, Record, read_record
from accel_fsdp_tools.retention import KeepLast
from accel_fsdp_tools.survey import State, choose_newest, is_own, list_candidates, list_facts, survey_root
from tests.checkpoints import save_with_accelerate
from tests.harness import run_ranks
from tests.manifests import edit_manifest, make_checkpoint
from tests.training import Setup


def _add(root: Path, step: int, *, verified: bool = True, attempt: int = 1, **extra: Any) -> Path:
    path = make_checkpoint(root / f"step_{step:08d}", step=step, attempt=attempt)
    edit_manifest(path, lambda raw: raw.update(extra))
    if verified:
        records.record_verified(root, _get_id(path), name=path.name, how=CHECKSUMS)
    return path


def _get_id(path: Path) -> str:
    return read_manifest(path).lineage.checkpoint_id


def _spoil(path: Path) -> None:
    (path / "random_states_0.pkl").write_bytes(b"y" * 10)


def _cut(path: Path) -> None:
    (path / "random_states_0.pkl").write_bytes(b"x")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Five of ours in two branches, one damaged; a partial one, a quarantined one, foreign ones, and something else."""
    root = tmp_path / "root"
    for step in (100, 200, 300):
        _add(root, step, extra={"metrics": {"loss": 1 / step, "odd": "nan", "word": "x"}})
    _add(root, 150, attempt=2)
    _cut(_add(root, 250, attempt=2))
    (open_staging(root / "step_00000350", "r").partial / "file").write_bytes(b"123")
    _add(root, 50)
    set_aside(root, "step_00000050", reason="a bit is wrong", run_id="r")
    make_checkpoint(root / "best", step=100, attempt=0)
    (root / "checkpoint_7" / "pytorch_model_fsdp_0").mkdir(parents=True)
    (root / "step_00000400").mkdir()
    (root / "notes").mkdir()
    for number, path in enumerate(sorted(root.iterdir())):
        os.utime(path, (1e9 - 1000 * number, 1e9 - 1000 * number))  # time stamps say nothing
    return root


# -- what there is --------------------------------------------------------------------------------------------------


def test_survey(root: Path) -> None:
    entries = survey_root(root)
    assert [(each.name, each.state, each.step) for each in entries] == [
        ("step_00000250", State.DAMAGED, 250),
        ("step_00000150", State.COMMITTED, 150),
        ("step_00000300", State.COMMITTED, 300),
        ("step_00000200", State.COMMITTED, 200),
        ("step_00000100", State.COMMITTED, 100),
        ("best", State.COMMITTED, 100),
        ("checkpoint_7", State.FOREIGN, None),
        ("step_00000400", State.FOREIGN, None),
        ("step_00000350", State.PARTIAL, None),
        ("step_00000050", State.QUARANTINED, None),
    ]
    by_name = {each.name: each for each in entries}
    assert "random_states_0.pkl is damaged" in str(by_name["step_00000250"].problem)
    assert by_name["step_00000050"].problem == "a bit is wrong"
    assert by_name["step_00000350"].size_bytes == 3
    first = by_name["step_00000200"]
    assert first.metrics["loss"] == 1 / 200
    assert set(first.metrics) == {"loss", "odd"}, "what is no number is left out"
    assert first.created_at == 1767225600.0
    assert (first.is_verified, by_name["best"].is_verified) == (True, False)


def test_the_choice_follows_the_lineage(root: Path) -> None:
    chosen, skipped = choose_newest(root)
    assert chosen is not None
    assert chosen.name == "step_00000150", "of the latest attempt, the newest that is whole"
    assert {each.name for each in skipped} == {"step_00000250", "step_00000400", "checkpoint_7"}
    assert {each.name for each in skipped if each.is_own} == {"step_00000250"}
    candidates, _ = list_candidates(root)
    assert [each.manifest.step for each in candidates] == [250, 150, 300, 200, 100, 100]


def test_a_newer_version_is_no_damage(root: Path) -> None:
    path = root / "step_00000300" / MANIFEST_PATH
    path.write_text(re.sub(r'"version": \d+', '"version": 99', path.read_text(), count=1))
    for choose in (choose_newest, list_candidates):
        with pytest.raises(ManifestVersionError, match="Upgrade"):
            choose(root)


def test_a_checkpoint_without_its_manifest_is_known_by_what_is_left(root: Path) -> None:
    (root / "step_00000150" / MANIFEST_PATH).unlink()
    chosen, skipped = choose_newest(root)
    assert chosen is not None
    assert chosen.name == "step_00000300"
    assert [each.is_own for each in skipped if each.name == "step_00000150"] == [True]
    assert [each.state for each in survey_root(root) if each.name == "step_00000150"] == [State.DAMAGED]


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("step_00000500", True),
        ("step_123456789", True),
        ("step_500", False),
        ("step_00000500_keep", False),
        ("step_0000050x", False),
        ("step_-0000500", False),
        ("step_" + "\u0660" * 8, False),
        ("checkpoint-500", True),  # the Trainer's, if it was this package that wrote the manifest
        ("checkpoint-500-merged", False),
        ("checkpoint_500", False),
    ],
)
def test_own_names(name: str, own: bool) -> None:
    assert is_own(name, None) == own


# -- records --------------------------------------------------------------------------------------------------------


def test_records(tmp_path: Path) -> None:
    assert read_record(tmp_path, "a") == Record()
    records.record_verified(tmp_path, "a", name="x", how=SIZES)
    records.pin(tmp_path, "a", name="x")
    assert [records.count_resume(tmp_path, "a", name="x") for _ in range(3)] == [1, 2, 3]
    records.take_back_resume(tmp_path, "a", name="x")
    assert read_record(tmp_path, "a") == Record(SIZES, True, 2)
    assert read_record(tmp_path, "b") == Record()
    records.unpin(tmp_path, "a")
    records.clear_resumes(tmp_path, "a")
    assert read_record(tmp_path, "a") == Record(SIZES)
    records.forget(tmp_path, "a")
    records.forget(tmp_path, "a")
    assert list((tmp_path / RECORDS).iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b'{"how": 3, "count": "x"}', b"[" * 100_000, b"\xff"])
def test_a_damaged_record_is_not_known(tmp_path: Path, content: bytes) -> None:
    (tmp_path / RECORDS).mkdir()
    for kind in ("verified", "resumed"):
        (tmp_path / RECORDS / f"a.{kind}.json").write_bytes(content)
    assert read_record(tmp_path, "a") == Record()


def test_an_id_from_a_manifest_is_no_path(tmp_path: Path) -> None:
    root = tmp_path / "root"
    for checkpoint_id in ("../x", "", "a/b", "x" * 65):
        records.pin(root, checkpoint_id, name="x")
        records.forget(root, checkpoint_id)
        assert read_record(root, checkpoint_id) == Record()
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_takes_anothers_name_inherits_nothing(tmp_path: Path) -> None:
    path = _add(tmp_path, 1)
    records.pin(tmp_path, _get_id(path), name=path.name)
    shutil.rmtree(path)
    _add(tmp_path, 1, verified=False)
    (facts,) = list_facts(tmp_path)
    assert (facts.is_verified, facts.is_pinned) == (False, False)


# -- quarantine -----------------------------------------------------------------------------------------------------


def test_quarantine_keeps_what_it_gets(tmp_path: Path) -> None:
    for reason in ("first", "second", "third"):
        path = _add(tmp_path, 1)
        moved = set_aside(tmp_path, path.name, reason=reason, run_id="r")
        assert moved is not None
        assert read_manifest(moved).step == 1
    assert [(each.path.name, each.reason) for each in list_set_aside(tmp_path)] == [
        ("step_00000001", "first"),
        ("step_00000001.2", "second"),
        ("step_00000001.3", "third"),
    ]
    assert set_aside(tmp_path, "step_00000001", reason="gone", run_id="r") is None
    (tmp_path / QUARANTINE / "step_00000001.reason.json").unlink()
    assert list_set_aside(tmp_path)[0].reason == "the reason is not recorded"
    assert find_checkpoints(tmp_path) == []


def test_a_quarantine_that_cannot_be_made_says_so(tmp_path: Path) -> None:
    path = _add(tmp_path, 1)
    (tmp_path / QUARANTINE).touch()
    with pytest.raises(StorageError, match="cannot be moved"):
        set_aside(tmp_path, path.name, reason="x", run_id="r")
    assert path.is_dir()


# -- prune ----------------------------------------------------------------------------------------------------------


def _names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.name.startswith("step_"))


def test_pruning_spares_what_it_does_not_know_for_good(root: Path) -> None:
    before = sorted(path.name for path in root.iterdir())
    gone = prune_root(root, KeepLast(2), trust="checksums", run_id="p")
    assert [path.name for path in gone] == ["step_00000100", "step_00000200", "step_00000300"]
    assert sorted(path.name for path in root.iterdir()) == [
        name for name in before if name not in {path.name for path in gone}
    ]
    assert not any((root / RECORDS).glob("*.deleted"))
    assert [path.name for path in (root / PARTIAL).iterdir()] == ["r"], "the run's own partial save is left alone"


def test_trust(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        path = _add(tmp_path, step, verified=False)
    records.record_verified(tmp_path, _get_id(path), name=path.name, how=SIZES)
    for trust, expected in (("checksums", []), ("sizes", [3]), ("all", [1, 2, 3])):
        assert [each.step for each in list_facts(tmp_path, trust=trust) if each.is_verified] == expected
    newest = _get_id(path)
    assert [each.is_verified for each in list_facts(tmp_path, verified_ids=[newest])] == [False, False, True]


def _prune(root: str, barrier: Any, failures: Any) -> None:
    barrier.wait()
    try:
        prune_root(Path(root), KeepLast(1), trust="all", run_id=f"p{uuid.uuid4().hex}")
    except BaseException as error:
        failures.put(repr(error))
        raise


def test_several_processes_prune_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    for _ in range(3):
        for step in range(1, 25):
            if not (tmp_path / f"step_{step:08d}").exists():
                _add(tmp_path, step)
        barrier, failures = context.Barrier(4), context.Queue()
        processes = [context.Process(target=_prune, args=(str(tmp_path), barrier, failures)) for _ in range(4)]
        for each in processes:
            each.start()
        for each in processes:
            each.join(60)
        assert [each.exitcode for each in processes] == [0] * 4, failures.get(timeout=1)
        assert _names(tmp_path) == ["step_00000024"]
        assert not (tmp_path / PARTIAL).exists()


# -- commands -------------------------------------------------------------------------------------------------------


def test_list(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", str(root)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    (chosen,) = (line for line in out.splitlines() if line.startswith("*"))
    assert chosen.split()[:3] == ["*", "step_00000150", "150"]
    assert "resume would choose step_00000150: step 150 of attempt 2, the newest along the lineage" in out
    assert "step_00000300, step_00000200 belong(s) to an earlier attempt" in out
    assert "step_00000050: a bit is wrong" in out
    assert re.search(r"step_00000300 +300 .* committed +yes +loss 0.003333", out)
    assert len({line.index("committed") for line in out.splitlines() if " committed " in line}) == 1


def test_list_for_machines(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records.pin(root, _get_id(root / "step_00000100"), name="x")
    for _ in range(2):
        records.count_resume(root, _get_id(root / "step_00000150"), name="x")
    assert main(["list", "--json", str(root)]) == 0
    value = json.loads(capsys.readouterr().out)
    by_name = {each["name"]: each for each in value["checkpoints"]}
    assert by_name["step_00000100"]["pinned"] is True
    assert by_name["step_00000150"]["num_resumes"] == 2
    assert by_name["step_00000050"]["state"] == "quarantined"
    assert value["resume"]["name"] == "step_00000150"
    assert main(["list", "--json", "--max-resumes", "2", str(root)]) == 0
    resume = json.loads(capsys.readouterr().out)["resume"]
    assert resume["name"] == "step_00000300"
    assert any("2 run(s) began with it" in each for each in resume["skipped"])


def test_list_reads_files_only_when_asked(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _spoil(root / "step_00000150")
    assert main(["list", str(root)]) == 0
    assert "would choose step_00000150" in capsys.readouterr().out
    before = sorted(str(path) for path in root.rglob("*"))
    assert main(["list", "--check", str(root)]) == 3
    out = capsys.readouterr().out
    assert "would choose step_00000300" in out
    assert re.search(r"step_00000150 +150 .* damaged", out)
    assert sorted(str(path) for path in root.rglob("*")) == before, "it changes nothing"


def test_list_of_little(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", str(tmp_path)]) == 0
    assert "there are no checkpoints: a run starts anew" in capsys.readouterr().out
    _cut(_add(tmp_path, 1))
    assert main(["list", str(tmp_path)]) == 0
    assert "nothing here can be resumed" in capsys.readouterr().out
    for wrong in (["list", str(tmp_path / "none")], ["list"], ["list", "--max-resumes", "0", str(tmp_path)]):
        assert main(wrong) == 2, wrong


def test_units() -> None:
    assert [format_age(seconds) for seconds in (-1, 59, 60, 7200, 200_000)] == ["0 s", "59 s", "1 min", "2 h", "2 d"]
    sizes = [format_size(size) for size in (0, 999, 1000, 5_400_000, 2_000_000_000, 3_100_000_000_000)]
    assert sizes == ["0 B", "999 B", "1.0 kB", "5.4 MB", "2.0 GB", "3.1 TB"]


def test_prune_command(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = _names(root)
    assert main(["prune", str(root), "--keep-last", "2", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "would remove step_00000100" in out
    assert _names(root) == before
    assert main(["prune", str(root), "--keep-last", "2", "--keep-best", "loss:max", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["removed"] == ["step_00000200"]
    assert value["kept"] == ["step_00000100", "step_00000300", "step_00000150", "step_00000250"]
    assert value["removed_bytes"] == 10
    assert (root / "best").is_dir()
    assert main(["prune", str(root), "--keep-last", "2", "--keep-every", "100"]) == 0
    assert "nothing to remove" in capsys.readouterr().out


def test_prune_reads_what_was_never_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in range(1, 6):
        _add(tmp_path, step, verified=False)
    for step in (3, 5):
        _spoil(tmp_path / f"step_{step:08d}")
    assert main(["prune", str(tmp_path), "--keep-last", "2", "--dry-run", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["removed"] == ["step_00000001"]
    assert value["not_verified"] == ["step_00000003", "step_00000005"]
    assert not (tmp_path / RECORDS).exists(), "a dry run changes nothing"
    assert main(["prune", str(tmp_path), "--keep-last", "2"]) == 0
    assert _names(tmp_path) == [f"step_{step:08d}" for step in (2, 3, 4, 5)], "two good ones, and what is newer"
    assert "keeps step_00000005 (damaged)" in capsys.readouterr().out
    assert [each.is_verified for each in list_facts(tmp_path)] == [True, False, True, False]


def test_prune_refuses_while_a_run_holds_the_root(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lock = RootLock(root, "run")
    lock.acquire()
    before = _names(root)
    assert main(["prune", str(root), "--keep-last", "1"]) == 1
    assert "in use by run run" in capsys.readouterr().err
    assert main(["prune", str(root), "--keep-last", "1", "--dry-run"]) == 0
    assert _names(root) == before
    lock.release()
    assert main(["prune", str(root), "--keep-last", "1"]) == 0
    assert _names(root) == ["step_00000150", "step_00000250", "step_00000400"]


def test_prune_needs_rules_that_make_sense(root: Path) -> None:
    before = _names(root)
    for wrong in (
        [],
        ["--keep-last", "0"],
        ["--keep-last", "x"],
        ["--keep-best", "loss"],
        ["--keep-best", "loss:least"],
        ["--keep-best", "loss:min:0"],
        ["--keep-best", ":min"],
        ["--keep-every-hours", "-1"],
    ):
        assert main(["prune", str(root), *wrong]) == 2, wrong
    assert main(["prune", str(root / "none"), "--keep-last", "1"]) == 2
    assert _names(root) == before


def test_pin_command(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = root / "step_00000100"
    assert main(["pin", str(path)]) == 0
    assert capsys.readouterr().out == "pinned step_00000100 (step 100)\n"
    prune_root(root, KeepLast(1), trust="checksums", run_id="p")
    assert path.is_dir()
    assert main(["pin", "--undo", str(path)]) == 0
    prune_root(root, KeepLast(1), trust="checksums", run_id="p")
    assert not path.exists()
    assert main(["pin", str(root / "notes")]) == 1


# -- latest_checkpoint ----------------------------------------------------------------------------------------------


def test_latest_of_ours(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert latest_checkpoint(root) == root / "step_00000150"
    assert "skipped step_00000250" in caplog.text
    assert "random_states_0.pkl is damaged" in caplog.text
    for step in (150, 300, 200, 100):
        _cut(root / f"step_{step:08d}")
    shutil.rmtree(root / "best")
    assert latest_checkpoint(root) is None, "the half written one of others is none"


def test_latest_of_nothing(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path) is None
    assert latest_checkpoint(tmp_path / "none") is None
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointNotFoundError):
        latest_checkpoint(tmp_path / "file")


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of plain Accelerate."""
    folder = tmp_path_factory.mktemp("foreign")
    run_ranks(save_with_accelerate, str(folder), Setup(), [("one", "SHARDED_STATE_DICT", True)], folder=folder / "r")
    return folder / "one"


FAULTS = {
    "empty": lambda path: (shutil.rmtree(path), path.mkdir()),
    "without .metadata": lambda path: (path / "pytorch_model_fsdp_0" / ".metadata").unlink(),
    "without a rank's file": lambda path: (path / "pytorch_model_fsdp_0" / "__1_0.distcp").unlink(),
    "without the optimizer": lambda path: shutil.rmtree(path / "optimizer_0"),
    "without the optimizer's .metadata": lambda path: (path / "optimizer_0" / ".metadata").unlink(),
    "cut off": lambda path: os.truncate(path / "optimizer_0" / "__0_0.distcp", 100),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("below", ["", "checkpoints"])
def test_latest_of_accelerate(tmp_path: Path, foreign: Path, fault: str, below: str) -> None:
    root = tmp_path / below
    for name in ("checkpoint_2", "checkpoint_9", "checkpoint_10", "checkpoint_99_merged"):
        shutil.copytree(foreign, root / name)
    FAULTS[fault](root / "checkpoint_10")
    os.utime(root / "checkpoint_2", (2e9, 2e9))
    assert latest_checkpoint(tmp_path) == root / "checkpoint_9"
    for name in ("checkpoint_2", "checkpoint_9"):
        FAULTS[fault](root / name)
    assert latest_checkpoint(tmp_path) is None


def test_latest_of_the_trainer(tmp_path: Path, foreign: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number, step in ((10, 10), (20, 5), (30, None)):
        path = tmp_path / f"checkpoint-{number}"
        shutil.copytree(foreign, path)
        if step is not None:
            (path / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    assert latest_checkpoint(tmp_path) == tmp_path / "checkpoint-10", "by recorded step"
    assert "checkpoint-30: it has no trainer_state.json" in caplog.text


def test_ids_are_those_of_the_lineage() -> None:
    assert records._ID.fullmatch(Lineage(uuid.uuid4().hex, "r", 1).checkpoint_id)


def test_a_root_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert main(["list", str(tmp_path / "file")]) == 2
    assert main(["prune", str(tmp_path / "file"), "--keep-last", "1"]) == 2
    with pytest.raises(UsageError):
        KeepLast(0)
