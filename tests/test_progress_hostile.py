"""A tampered record of data progress changes nothing but what a sampler keeps, and only to plain values alike."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Sampler

from accel_fsdp_tools.errors import DataProgressError, RngStateError
from accel_fsdp_tools.progress import LoaderProgress, track
from tests.loader_kinds import NoisyDataset, make_accelerator, seed_everything, unchanged_process

_GLOBALS = ["dataset", "__class__", "__getitem__", "__globals__"]
_MARK = "only a tampered record could have written this"


@pytest.fixture(autouse=True)
def _unchanged_process() -> Iterator[None]:
    with unchanged_process():
        yield


class Notes:
    """An object that a sampler holds; the sampler's loader shares it with the dataset."""

    limit = 7

    def __init__(self) -> None:
        self.text = "fine"
        self.dice = random.Random(1)

    def draw(self) -> float:
        return self.dice.random()


class RichSampler(Sampler):
    """Keeps state of every kind, some of it made only when it is iterated."""

    total = 0

    def __init__(self, num_items: int, seed: int) -> None:
        self.num_items = num_items
        self.dice = np.random.default_rng(seed)
        self.old = np.random.RandomState(seed)
        self.order = list(range(num_items))
        self.plan = range(num_items)
        self.weights = torch.ones(num_items)
        self.marks = np.zeros(num_items, dtype=np.int64)
        self.filled: list[int] = []
        self.previous = None
        self.rate = 1
        self.is_warm = False
        self.phase = "first"
        self.notes = Notes()
        self.hook = functools.partial(print, self.notes)
        self.draw = self.notes.draw
        self.late: torch.Generator | None = None
        self.frozen = (None, 1)
        self.shuffle = np.random.permutation
        self.module = os

    def __len__(self) -> int:
        return self.num_items

    @property
    def size(self) -> int:
        return self.num_items

    def __iter__(self) -> Iterator[int]:
        if self.late is None:
            self.late = torch.Generator().manual_seed(4)
        turn = int(torch.randint(self.num_items, (), generator=self.late))
        self.total += 1
        self.recent = self.dice.permutation(self.num_items)
        self.old.shuffle(self.order)
        self.plan = [int(number) for number in self.recent]
        self.weights = self.weights + torch.from_numpy(self.recent)
        self.marks += self.total
        self.filled.append(self.total)
        self.previous = turn
        self.rate = self.rate * 0.5
        self.is_warm, self.phase = True, "later"
        state = turn + self.filled[-1] + len(self.filled) + int(self.marks.sum() + self.weights.sum()) + self.total
        shift = (state + int(self.notes.draw() * 100) + int(64 * self.rate)) % self.num_items
        yield from self.order[shift:] + self.order[:shift]


def _start(seed: int = 1) -> tuple[Any, Any]:
    seed_everything(seed)
    accelerator = make_accelerator()
    dataset = NoisyDataset(10)
    sampler = RichSampler(10, seed)
    dataset.notes = sampler.notes
    return accelerator, accelerator.prepare(DataLoader(dataset, batch_size=2, sampler=sampler))


def _sampler(loader: Any) -> RichSampler:
    return loader.batch_sampler.sampler


def _save(num_batches: int) -> tuple[LoaderProgress, list[Any]]:
    """Save in the second pass (0: after it), and what is delivered from there to the end of the third."""
    accelerator, loader = _start()
    tracker = track(accelerator)
    list(loader)
    saved, rest = None, []
    for number, batch in enumerate(loader, start=1):
        rest.append(batch.tolist())
        if number == num_batches:
            saved, rest = tracker.capture(), []
    if saved is None:
        saved, rest = tracker.capture(), []
        seed_everything(6)
    rest += [batch.tolist() for batch in loader]
    return saved[0], rest


def _through_json(record: LoaderProgress, change: Callable[[dict[str, Any]], None] = lambda data: None) -> Any:
    data = json.loads(json.dumps(record.to_dict()))
    change(data)
    return LoaderProgress.from_dict(data, record.to_tensors(), rank=0, path="progress_rank_00000.json")


