"""Loaded into a model with a new head, a renamed backbone, a larger vocabulary: what both have is bit-equal."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from accel_fsdp_tools.errors import UsageError
from accel_fsdp_tools.manifest import ModelFacts, TensorFacts
from accel_fsdp_tools.model_changes import ModelChanges, plan_model
from tests.harness import run_ranks
from tests.training import VOCABULARY, Objects, Setup, build, train_batch

SHARDED, FULL = "SHARDED_STATE_DICT", "FULL_STATE_DICT"
LARGER = VOCABULARY + 18
EMBEDDINGS = ("backbone.model.embed_tokens.weight", "backbone.lm_head.weight")
CHANGES: dict[str, Any] = {
    "rename": {"model": "backbone.model", "lm_head": "backbone.lm_head"},
    "allow_missing": ["head"],
    "allow_unexpected": ["old.*"],
    "resize": ["backbone.*embed_tokens.weight", "backbone.lm_head.weight"],
}


def _build(setup: Setup, seed: int, *, is_changed: bool) -> Objects:
    """Prepare the model of the save, or the changed one."""
    import torch

    import tests.models

    original = tests.models.build_tiny_llama

    class Wrapped(torch.nn.Module):
        def __init__(self, backbone: Any) -> None:
            super().__init__()
            self.backbone = backbone
            self.config = backbone.config
            self.head = torch.nn.Linear(5, 3)

        def forward(self, **inputs: Any) -> Any:
            return self.backbone(**inputs)

    def make(**options: Any) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            if is_changed:
                return Wrapped(original(**{**options, "vocab_size": LARGER}))
            model = original(**options)
            model.old = torch.nn.Linear(4, 2)
            return model

    tests.models.build_tiny_llama = make
    try:
        return build(setup, seed=seed)
    finally:
        tests.models.build_tiny_llama = original


def _gather(objects: Objects) -> dict[str, Any]:
    """All whole tensors of model and optimizer (on rank 0), as arrays."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model, optimizer = get_state_dict(objects.model, objects.optimizer.optimizer, options=options)
    found = {name: tensor.clone().numpy() for name, tensor in model.items()}
    for name, state in optimizer.get("state", {}).items():
        found |= {f"state.{name}.{key}": value.clone().numpy() for key, value in state.items()}
    return found


def _save(path: str, setup: Setup) -> dict[str, Any]:
    from accel_fsdp_tools import save_state, track

    objects = _build(setup, 1, is_changed=False)
    track(objects.accelerator)
    for number, batch in enumerate(objects.loader):
        with objects.accelerator.accumulate(objects.model):
            train_batch(objects, batch)
        if number == 3:
            break
    save_state(objects.accelerator, path)
    return _gather(objects)


def _load(path: str, setup: Setup, wrong: list[dict[str, Any]], changes: dict[str, Any]) -> tuple[Any, ...]:
    from accel_fsdp_tools import Checkpointer, load_state
    from accel_fsdp_tools.errors import MismatchError

    objects = _build(setup, 2, is_changed=True)
    fresh = _gather(objects)
    objects.optimizer.optimizer.state.clear()  # made up by the look at it
    errors = []
    for each in wrong:
        with pytest.raises(MismatchError) as caught:
            load_state(objects.accelerator, path, elastic="allow", **each)
        errors.append(str(caught.value))
    if setup.state_dict_type == SHARDED:
        root = Path(path).parent / "root"
        position = Checkpointer(objects.accelerator, root, elastic="allow").resume(path, **changes)
        report = position.report
    else:
        report = load_state(objects.accelerator, path, elastic="allow", **changes)
    loaded = _gather(objects)
    rates = [group["lr"] for group in objects.optimizer.optimizer.param_groups]
    for _, batch in zip(range(2), objects.loader, strict=False):
        with objects.accelerator.accumulate(objects.model):
            loss = train_batch(objects, batch)
    return fresh, loaded, report, errors, rates, float(loss)


def _translate(name: str) -> str:
    return name.replace("model.", "backbone.model.", 1).replace("lm_head", "backbone.lm_head", 1)


