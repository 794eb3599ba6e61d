"""The arithmetic of another number of ranks, against Accelerate's own dealing: no process groups needed."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from accelerate.data_loader import BatchSamplerShard
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler

from accel_fsdp_tools.progress.elastic import PLAIN_BATCH_SAMPLER, EpochShape, find_obstacle, find_place
from accel_fsdp_tools.progress.feed import extend_digest
from accel_fsdp_tools.progress.order import Dealing

Setting = dict[str, Any]


def _shard(order: list[int], setting: Setting) -> list[list[list[int]]]:
    """The batches of every process in one epoch, dealt out by Accelerate itself (which leaves one process alone)."""
    batches = BatchSampler(order, setting["batch_size"], setting["drop_last"])
    count = setting["num_processes"]
    if setting["is_dispatched"]:
        return _dispatch(list(batches), setting)
    if count == 1 and not setting["is_filled_alone"]:
        return [[list(batch) for batch in batches]]
    return [
        [
            list(batch)
            for batch in BatchSamplerShard(
                batches,
                count,
                process,
                split_batches=setting["split_batches"],
                even_batches=setting["even_batches"],
            )
        ]
        for process in range(count)
    ]


def _dispatch(batches: list[list[int]], setting: Setting) -> list[list[list[int]]]:
    """What `DataLoaderDispatcher.__iter__` does, without its broadcasts."""
    count = setting["num_processes"]
    size = 1 if setting["split_batches"] else count
    groups = [batches[start : start + size] for start in range(0, len(batches), size)]
    if setting["drop_last"] and groups and len(groups[-1]) < size:
        groups.pop()
    wholes = [[sample for batch in group for sample in batch] for group in groups]
    shards: list[list[list[int]]] = [[] for _ in range(count)]
    for number, whole in enumerate(wholes):
        each = len(whole) // count
        if number == len(wholes) - 1 and not setting["drop_last"] and len(whole) % count:
            whole, each = whole + wholes[0][:count], each + 1
        for process, shard in enumerate(shards):
            shard.append(whole[process * each : (process + 1) * each])
    return shards


def _list_updates(order: list[int], setting: Setting) -> list[list[tuple[int, float]]]:
    """Every update of an epoch: its samples, sorted, each with its weight in the gradient.

    Accelerate averages over ranks, divides by the accumulation always, and ends a window with the epoch.
    """
    shards = _shard(order, setting)
    accumulation = setting["accumulation"]
    updates: list[list[tuple[int, float]]] = []
    for number in range(max(len(batches) for batches in shards)):
        if number % accumulation == 0:
            updates.append([])
        for batches in shards:
            if number < len(batches) and batches[number]:
                weight = 1 / (len(batches[number]) * len(shards) * accumulation)
                updates[-1].extend((sample, weight) for sample in batches[number])
    return [sorted(update) for update in updates]


def _make_contract(num_samples: int, setting: Setting) -> dict[str, Any]:
    is_sharded = (setting["num_processes"] > 1 or setting["is_filled_alone"]) and not setting["is_dispatched"]
    return {
        "batch_sampler": PLAIN_BATCH_SAMPLER,
        "dataset_length": num_samples,
        "num_samples": num_samples,
        "even_batches": setting["even_batches"] if is_sharded else None,
        **{name: setting[name] for name in ("batch_size", "num_processes", "drop_last", "split_batches")},
    }


@st.composite
def _draw_setting(draw: Any) -> Setting:
    num_processes = draw(st.integers(1, 4))
    is_split = draw(st.booleans())
    return {
        "num_processes": num_processes,
        "batch_size": draw(st.integers(1, 4)) * (num_processes if is_split else 1),
        "accumulation": draw(st.integers(1, 4)),
        "split_batches": is_split,
        "drop_last": draw(st.booleans()),
        "even_batches": draw(st.sampled_from([True, True, False])),
        "is_filled_alone": draw(st.booleans()),
        "is_dispatched": draw(st.booleans()),
    }


def _make_shape(num_samples: int, setting: Setting) -> EpochShape:
    shape = EpochShape.from_contract(
        _make_contract(num_samples, setting), setting["accumulation"], is_dispatched=setting["is_dispatched"]
    )
    assume(shape is not None or not setting["is_dispatched"])  # fewer samples than processes
    assert shape is not None
    return shape


BASE = dict.fromkeys(("split_batches", "drop_last", "is_filled_alone", "is_dispatched"), False) | {"even_batches": True}


def _is_even(shards: list[list[list[int]]]) -> bool:
    return len({tuple(map(len, batches)) for batches in shards}) == 1


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 60), _draw_setting())
def test_the_shape_of_an_epoch_is_that_of_accelerate(num_samples: int, setting: Setting) -> None:
    shape = _make_shape(num_samples, setting)
    shards = _shard(list(range(num_samples)), setting)
    assert sum(len(batch) for batches in shards for batch in batches) == shape.num_dealt
    assert max(len(batches) for batches in shards) == shape.num_micro
    is_cut_anyhow = setting["split_batches"] or setting["is_dispatched"]
    assert shape.num_short == 0 or not _is_even(shards) or len(shards) == 1 or is_cut_anyhow


def _change(setting: Setting, num_processes: int, accumulation: int) -> Setting:
    """Another number of processes and accumulation with the same samples per update, if there is a batch size."""
    each = setting["batch_size"] * (1 if setting["split_batches"] else setting["num_processes"])
    per_update = each * setting["accumulation"]
    is_split = setting["split_batches"]
    assume(per_update % (accumulation * num_processes) == 0)
    batch_size = per_update // accumulation // (1 if is_split else num_processes)
    return {
        **setting,
        "num_processes": num_processes,
        "accumulation": accumulation,
        "batch_size": batch_size,
        "is_filled_alone": setting["is_filled_alone"] or setting["num_processes"] > 1,
    }


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 90), _draw_setting(), st.integers(1, 4), st.integers(1, 4), st.integers(0, 200), st.integers(0, 99)
)
@example(37, {**BASE, "num_processes": 2, "batch_size": 3, "accumulation": 2}, 3, 1, 2, 1)
@example(37, {**BASE, "num_processes": 2, "batch_size": 3, "accumulation": 2}, 1, 2, 2, 1)
def test_every_update_has_the_samples_it_would_have_had(
    num_samples: int,
    before: Setting,
    num_processes: int,
    accumulation: int,
    kill_step: int,
    seed: int,
) -> None:
    """Killed after any update of any epoch: what follows is the uninterrupted run's, or `exact` would have refused."""
    now = _change(before, num_processes, accumulation)
    shape_before, shape_now = _make_shape(num_samples, before), _make_shape(num_samples, now)
    assume(shape_before.num_micro > 0)
    dice = random.Random(seed)
    orders = [dice.sample(range(num_samples), num_samples) for _ in range(3)]
    whole = [_list_updates(order, before) for order in orders]
    other = [_list_updates(order, now) for order in orders]
    epoch, step = divmod(kill_step % (3 * len(whole[0])), len(whole[0]))
    num_micro = step * before["accumulation"]
    obstacle = find_obstacle(shape_before, shape_now, num_micro)
    if shape_before.num_short == shape_now.num_short == 0:
        assert (obstacle is None) == (whole == other), obstacle
    elif obstacle is None:
        assert whole == other
    if obstacle is not None:
        return
    place = find_place(shape_before, shape_now, num_micro)
    assert place.num_repeated == 0
    assert place.num_micro % now["accumulation"] == 0
    resumed = [other[epoch][place.num_micro // now["accumulation"] :], *other[epoch + 1 :]]
    assert resumed == [whole[epoch][step:], *whole[epoch + 1 :]]


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 60), _draw_setting(), _draw_setting(), st.integers(0, 60))
def test_anything_goes_on_without_a_gap(num_samples: int, before: Setting, now: Setting, num_micro: int) -> None:
    """`allow`: no sample is left out, and no more than a micro-batch comes again."""
    now = {**now, "drop_last": False}
    order = list(range(num_samples))
    shape_before, shape_now = _make_shape(num_samples, before), _make_shape(num_samples, now)
    num_micro = min(num_micro, max(0, shape_before.num_micro - 1))  # one more was to come
    seen = {sample for batches in _shard(order, before) for batch in batches[:num_micro] for sample in batch}
    place = find_place(shape_before, shape_now, num_micro)
    rest = {sample for batches in _shard(order, now) for batch in batches[place.num_micro :] for sample in batch}
    assert seen | rest == set(order)
    assert len(seen & rest) >= place.num_repeated
    assert place.num_repeated < shape_now.per_micro
    assert place.num_units + place.num_repeated == len(seen)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 60), _draw_setting(), st.integers(0, 99))