@pytest.mark.parametrize("num_batches", [0, 2, 5])
def test_state_of_every_kind_comes_back(num_batches: int) -> None:
    saved, rest = _save(num_batches)
    accelerator, loader = _start(seed=9)
    tracker = track(accelerator)
    record = _through_json(saved)
    assert tracker.list_problems([record]) == []
    (outcome,) = tracker.restore([record])
    seed_everything(6)
    assert outcome.status == "restored"
    delivered = [batch.tolist() for batch in loader] + ([batch.tolist() for batch in loader] if num_batches else [])
    assert delivered == rest


# -- the attack ---------------------------------------------------------------------------------------------------


def test_paths_of_a_record_are_never_followed() -> None:
    saved, _ = _save(2)
    executable, separator = sys.executable, os.linesep
    items = [
        {"path": [*_GLOBALS, "os", "linesep"], "value": _MARK},
        {"path": [*_GLOBALS, "sys", "executable"], "value": _MARK},
    ]
    for state in ("now", "epoch_start"):
        record = _through_json(saved, lambda data: data["attributes"][state].update(scalars=items))  # noqa: B023
        accelerator, loader = _start(seed=5)
        tracker = track(accelerator)
        with pytest.raises(DataProgressError, match=r"rank 0: .*__globals__.*not a place that this loader has"):
            tracker.restore([record])
        (outcome,) = tracker.restore([record], strict=False)
        assert outcome.status == "absent"
        list(loader)
    assert (sys.executable, os.linesep) == (executable, separator)


_SAMPLER = ["batch_sampler", "sampler"]
_ATTRIBUTES: dict[str, tuple[list[Any], Any]] = {
    "globals of a method": ([*_GLOBALS, "random"], 1),
    "class": ([*_SAMPLER, "__class__"], 1),
    "class attribute": ([*_SAMPLER, "__class__", "total"], 1),
    "dict": ([*_SAMPLER, "__dict__", "num_items"], 1),
    "dunder": ([*_SAMPLER, "__len__"], 1),
    "self of a method": ([*_SAMPLER, "draw", "__self__", "text"], _MARK),
    "function of a method": ([*_SAMPLER, "draw", "__func__", "x"], 1),
    "attribute of a method": ([*_SAMPLER, "draw", "x"], 1),
    "attribute of a partial": ([*_SAMPLER, "hook", "x"], 1),
    "attribute of a function": ([*_SAMPLER, "shuffle", "x"], 1),
    "attribute of a module": ([*_SAMPLER, "module", "linesep"], _MARK),
    "module": ([*_SAMPLER, "module"], 1),
    "function": ([*_SAMPLER, "shuffle"], 1),
    "method of the class": ([*_SAMPLER, "__iter__"], 1),
    "plain method of the class": ([*_SAMPLER, "notes", "draw"], 1),
    "property": ([*_SAMPLER, "size"], 1),
    "new text": ([*_SAMPLER, "nothing"], _MARK),
    "nonexistent owner": ([*_SAMPLER, "nothing", "number"], 1),
    "nonexistent root": (["nothing"], 1),
    "root": (["batch_sampler"], 1),
    "loader": (["batch_size"], 1),
    "torch's object": (["batch_sampler", "batch_size"], 1),
    "dataset": (["dataset", "num_items"], 1),
    "number for a step": ([*_SAMPLER, 0], 1),
    "number for text": ([*_SAMPLER, "phase"], 1),
    "text for a number": ([*_SAMPLER, "num_items"], _MARK),
    "flag for a number": ([*_SAMPLER, "num_items"], True),
    "number for a flag": ([*_SAMPLER, "is_warm"], 1),
    "number for a list": ([*_SAMPLER, "order"], 1),
    "number for an object": ([*_SAMPLER, "notes"], 1),
    "nothing for an object": ([*_SAMPLER, "notes"], None),
    "number for a generator": ([*_SAMPLER, "dice"], 1),
    "text for a class default": ([*_SAMPLER, "notes", "limit"], _MARK),
    "no attribute name": ([*_SAMPLER, "a b\n"], 1),
}


def _snapshot(loader: Any) -> str:
    sampler = _sampler(loader)
    facts = {name: value for name, value in vars(sampler).items() if name not in ("dice", "old", "notes", "hook")}
    states = sampler.dice.bit_generator.state, sampler.old.get_state(legacy=False), sampler.notes.dice.getstate()
    notes = vars(sampler.notes).keys(), sampler.notes.text
    classes = [sorted(vars(cls)) for cls in (RichSampler, Notes, NoisyDataset)]
    facts.pop("draw")
    return repr((facts, states, notes, classes, RichSampler.total, Notes.limit, vars(loader.dataset).keys()))