@pytest.mark.parametrize(
    ("kind", "versions", "world_sizes", "use_orig_params"),
    [
        (SHARDED, (2, 2), (2, 3), True),
        pytest.param(SHARDED, (1, 2), (2, 1), True, marks=pytest.mark.matrix),
        pytest.param(FULL, (2, 1), (2, 2), True, marks=pytest.mark.matrix),
        pytest.param(SHARDED, (1, 1), (2, 3), False, marks=pytest.mark.matrix),
        pytest.param(FULL, (1, 2), (3, 2), True, marks=pytest.mark.matrix),
    ],
)
def test_what_both_models_have_is_equal(
    tmp_path: Path, kind: str, versions: tuple[int, int], world_sizes: tuple[int, int], use_orig_params: bool
) -> None:
    import numpy as np

    before, after = (
        Setup(fsdp_version=version, state_dict_type=kind, accumulation=1, num_items=48, use_orig_params=use_orig_params)
        for version in versions
    )
    path = str(tmp_path / "c")
    saved = run_ranks(_save, path, before, world_size=world_sizes[0], folder=tmp_path / "r0")[0]
    wrong = [{}, {**CHANGES, "resize": []}, {**CHANGES, "rename": None}]
    outcomes = run_ranks(_load, path, after, wrong, CHANGES, world_size=world_sizes[1], folder=tmp_path / "r1")
    fresh, loaded, report, errors, rates, loss = outcomes[0]
    assert "are in the model and not in the checkpoint" in errors[0]
    assert f"{EMBEDDINGS[0]} has shape [{LARGER}, " in errors[1]
    assert "(see resize=)" in errors[1]
    assert "(see rename= and allow_unexpected=)" in errors[2]
    num_compared = 0
    for name, value in saved.items():
        prefix = "state." if name.startswith("state.") else ""
        plain = name.removeprefix(prefix)
        if plain.startswith("old."):
            continue
        actual = loaded[prefix + _translate(plain)]
        if actual.shape != value.shape:
            rows = len(value)
            beyond = np.zeros_like(actual) if prefix else fresh[_translate(plain)]
            assert np.array_equal(actual[rows:], beyond[rows:]), name
            actual = actual[:rows]
        assert actual.tobytes() == value.tobytes(), name
        num_compared += 1
    assert num_compared > 80
    for name in ("head.weight", "head.bias"):
        assert np.array_equal(loaded[name], fresh[name])
    of_new = [value for name, value in loaded.items() if name.startswith("state.head") and not name.endswith(".step")]
    assert len(of_new) == (0 if versions[1] == 2 else 4)  # FSDP1 cannot save parameters with and without state
    assert not any(value.any() for value in of_new)
    text = str(report)
    assert "model 0: new, and as the script has made them: head.weight, head.bias" in text
    assert "model 0: in the checkpoint and not loaded: old.weight, old.bias" in text
    width = loaded[EMBEDDINGS[0]].shape[1]
    assert f"model 0: {EMBEDDINGS[0]} was [{VOCABULARY}, {width}] and is [{LARGER}, {width}]: {VOCABULARY} rows" in text
    assert "model.norm.weight -> backbone.model.norm.weight" in text
    assert not report.model.exact
    assert loss > 0
    assert rates[0] > 0


def test_renamed_alone_is_the_same_model() -> None:
    facts = _facts({"a.weight": (3, 2), "a.bias": (3,), "b.weight": (3, 2)}, ties=[("a.weight", "b.weight")])
    live = _facts({"x.a.weight": (3, 2), "x.a.bias": (3,), "b.weight": (3, 2)}, ties=[("b.weight", "x.a.weight")])
    plan = plan_model(facts, live, ModelChanges(rename={"a": "x.a"}))
    assert plan.problems == ()
    assert not plan.is_changed
    assert plan.sources == {"x.a.weight": "a.weight", "x.a.bias": "a.bias", "b.weight": "b.weight"}
    assert plan.renamed == (("a.weight", "x.a.weight"), ("a.bias", "x.a.bias"))
    by_function = plan_model(facts, live, ModelChanges(rename=lambda name: name.replace("a.", "x.a.", 1)))
    assert by_function == plan


def _facts(shapes: dict[str, tuple[int, ...]], ties: Any = ()) -> ModelFacts:
    tensors = tuple(TensorFacts(name, "float32", shape, True, "parameter") for name, shape in shapes.items())
    return ModelFacts("M", tensors, tuple(map(tuple, ties)))


def test_what_is_not_named_is_a_problem() -> None:
    saved = _facts({"a.weight": (3, 2), "gone": (1,), "b": (4, 2)})
    live = _facts({"a.weight": (5, 2), "new": (1,), "b": (4, 3)})
    texts = plan_model(saved, live, ModelChanges()).problems
    assert len(texts) == 4
    assert "new is in the model and not in the checkpoint (see allow_missing=)" in texts[0]
    assert "gone is in the checkpoint and not in the model" in texts[1]
    assert "a.weight has shape [5, 2], the checkpoint's has [3, 2] (see resize=)" in texts[2]
    assert "b has shape [4, 3], the checkpoint's has [4, 2]; only the first dimension" in texts[3]
    changes = ModelChanges(allow_missing=("n*",), allow_unexpected=("gone",), resize=("a",))
    plan = plan_model(saved, live, changes)
    assert len(plan.problems) == 1
    assert (plan.new, plan.dropped) == (("new",), ("gone",))
    both = plan_model(saved, live, dataclasses.replace(changes, rename={"gone": "b"}))
    assert "rename makes b of both gone and b" in both.problems[0]


def test_wrong_arguments() -> None:
    assert ModelChanges.make(None, [], [], []) is None
    with pytest.raises(UsageError, match="allow_missing is 'head'"):
        ModelChanges.make(None, "head", [], [])
    with pytest.raises(UsageError, match="rename is a list"):
        ModelChanges.make(["a"], [], [], [])  # type: ignore[arg-type]