def test_an_order_is_dealt_out_as_accelerate_does(num_samples: int, setting: Setting, seed: int) -> None:
    order = random.Random(seed).sample(range(num_samples), num_samples)
    setting = {**setting, "is_dispatched": False}
    shards = _shard(order, setting)
    num_micro = max(0, num_samples // _make_shape(num_samples, setting).per_micro)
    dealing = Dealing.from_contract(_make_contract(num_samples, setting), "sample")
    for process, batches in enumerate(shards):
        assert list(dealing.deal(order, process, num_micro)) == batches[:num_micro]
        digest = 0
        for batch in batches[:num_micro]:
            digest = extend_digest(digest, batch)
        assert dealing.compute_digest(order, process, num_micro) == digest


def test_the_unit_of_a_custom_batch_sampler_is_the_batch() -> None:
    contract = _make_contract(40, {**BASE, "num_processes": 2, "batch_size": 4, "accumulation": 1})
    contract |= {"batch_sampler": "a.Bucket", "num_samples": None, "num_batches": 5}
    shape = EpochShape.from_contract(contract, 3)
    assert shape is not None
    assert (shape.unit, shape.num_units, shape.per_micro, shape.per_update) == ("batch", 10, 2, 6)
    alone = EpochShape.from_contract({**contract, "num_processes": 1, "even_batches": None, "num_batches": 10}, 6)
    assert alone is not None
    assert "short last batch" in str(find_obstacle(shape, alone, 0))
    assert find_obstacle(shape, replace(shape, per_micro=6, accumulation=1, num_units=12), 0) is not None
    assert EpochShape.from_contract({**contract, "num_batches": None}, 3) is None