def _check_refused(record: Any, pattern: str) -> None:
    accelerator, loader = _start(seed=5)
    tracker = track(accelerator)
    before = _snapshot(loader)
    executable, separator = sys.executable, os.linesep
    (problem,) = tracker.list_problems([record])
    with pytest.raises(DataProgressError, match=pattern) as caught:
        tracker.restore([record])
    assert caught.value.actual == [problem]
    assert "rank 0" in problem
    assert _MARK not in str(caught.value)
    (outcome,) = tracker.restore([record], strict=False)
    assert outcome.status == "absent"
    assert (_snapshot(loader), sys.executable, os.linesep) == (before, executable, separator)


@pytest.mark.parametrize("name", list(_ATTRIBUTES))
@pytest.mark.parametrize("num_batches", [0, 2])
def test_attributes_outside_of_the_samplers_are_refused(name: str, num_batches: int) -> None:
    path, value = _ATTRIBUTES[name]
    saved, _ = _save(num_batches)

    def add(data: dict[str, Any]) -> None:
        data["attributes"]["now"] = {"scalars": [{"path": path, "value": value}], "arrays": []}

    _check_refused(_through_json(saved, add), "not a place that this loader has|where this loader has a")


@pytest.mark.parametrize("path", [[*_SAMPLER, "phase"], [*_SAMPLER, "notes"], [*_SAMPLER, "num_items"], _GLOBALS])
def test_a_sequence_for_something_else_is_refused(path: list[str]) -> None:
    saved, _ = _save(2)

    def change(data: dict[str, Any]) -> None:
        states = data["attributes"]["now"]
        states["scalars"] = []
        states["arrays"] = [{"path": path, "container": "list"}]

    _check_refused(_through_json(saved, change), "not a place that this loader has|where this loader has a")


def test_a_default_of_the_class_and_what_is_made_late_may_be_set_on_the_instance_only() -> None:
    saved, _ = _save(0)
    values = {"limit": 9, "made_late": 3}

    def add(data: dict[str, Any]) -> None:
        for name, value in values.items():
            data["attributes"]["now"]["scalars"].append({"path": [*_SAMPLER, "notes", name], "value": value})

    accelerator, loader = _start(seed=5)
    track(accelerator).restore([_through_json(saved, add)])
    notes = _sampler(loader).notes
    assert (notes.limit, vars(notes)["made_late"], Notes.limit) == (9, 3, 7)


def test_another_way_to_the_same_object_is_the_same_place() -> None:
    saved, rest = _save(2)

    def change(data: dict[str, Any]) -> None:
        for moment in data["moments"].values():
            for item in moment["generators"]:
                if item["path"] == [*_SAMPLER, "notes", "dice"]:
                    item["path"] = ["dataset", "notes", "dice"]

    record = _through_json(saved, change)
    assert ("dataset", "notes", "dice") in record.moments["now"].generators
    accelerator, loader = _start(seed=5)
    assert track(accelerator).restore([record])[0].status == "restored"
    assert [batch.tolist() for _ in range(2) for batch in loader] == rest


_GENERATORS: dict[str, list[Any]] = {
    "dunder": [*_SAMPLER, "__class__"],
    "globals": [*_GLOBALS, "random", "_inst"],
    "module": [*_SAMPLER, "module", "x"],
    "nonexistent": [*_SAMPLER, "other"],
    "another object": [*_SAMPLER, "notes"],
    "a number": [*_SAMPLER, "num_items"],
    "the dataset": ["dataset"],
    "nothing that can't be replaced": [*_SAMPLER, "frozen", 0],
    "index out of range": [*_SAMPLER, "frozen", 9],
    "a generator of another kind": [*_SAMPLER, "old"],
    "root without an owner": ["generator"],
}


@pytest.mark.parametrize("name", list(_GENERATORS))
@pytest.mark.parametrize("moment", ["now", "before_fetch", "epoch_start"])
def test_generators_elsewhere_are_refused(name: str, moment: str) -> None:
    saved, _ = _save(2)

    def change(data: dict[str, Any]) -> None:
        items = data["moments"][moment]["generators"]
        target = next(item for item in items if item["path"][-1] == "dice" and "notes" not in item["path"])
        for item in items:
            if item["path"] == _GENERATORS[name]:
                item["path"] = target["path"]  # changed places
        target["path"] = _GENERATORS[name]

    pattern = "not a place that this loader has|where this loader has a|cannot be put back"
    _check_refused(_through_json(saved, change), pattern)


