"""Retention policies: what each keeps, and what none of them can lose."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_fsdp_tools.errors import UsageError
from accel_fsdp_tools.retention import (
    CheckpointFacts,
    KeepAny,
    KeepBest,
    KeepEvery,
    KeepLast,
    KeepPinned,
    KeepSpaced,
    RetentionPolicy,
    choose_deletions,
    make_policy,
)


def _make(step: int, **facts: Any) -> CheckpointFacts:
    attempt = facts.pop("attempt", 1)
    return CheckpointFacts(name=f"a{attempt}_{step}", order=(attempt, step), **facts)


def _keep(policy: RetentionPolicy, checkpoints: list[CheckpointFacts]) -> list[int]:
    gone = {each.name for each in choose_deletions(checkpoints, policy)}
    return [each.step for each in checkpoints if each.name not in gone]


STEPS = [_make(step, created_at=step * 60.0) for step in range(100, 1100, 100)]


def test_last() -> None:
    assert _keep(KeepLast(3), STEPS) == [800, 900, 1000]
    assert _keep(KeepLast(3), STEPS[::-1]) == [1000, 900, 800]


def test_an_abandoned_branch_is_older_whatever_its_steps() -> None:
    checkpoints = [_make(500), _make(900), _make(600, attempt=2), _make(700, attempt=2)]
    assert _keep(KeepLast(2), checkpoints) == [600, 700]
    assert _keep(KeepLast(3), checkpoints) == [900, 600, 700]


def test_what_was_not_read_back_does_not_count_and_is_not_the_price() -> None:
    checkpoints = [_make(1), _make(2), _make(3, is_verified=False), _make(4, is_verified=False), _make(5)]
    assert _keep(KeepLast(1), checkpoints) == [5]
    assert _keep(KeepLast(2), checkpoints) == [2, 3, 4, 5]
    assert _keep(KeepLast(1), checkpoints[:4]) == [2, 3, 4], "the last good one is older than what counts for nothing"
    assert _keep(KeepLast(1), [dataclasses.replace(each, is_verified=False) for each in checkpoints]) == [1, 2, 3, 4, 5]


def test_every() -> None:
    assert _keep(KeepEvery(300), STEPS) == [300, 600, 900, 1000], "and the last good one"
    assert _keep(KeepEvery(300) | KeepLast(2), [_make(0), *STEPS]) == [300, 600, 900, 1000]


def test_best() -> None:
    losses = {100: 3.0, 200: 1.0, 300: math.nan, 400: 2.0, 500: 1.0, 600: -math.inf, 700: 9.0}
    checkpoints = [_make(step, metrics={"loss": loss}) for step, loss in losses.items()]
    checkpoints += [_make(800), _make(900, metrics={"accuracy": 1.0})]
    assert _keep(KeepBest("loss", "min"), checkpoints) == [500, 900], "of equal ones the newer"
    assert _keep(KeepBest("loss", "min", 3), checkpoints) == [200, 400, 500, 900]
    assert _keep(KeepBest("loss", "max"), checkpoints) == [700, 900]
    assert _keep(KeepBest("nothing", "max"), checkpoints) == [900]
    spoiled = [dataclasses.replace(each, is_verified=each.step != 500) for each in checkpoints]
    assert _keep(KeepBest("loss", "min"), spoiled) == [200, 500, 900], "the best is not verified: the next stays too"


def test_spaced() -> None:
    assert _keep(KeepSpaced(180 * 60), STEPS) == [100, 300, 500, 700, 900, 1000]
    assert _keep(KeepSpaced(240 * 60), STEPS[::-1]) == [1000, 700, 400, 100]
    spoiled = [dataclasses.replace(each, is_verified=each.step != 100) for each in STEPS]
    assert _keep(KeepSpaced(10_000 * 60), spoiled) == [100, 200, 1000], "the first that is good is the one that counts"


def test_pinned() -> None:
    checkpoints = [_make(1, checkpoint_id="x"), _make(2), _make(3, is_pinned=True), _make(4), _make(5)]
    assert _keep(KeepPinned(steps=(2,), ids=("x",)), checkpoints) == [1, 2, 3, 5]
    assert _keep(KeepLast(1), checkpoints) == [3, 5]


def test_no_policy_keeps_all() -> None:
    assert choose_deletions(STEPS, None) == []
    assert make_policy() is None
    assert choose_deletions([], KeepLast(1)) == []


def test_rules_together() -> None:
    policy = make_policy(keep_last=1, keep_every=500, keep_best=("loss", "max", 1), keep_every_s=400 * 60)
    checkpoints = [dataclasses.replace(each, metrics={"loss": float(each.step == 300)}) for each in STEPS]
    assert policy is not None
    assert _keep(policy, checkpoints) == [100, 300, 500, 900, 1000]
    assert make_policy(keep_best=KeepBest("a", "min")) == KeepAny((KeepBest("a", "min"),))


@pytest.mark.parametrize(
    "arguments",
    [
        {"keep_last": 0},
        {"keep_last": True},
        {"keep_last": 1.5},
        {"keep_every": 0},
        {"keep_every_s": 0},
        {"keep_every_s": math.nan},
        {"keep_every_s": True},
        {"keep_best": "loss"},
        {"keep_best": ("loss",)},
        {"keep_best": ("loss", "least")},
        {"keep_best": ("loss", "min", 0)},
        {"keep_best": ("", "min")},
    ],
)
def test_rules_that_make_no_sense(arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        make_policy(**arguments)


# -- invariants -----------------------------------------------------------------------------------------------------

FACTS = st.builds(
    CheckpointFacts,
    name=st.just(""),
    order=st.tuples(st.integers(0, 3), st.integers(0, 40)),
    created_at=st.one_of(st.floats(0, 1000), st.just(0.0)),
    metrics=st.dictionaries(st.sampled_from(["loss", "accuracy"]), st.floats(allow_nan=True)),
    checkpoint_id=st.sampled_from(["x", "y", "z"]),
    is_verified=st.booleans(),
    is_pinned=st.booleans(),
)
ROOTS = st.lists(FACTS, max_size=12).map(
    lambda facts: [dataclasses.replace(each, name=f"n{number}") for number, each in enumerate(facts)]
)
SINGLE = st.one_of(
    st.builds(KeepLast, st.integers(1, 5)),
    st.builds(KeepEvery, st.integers(1, 10)),
    st.builds(KeepBest, st.sampled_from(["loss", "accuracy"]), st.sampled_from(["min", "max"]), st.integers(1, 3)),
    st.builds(KeepSpaced, st.floats(1, 500)),
    st.builds(KeepPinned, st.tuples(st.integers(0, 40)), st.tuples(st.sampled_from(["x", "y"]))),
)
POLICIES = st.one_of(SINGLE, st.lists(SINGLE, max_size=3).map(lambda each: KeepAny(tuple(each))))


@given(ROOTS, POLICIES)
def test_the_last_good_one_and_all_newer_and_pinned_ones_stay(root: list[CheckpointFacts], policy: Any) -> None:
    gone = choose_deletions(root, policy)
    good = [each.order for each in root if each.is_verified]
    assert not any(each.is_pinned for each in gone)
    assert all(good and each.order < max(good) for each in gone)
    assert gone == sorted(gone, key=lambda each: each.order), "oldest first: a crash in the middle costs the oldest"


@given(ROOTS, POLICIES, st.randoms())
def test_the_order_of_the_facts_does_not_matter(root: list[CheckpointFacts], policy: Any, random: Any) -> None:
    shuffled = root[:]
    random.shuffle(shuffled)
    assert choose_deletions(shuffled, policy) == choose_deletions(root, policy)


@given(ROOTS, POLICIES)
def test_pruning_twice_removes_nothing_more(root: list[CheckpointFacts], policy: Any) -> None:
    gone = choose_deletions(root, policy)
    assert choose_deletions([each for each in root if each not in gone], policy) == []


@given(ROOTS, st.lists(SINGLE, min_size=1, max_size=3))
def test_together_they_keep_what_any_keeps(root: list[CheckpointFacts], policies: list[Any]) -> None:
    together = {each.name for each in choose_deletions(root, KeepAny(tuple(policies)))}
    each_alone = [{each.name for each in choose_deletions(root, policy)} for policy in policies]
    assert together == set.intersection(*each_alone)


@given(ROOTS, st.integers(1, 5))
def test_as_many_verified_ones_stay_as_were_asked_for(root: list[CheckpointFacts], count: int) -> None:
    gone = {each.name for each in choose_deletions(root, KeepLast(count))}
    num_verified = sum(each.is_verified for each in root)
    assert sum(each.is_verified and each.name not in gone for each in root) >= min(count, num_verified)


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=15), st.floats(1, 300))
def test_thinning_while_a_run_goes_on_keeps_what_thinning_at_the_end_keeps(times: list[int], seconds: float) -> None:
    checkpoints = [
        _make(number, created_at=float(when)) for number, when in enumerate(itertools.accumulate(sorted(times)))
    ]
    policy = KeepSpaced(seconds)
    root: list[CheckpointFacts] = []
    for each in checkpoints:
        root.append(each)
        gone = choose_deletions(root, policy)
        root = [left for left in root if left not in gone]
    assert [each.step for each in root] == _keep(policy, checkpoints)
