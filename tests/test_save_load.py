"""`save_state` and `load_state`: compatible with Accelerate both ways, and clear about every mistake, on every rank."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accel_fsdp_tools import errors
from accel_fsdp_tools.errors import AccelFsdpError
from accel_fsdp_tools.manifest import DIRECTORY, MANIFEST_PATH, read_manifest
from tests.harness import RankError, run_ranks
from tests.manifests import edit_manifest
from tests.training import Objects, Setup, build, digest_model, digest_optimizer, train_batch

SMALL = Setup(num_items=24, accumulation=1)


def _train_a_little(objects: Objects, num_batches: int = 2) -> None:
    for index, batch in enumerate(objects.loader):
        with objects.accelerator.accumulate(objects.model):
            train_batch(objects, batch)
        if index + 1 == num_batches:
            break


def _digests(objects: Objects) -> tuple[str, str]:
    return digest_model(objects.model), digest_optimizer(objects.optimizer)


def _save(path: str, setup: Setup = SMALL, *, plain: bool = False, num_batches: int = 2) -> tuple[str, str]:
    from accel_fsdp_tools import save_state, track

    objects = build(setup, seed=1)
    if not plain:
        track(objects.accelerator)
    _train_a_little(objects, num_batches)
    if plain:
        objects.accelerator.save_state(path)
        objects.accelerator.wait_for_everyone()
    else:
        assert save_state(objects.accelerator, path) == Path(path)
    return _digests(objects)


def _load(path: str, setup: Setup = SMALL, *, plain: bool = False, **arguments: Any) -> tuple[Any, Any]:
    from accel_fsdp_tools import load_state

    objects = build(setup, seed=2)
    report = objects.accelerator.load_state(path) if plain else load_state(objects.accelerator, path, **arguments)
    return _digests(objects), report


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """A checkpoint of two updates, and what was in memory on each rank when it was saved."""
    folder = tmp_path_factory.mktemp("good")
    path = folder / "checkpoint"
    return path, run_ranks(_save, str(path), folder=folder / "r")


def test_ours_loads_with_plain_accelerate(good: tuple[Path, list[Any]], tmp_path: Path) -> None:
    path, saved = good
    assert [digests for digests, _ in run_ranks(_load, str(path), plain=True, folder=tmp_path)] == saved


def test_accelerates_own_files_are_as_it_writes_them(good: tuple[Path, list[Any]], tmp_path: Path) -> None:
    run_ranks(_save, str(tmp_path / "plain"), plain=True, folder=tmp_path / "r")
    ours = {name.as_posix() for name in _files(good[0]) if name.parts[0] != DIRECTORY}
    assert ours == {name.as_posix() for name in _files(tmp_path / "plain")}
    for name in ("scheduler.bin", "optimizer_0/__0_0.distcp", "pytorch_model_fsdp_0/__1_0.distcp"):
        assert (good[0] / name).stat().st_size == (tmp_path / "plain" / name).stat().st_size


def _files(path: Path) -> list[Path]:
    return [each.relative_to(path) for each in path.rglob("*") if each.is_file()]


@pytest.mark.parametrize("version", [1, 2])
def test_plain_accelerates_loads_with_ours_and_is_not_exact(tmp_path: Path, version: int) -> None:
    setup = Setup(num_items=24, accumulation=1, fsdp_version=version)
    saved = run_ranks(_save, str(tmp_path / "plain"), setup, plain=True, folder=tmp_path / "r0")
    loaded = run_ranks(_load, str(tmp_path / "plain"), setup, folder=tmp_path / "r1")
    assert [digests for digests, _ in loaded] == saved, "FSDP1's optimizer too, which plain Accelerate leaves empty"
    for _, report in loaded:
        assert not report.exact
        assert not report.has_manifest
        assert report.model.status == report.optimizer.status == report.scheduler.status == "restored"
        assert report.rng.status == "approximate"
        assert report.data.status == "absent"
        assert "not written by this package" in str(report)


def test_the_manifest_tells_what_is_inside(good: tuple[Path, list[Any]]) -> None:
    manifest = read_manifest(good[0])
    assert manifest.step == 2
    assert manifest.topology.world_size == 2
    assert (manifest.topology.fsdp_version, manifest.topology.state_dict_type) == (2, "SHARDED_STATE_DICT")
    listed = {file.path for file in manifest.files}
    assert listed == {name.as_posix() for name in _files(good[0])} - {MANIFEST_PATH}
    shapes = {tensor.fqn: tensor.shape for tensor in manifest.models[0].tensors}
    assert shapes["model.embed_tokens.weight"] == (101, 32)
    assert manifest.models[0].class_name == "LlamaForCausalLM"
    assert manifest.models[0].config is not None
    assert manifest.optimizers[0].stateless == ()


@pytest.mark.parametrize(
    ("saved_as", "loaded_as"),
    [
        (Setup(), Setup(state_dict_type="FULL_STATE_DICT")),
        (Setup(state_dict_type="FULL_STATE_DICT"), Setup()),
        (Setup(fsdp_version=1), Setup(fsdp_version=1, state_dict_type="FULL_STATE_DICT")),
    ],
    ids=["fsdp2-sharded-as-full", "fsdp2-full-as-sharded", "fsdp1-sharded-as-full"],
)
def test_another_configured_state_dict_type_just_works(tmp_path: Path, saved_as: Setup, loaded_as: Setup) -> None:
    saved = run_ranks(_save, str(tmp_path / "c"), saved_as, folder=tmp_path / "r0")
    loaded = run_ranks(_load, str(tmp_path / "c"), loaded_as, folder=tmp_path / "r1")
    assert [digests for digests, _ in loaded] == saved
    assert loaded[0][1].exact
    assert "loaded as what it is" in str(loaded[0][1])


def _save_twice(path: str) -> None:
    from accel_fsdp_tools import save_state, track

    objects = build(SMALL, seed=1)
    track(objects.accelerator)
    save_state(objects.accelerator, path)
    _train_a_little(objects)
    save_state(objects.accelerator, path)


def test_fewer_ranks_into_the_same_folder_leave_nothing_of_the_older_save(tmp_path: Path) -> None:
    path = tmp_path / "last"
    run_ranks(_save_twice, str(path), folder=tmp_path / "r0")
    assert len(list(path.glob("random_states_*"))) == 2
    run_ranks(_save, str(path), world_size=1, folder=tmp_path / "r1")
    assert len(list(path.glob("random_states_*"))) == 1
    assert not list(path.rglob("*__1_*"))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["last", "r0", "r1"]
    _, report = run_ranks(_load, str(path), world_size=1, folder=tmp_path / "r2")[0]
    assert report.exact


# -- mistakes when loading: each gets its error on every rank, and nothing is loaded -----------------------------


def _edit_manifest(path: Path, **changes: Any) -> None:
    edit_manifest(path, lambda raw: raw.update(changes))


def _flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 16
    path.write_bytes(data)


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


RNG_1 = f"{DIRECTORY}/rng_rank_00001.safetensors"
PROGRESS_1 = f"{DIRECTORY}/progress_rank_00001.json"

# name -> (what is done to a copy of the good checkpoint, the error, a part of its message, arguments of the load)
DAMAGES: dict[str, tuple[Callable[[Path], Any], type[AccelFsdpError], str, dict[str, Any]]] = {
    "newer version": (lambda p: _edit_manifest(p, version=99), errors.ManifestVersionError, "Upgrade", {}),
    "manifest garbage": (lambda p: (p / MANIFEST_PATH).write_text("{"), errors.ManifestError, "manifest.json", {}),
    "manifest gone": (lambda p: (p / MANIFEST_PATH).unlink(), errors.CheckpointIncompleteError, "never completed", {}),
    "model bit": (
        lambda p: _flip(p / "pytorch_model_fsdp_0/__1_0.distcp", 5000),
        errors.DamagedCheckpointError,
        "__1_0.distcp is damaged",
        {},
    ),
    "rng truncated": (lambda p: _truncate(p / RNG_1), errors.DamagedCheckpointError, "rng_rank_00001", {}),
    "rng truncated, unverified": (
        lambda p: _truncate(p / RNG_1),
        errors.RngStateError,
        "rng_rank_00001",
        {"verify": "off"},
    ),
    "rng gone": (lambda p: (p / RNG_1).unlink(), errors.CheckpointIncompleteError, "rng_rank_00001", {}),
    "rng gone, unverified": (
        lambda p: (p / RNG_1).unlink(),
        errors.RngStateError,
        "rank 1",
        {"verify": "off"},
    ),
    "progress gone, unverified": (
        lambda p: (p / PROGRESS_1).unlink(),
        errors.DataProgressError,
        "rank 1",
        {"verify": "off"},
    ),
    "optimizer gone": (
        lambda p: shutil.rmtree(p / "optimizer_0"),
        errors.CheckpointIncompleteError,
        "optimizer",
        {},
    ),
    "scheduler gone": (
        lambda p: (p / "scheduler.bin").unlink(),
        errors.CheckpointIncompleteError,
        "scheduler.bin",
        {"verify": "size"},
    ),
    "model gone": (
        lambda p: shutil.rmtree(p / "pytorch_model_fsdp_0"),
        errors.CheckpointIncompleteError,
        "no model",
        {},
    ),
}


def _try_loads(folder: str, cases: list[tuple[str, dict[str, Any]]]) -> tuple[dict[str, Any], bool]:
    """Try each load in one process: every one must fail before anything is loaded."""
    from accel_fsdp_tools import load_state

    objects = build(SMALL, seed=2)
    before = _digests(objects)
    results: dict[str, Any] = {}
    for name, arguments in cases:
        try:
            load_state(objects.accelerator, Path(folder) / name, **arguments)
        except AccelFsdpError as error:
            results[name] = error
    return results, _digests(objects) == before


def test_damage_and_wrong_paths_are_named_on_every_rank(good: tuple[Path, list[Any]], tmp_path: Path) -> None:
    copies = tmp_path / "copies"
    expected: dict[str, tuple[type[AccelFsdpError], str]] = {}
    cases = []
    for name, (damage, error, text, arguments) in DAMAGES.items():
        shutil.copytree(good[0], copies / name)
        damage(copies / name)
        expected[name] = (error, text)
        cases.append((name, arguments))
    (copies / "file").write_text("no checkpoint")
    (copies / "empty").mkdir()
    (copies / "root").mkdir()
    shutil.copytree(good[0], copies / "root" / "step_00000002")
    shutil.copytree(copies / "manifest gone", copies / ".partial" / "x" / "step_1")
    expected |= {
        "file": (errors.CheckpointNotFoundError, "is a file"),
        "nothing": (errors.CheckpointNotFoundError, "does not exist"),
        "empty": (errors.CheckpointNotFoundError, "holds no checkpoint"),
        "root": (errors.CheckpointNotFoundError, "step_00000002"),
        ".partial/x/step_1": (errors.CheckpointIncompleteError, "never completed"),
    }
    cases += [(name, {}) for name in expected if name not in DAMAGES]
    cases.append(("root/step_00000002", {"verify": "sometimes"}))
    expected["root/step_00000002"] = (errors.UsageError, "'sometimes'")
    for rank, (results, untouched) in enumerate(run_ranks(_try_loads, str(copies), cases, folder=tmp_path / "r")):
        assert untouched
        for name, (error, text) in expected.items():
            assert name in results, f"rank {rank}: {name} was loaded"
            assert type(results[name]) is error, f"rank {rank}: {name}: {results[name]!r}"
            assert text in str(results[name]), f"rank {rank}: {name}: {results[name]}"
            assert results[name].rank is not None


def _attempt(results: dict[str, Any], name: str, call: Callable[[], Any]) -> None:
    """Record what a call returns, or the error that it raises."""
    try:
        results[name] = call()
    except AccelFsdpError as error:
        results[name] = error


def _load_into_other_runs(path: str) -> dict[str, Any]:
    """Change what is prepared, step by step, and try to load after each change."""
    import torch
    from torch.utils.data import DataLoader

    from accel_fsdp_tools import load_state, save_state

    results: dict[str, Any] = {}
    attempt = functools.partial(_attempt, results)
    objects = build(SMALL, seed=2)
    accelerator = objects.accelerator

    def load(**arguments: Any) -> Any:
        return load_state(accelerator, path, **arguments)

    accelerator.register_for_checkpointing(torch.optim.swa_utils.AveragedModel(torch.nn.Linear(1, 1)))
    attempt("one registered object more", load)
    accelerator._custom_objects.clear()
    second = accelerator.prepare(DataLoader(range(10), batch_size=2))
    attempt("one dataloader more", load)
    attempt("one dataloader more, lenient", lambda: load(strict=False).to_dict())
    accelerator._dataloaders.remove(second)
    scheduler = accelerator._schedulers.pop()
    attempt("scheduler not prepared", load)
    attempt("scheduler not prepared, save", lambda: save_state(accelerator, f"{path}-x"))
    accelerator._schedulers.append(scheduler)
    optimizer = accelerator._optimizers.pop()
    accelerator._schedulers.clear()
    attempt("optimizer not prepared", load)
    accelerator._optimizers.append(optimizer)
    accelerator._schedulers.append(scheduler)
    models, accelerator._models = accelerator._models, []
    attempt("before prepare", load)
    accelerator._models = models
    _train_a_little(objects)
    attempt("after a step", load)
    attempt("after a step, on purpose", lambda: load(allow_after_step=True).exact)
    return results


def test_another_set_of_prepared_objects_is_named(good: tuple[Path, list[Any]], tmp_path: Path) -> None:
    for results in run_ranks(_load_into_other_runs, str(good[0]), folder=tmp_path):
        for name, error, text in (
            ("one registered object more", errors.MismatchError, "1 registered object(s), the checkpoint holds 0"),
            ("one dataloader more", errors.MismatchError, "2 dataloader(s), the checkpoint holds 1"),
            ("scheduler not prepared", errors.CallOrderError, "scheduler"),
            ("scheduler not prepared, save", errors.CallOrderError, "scheduler"),
            ("optimizer not prepared", errors.MismatchError, "0 optimizer(s), the checkpoint holds 1"),
            ("before prepare", errors.CallOrderError, "prepare"),
            ("after a step", errors.CallOrderError, "before the first step"),
        ):
            assert type(results[name]) is error, f"{name}: {results[name]!r}"
            assert text in str(results[name]), f"{name}: {results[name]}"
        assert results["one dataloader more, lenient"]["exact"] is False
        assert results["after a step, on purpose"] is True


def _go_back(path: str, setup: Setup) -> tuple[Any, Any, Any]:
    """Go back in the process that trained on, with gradients of a batch that no update has used."""
    from accel_fsdp_tools import load_state, save_state, track

    objects = build(setup, seed=1)
    track(objects.accelerator)
    _train_a_little(objects)
    save_state(objects.accelerator, path)
    before = _digests(objects)
    _train_a_little(objects)
    ids = next(iter(objects.loader))["input_ids"]
    objects.accelerator.backward(objects.model(input_ids=ids, labels=ids).loss)
    moved = _digests(objects)
    load_state(objects.accelerator, path, allow_after_step=True)
    return before, moved, _digests(objects)


@pytest.mark.parametrize(
    ("version", "kind"),
    [
        (2, "SHARDED_STATE_DICT"),
        pytest.param(2, "FULL_STATE_DICT", marks=pytest.mark.matrix),
        pytest.param(1, "SHARDED_STATE_DICT", marks=pytest.mark.matrix),
        pytest.param(1, "FULL_STATE_DICT", marks=pytest.mark.matrix),
    ],
)
def test_going_back_with_a_parameter_that_was_never_trained(tmp_path: Path, version: int, kind: str) -> None:
    setup = Setup(num_items=24, accumulation=1, fsdp_version=version, state_dict_type=kind, unused_parameter=True)
    for before, moved, after in run_ranks(_go_back, str(tmp_path / "c"), setup, folder=tmp_path / "r"):
        assert moved != before
        assert after == before


def _load_other_model(path: str) -> Any:
    from accel_fsdp_tools import load_state

    objects = build(Setup(num_items=24, accumulation=1, num_layers=3, unused_parameter=True), seed=2)
    before = _digests(objects)
    try:
        load_state(objects.accelerator, path)
    except AccelFsdpError as error:
        return error, _digests(objects) == before
    return None, False


@pytest.mark.parametrize("plain", [False, True])
def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, plain: bool) -> None:
    run_ranks(_save, str(tmp_path / "c"), plain=plain, folder=tmp_path / "r0")
    for error, untouched in run_ranks(_load_other_model, str(tmp_path / "c"), folder=tmp_path / "r1"):
        assert isinstance(error, errors.MismatchError), error
        assert untouched
        assert "are in the model and not in the checkpoint: model.layers.2" in str(error)


def test_another_world_size_is_refused_or_reported(good: tuple[Path, list[Any]], tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"1 rank\(s\), the checkpoint was saved by 2") as caught:
        run_ranks(_load, str(good[0]), world_size=1, folder=tmp_path / "r1")
    assert isinstance(caught.value.errors[0], errors.MismatchError)
    results = run_ranks(_load, str(good[0]), strict=False, world_size=3, folder=tmp_path / "r3")
    for _, report in results:
        assert not report.exact
        assert report.model.status == report.optimizer.status == "restored"
        assert report.rng.status == "approximate"
        assert "rank 2 did not exist at the save" in str(report)
        assert report.data.status in ("approximate", "absent")


# -- mistakes when saving ------------------------------------------------------------------------------------------


def _bad_saves(folder: str) -> dict[str, Any]:
    from accel_fsdp_tools import save_state, track

    results: dict[str, Any] = {}
    attempt = functools.partial(_attempt, results)
    objects = build(Setup(num_items=24, accumulation=2), seed=1)
    accelerator = objects.accelerator
    rank = accelerator.process_index
    attempt("different folders", lambda: save_state(accelerator, f"{folder}/rank{rank}"))
    attempt("a file", lambda: save_state(accelerator, f"{folder}/file"))
    attempt("a file above", lambda: save_state(accelerator, f"{folder}/file/below"))
    attempt("foreign", lambda: save_state(accelerator, f"{folder}/foreign"))
    attempt("bad step", lambda: save_state(accelerator, f"{folder}/x", step=-1))
    track(accelerator)
    iterator = iter(objects.loader)
    with accelerator.accumulate(objects.model):
        train_batch(objects, next(iterator))
    attempt("accumulating", lambda: save_state(accelerator, f"{folder}/x"))
    with accelerator.accumulate(objects.model):
        train_batch(objects, next(iterator))
    before = _digests(objects)
    attempt("foreign, on purpose", lambda: save_state(accelerator, f"{folder}/foreign", overwrite=True).name)
    results["unchanged"] = _digests(objects) == before
    return results


def test_mistakes_when_saving_are_named_and_write_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.txt").write_text("dear")
    for results in run_ranks(_bad_saves, str(tmp_path), folder=tmp_path / "r"):
        for name, error, text in (
            ("different folders", errors.UsageError, "different directories"),
            ("a file", errors.UsageError, "is a file"),
            ("a file above", errors.UsageError, "is a file"),
            ("foreign", errors.UsageError, "thesis.txt"),
            ("bad step", errors.UsageError, "step is -1"),
            ("accumulating", errors.CallOrderError, "partly accumulated"),
        ):
            assert type(results[name]) is error, f"{name}: {results[name]!r}"
            assert text in str(results[name]), f"{name}: {results[name]}"
        assert results["foreign, on purpose"] == "foreign"
        assert results["unchanged"]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "foreign", "r"]


def _refuse_local(folder: str) -> None:
    from accel_fsdp_tools import save_state

    objects = build(Setup(fsdp_version=1, state_dict_type="LOCAL_STATE_DICT"), seed=1)
    save_state(objects.accelerator, f"{folder}/x")


def test_local_state_dicts_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(_refuse_local, str(tmp_path), folder=tmp_path / "r")
    for error in caught.value.errors.values():
        assert isinstance(error, errors.UnsupportedError)
        assert "SHARDED_STATE_DICT" in str(error)
    assert not (tmp_path / "x").exists()


def _refuse_apart(folder: str) -> None:
    """Two processes that are a group, and an `Accelerator` that does not know of it: as on a CPU without FSDP."""
    import torch
    import torch.distributed as dist
    from accelerate import Accelerator

    from accel_fsdp_tools import save_state

    dist.init_process_group("gloo")
    accelerator = Accelerator()
    assert accelerator.num_processes == 1, "fixed upstream: this check can go"
    accelerator.prepare(torch.nn.Linear(2, 2))
    save_state(accelerator, f"{folder}/x")


def test_processes_that_train_apart_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    import torch

    if torch.accelerator.is_available():
        pytest.skip("there Accelerate makes one run of them")
    with pytest.raises(RankError) as caught:
        run_ranks(_refuse_apart, str(tmp_path), folder=tmp_path / "r")
    assert len(caught.value.errors) == 2
    for error in caught.value.errors.values():
        assert isinstance(error, errors.UsageError)
        assert "2 processes were launched" in str(error)
    assert not (tmp_path / "x").exists()


def _save_untracked(path: str) -> Any:
    from accel_fsdp_tools import save_state

    objects = build(SMALL, seed=1)
    _train_a_little(objects)
    try:
        save_state(objects.accelerator, path)
    except AccelFsdpError as error:
        save_state(objects.accelerator, path, strict=False)
        return error
    return None


def test_an_untracked_loader_is_an_error_and_then_absent(tmp_path: Path) -> None:
    for error in run_ranks(_save_untracked, str(tmp_path / "c"), folder=tmp_path / "r0"):
        assert isinstance(error, errors.DataProgressError), error
        assert "track" in str(error)
    _, report = run_ranks(_load, str(tmp_path / "c"), strict=False, folder=tmp_path / "r1")[0]
    assert report.data.status == "absent"
    assert report.rng.status == "restored"


def _save_after_evaluation(path: str, setup: Setup) -> tuple[str, str]:
    import torch

    from accel_fsdp_tools import save_state, track

    objects = build(setup, seed=1)
    track(objects.accelerator)
    _train_a_little(objects)
    objects.model.eval()
    with torch.no_grad():
        objects.model(input_ids=torch.ones(1, 4, dtype=torch.int64))
    save_state(objects.accelerator, path)
    return _digests(objects)


@pytest.mark.parametrize("version", [1, 2])
def test_a_save_right_after_an_evaluation(tmp_path: Path, version: int) -> None:
    # FSDP2 leaves gathered parameters registered then, in the place of the shards that the optimizer knows.
    setup = Setup(num_items=24, accumulation=1, fsdp_version=version)
    saved = run_ranks(_save_after_evaluation, str(tmp_path / "c"), setup, folder=tmp_path / "r0")
    loaded = run_ranks(_load, str(tmp_path / "c"), setup, folder=tmp_path / "r1")
    assert [digests for digests, _ in loaded] == saved
    assert loaded[0][1].exact


def _save_before_the_first_update(path: str, setup: Setup) -> tuple[Any, Any]:
    from accel_fsdp_tools import Checkpointer

    objects = build(setup, seed=1)
    empty_before = not objects.optimizer.optimizer.state
    with Checkpointer(objects.accelerator, path) as checkpointer:
        position = checkpointer.resume()
        if position.fresh:
            checkpointer.save()
        empty_after = not objects.optimizer.optimizer.state
        _train_a_little(objects, 3)
    return (empty_before, empty_after), _digests(objects)


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
@pytest.mark.parametrize("version", [1, 2])
def test_a_save_before_the_first_update_changes_nothing(
    tmp_path: Path, version: int, kind: str, optimizer: str
) -> None:
    # torch takes a dummy step to name an empty optimizer's state; its step count must not stay behind.
    setup = Setup(num_items=24, accumulation=1, fsdp_version=version, state_dict_type=kind, optimizer=optimizer)
    first = run_ranks(_save_before_the_first_update, str(tmp_path / "c"), setup, folder=tmp_path / "r0")
    second = run_ranks(_save_before_the_first_update, str(tmp_path / "c"), setup, folder=tmp_path / "r1")
    assert first == second
    assert first[0][0] == (True, True)
    plain = run_ranks(_save, str(tmp_path / "p"), setup, plain=True, num_batches=3, folder=tmp_path / "r2")
    assert [digests for _, digests in first] == plain, "the saves did not disturb the run"


def _naming(folder: str) -> dict[str, Any]:
    from accel_fsdp_tools import load_state, save_state

    objects = build(SMALL, seed=1)
    accelerator = objects.accelerator
    configuration = accelerator.project_configuration
    configuration.set_directories(folder)
    configuration.automatic_checkpoint_naming = True
    configuration.total_limit = 1
    results: dict[str, Any] = {}
    try:
        save_state(accelerator, f"{folder}/checkpoints/mine")
    except AccelFsdpError as error:
        results["inside"] = error
    save_state(accelerator, f"{folder}/other/mine")
    load_state(accelerator, f"{folder}/other/mine")
    results["after"] = (
        configuration.automatic_checkpoint_naming,
        configuration.total_limit,
        configuration.iteration,
    )
    return results


def test_automatic_naming_neither_redirects_nor_deletes(tmp_path: Path) -> None:
    precious = tmp_path / "checkpoints" / "checkpoint_7"
    precious.mkdir(parents=True)
    for results in run_ranks(_naming, str(tmp_path), folder=tmp_path / "r"):
        assert isinstance(results["inside"], errors.UsageError)
        assert results["after"] == (True, 1, 0)
    assert precious.is_dir()
    assert read_manifest(tmp_path / "other" / "mine").step == 0


def _record_syncs(path: str) -> set[str]:
    """Save, and return what this rank had synced when the manifest was about to be written."""
    from accel_fsdp_tools import phases, save_state, track

    objects = build(SMALL, seed=1)
    track(objects.accelerator)
    _train_a_little(objects)
    synced: list[str] = []
    before_manifest: set[str] = set()
    original = os.fsync

    def fsync(descriptor: int) -> None:
        original(descriptor)
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))

    def observe(point: str) -> None:
        if point == "save.checksums":
            before_manifest.update(synced)

    os.fsync = fsync
    phases.set_observer(observe)
    save_state(objects.accelerator, path)
    return before_manifest


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc to name what is synced")
def test_every_file_is_on_disk_before_there_is_a_manifest(tmp_path: Path) -> None:
    # DCP's own syncs are put off, so that nothing but this stands between a crash and a manifest of holes.
    synced = set[str]().union(*run_ranks(_record_syncs, str(tmp_path / "c"), folder=tmp_path / "r"))
    names = {file.path for file in read_manifest(tmp_path / "c").files}
    assert names
    assert {name for name in names if not any(path.endswith(f"/c/{name}") for path in synced)} == set()