@pytest.mark.parametrize("device", ["cuda:99", "nowhere", "meta", ""])
def test_a_device_that_is_not_the_generators_is_refused(device: str) -> None:
    saved, _ = _save(2)

    def change(data: dict[str, Any]) -> None:
        for item in data["moments"]["now"]["generators"]:
            if item["kind"] == "torch":
                item["device"] = device

    _check_refused(_through_json(saved, change), "cannot be put back")


@pytest.mark.parametrize("name", ["test", "seed", "__class__", "PCG64", "MT19937"])
def test_only_bit_generators_are_made(name: str) -> None:
    """A numpy generator is made by the name in its state: `np.random.test()` would run numpy's tests."""
    saved, _ = _save(2)
    now = saved.moments["now"]
    place = next(path for path, state in now.generators.items() if state.kind == "numpy")
    evil = copy.deepcopy(now.generators[place].state)
    evil["bit_generator"] = name
    evil["more"] = 1
    change = _with_state(saved, (*place[:-1], "previous"), place, evil)
    _check_refused(_through_json(change), "cannot be put back")


@pytest.mark.parametrize("fault", ["pos", "key", "negative", "float", "missing"])
def test_a_numpy_state_that_would_read_other_memory_is_refused(fault: str) -> None:
    saved, _ = _save(2)
    path = next(path for path, state in saved.moments["now"].generators.items() if state.kind == "numpy_legacy")
    state = copy.deepcopy(saved.moments["now"].generators[path].state)
    if fault == "key":
        state["state"]["key"] = state["state"]["key"][:5]
    elif fault == "missing":
        del state["state"]["key"]
    else:
        state["state"]["pos"] = {"pos": 10**6, "negative": -1, "float": 1.5}[fault]
    _check_refused(_with_state(saved, path, path, state), "cannot be put back")


def _with_state(saved: LoaderProgress, path: Any, old_path: Any, state: Any) -> LoaderProgress:
    now = saved.moments["now"]
    generators = {key: value for key, value in now.generators.items() if key != old_path}
    generators[path] = dataclasses.replace(now.generators[old_path], state=state)
    moments = {**saved.moments, "now": dataclasses.replace(now, generators=generators)}
    return dataclasses.replace(saved, moments=moments)


def test_malformed_states_are_errors_that_name_rank_and_file() -> None:
    saved, _ = _save(2)
    data, tensors = json.loads(json.dumps(saved.to_dict())), saved.to_tensors()
    names = [name for name in tensors if "/now/generator/" in name or "/now/attribute/" in name]
    for name in names:
        for bad in (torch.zeros(3, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.complex64)):
            with pytest.raises((DataProgressError, RngStateError), match=r"rank 3.*file\.json") as caught:
                LoaderProgress.from_dict(data, {**tensors, name: bad}, rank=3, path="file.json")
            assert caught.value.rank == 3


def test_the_memory_of_a_samplers_tensors_stays_resizable() -> None:
    """FSDP1 resizes storages; torch refuses that for good once numpy has looked at one."""
    accelerator, loader = _start()
    weights = _sampler(loader).weights
    tracker = track(accelerator)
    for _ in loader:
        tracker.capture()
    weights.untyped_storage().resize_(0)
    _sampler(loader).weights.untyped_storage().resize_(0)


def test_list_problems_says_what_restore_refuses_and_changes_nothing() -> None:
    saved, _ = _save(2)
    accelerator, loader = _start(seed=5)
    loader.batch_sampler.sampler.num_items = 10
    accelerator.prepare(DataLoader(NoisyDataset(4), batch_size=2))
    tracker = track(accelerator)
    before = _snapshot(loader)
    problems = tracker.list_problems([saved])
    assert problems == ["number of prepared dataloaders: saved 1, now 2"]
    with pytest.raises(DataProgressError) as caught:
        tracker.restore([saved])
    assert caught.value.actual == problems
    assert _snapshot(loader) == before
    assert [position.batch for position in tracker.loaders] == [0, 0]
