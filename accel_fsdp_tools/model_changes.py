"""A model that is not the saved one: which tensor of the checkpoint belongs to which of the model, and what has none.

Names are those of state dicts, without wrappers' prefixes, so that wrapping never matters. Nothing here reads a file.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .errors import UsageError
from .extents import Shape
from .manifest import ModelFacts

Rename = Mapping[str, str] | Callable[[str], str]


@dataclass(frozen=True)
class ModelChanges:
    """What a caller of a load says about the model.

    Attributes:
        rename: from names of the checkpoint to names of the model: of tensors, or of modules with all that is in them.
            Or a function of a tensor's name.
        allow_missing: names (patterns with `*`, or modules) that the model has and the checkpoint has not.
        allow_unexpected: the same, the other way round.
        resize: names whose first dimension may be another; the rows that both have are loaded.
    """

    rename: Rename = field(default_factory=dict)
    allow_missing: tuple[str, ...] = ()
    allow_unexpected: tuple[str, ...] = ()
    resize: tuple[str, ...] = ()

    @classmethod
    def make(
        cls,
        rename: Rename | None,
        allow_missing: Sequence[str],
        allow_unexpected: Sequence[str],
        resize: Sequence[str],
    ) -> ModelChanges | None:
        """Take the arguments of a load; None if there are none.

        Raises:
            UsageError: an argument is of another kind.
        """
        if rename is not None and not callable(rename) and not isinstance(rename, Mapping):
            raise UsageError(f"rename is a {type(rename).__name__}; give a mapping of names, or a function")
        lists = {"allow_missing": allow_missing, "allow_unexpected": allow_unexpected, "resize": resize}
        for name, value in lists.items():
            if isinstance(value, str) or not all(isinstance(each, str) for each in value):
                raise UsageError(f"{name} is {value!r}; give a list of names", actual=value)
        if not rename and not any(lists.values()):
            return None
        return cls(rename or {}, tuple(allow_missing), tuple(allow_unexpected), tuple(resize))

    def translate(self, name: str) -> str:
        """The model's name for a tensor of the checkpoint. Of several entries the longest that fits counts."""
        if callable(self.rename):
            return str(self.rename(name))
        for old in sorted(self.rename, key=len, reverse=True):
            if name == old or name.startswith(f"{old}."):
                return self.rename[old] + name[len(old) :]
        return name


@dataclass(frozen=True)
class ModelPlan:
    """Where each tensor of one model comes from.

    Attributes:
        sources: by name in the model, the name in the checkpoint; names of tied tensors are all there.
        new: tensors without a source, which stay as the script has made them.
        dropped: tensors of the checkpoint that nothing takes.
        renamed: (name in the checkpoint, name in the model).
        resized: by name in the model, the shapes in the checkpoint and in the model.
        problems: what the caller has not allowed, in words.
    """

    sources: Mapping[str, str]
    new: tuple[str, ...]
    dropped: tuple[str, ...]
    renamed: tuple[tuple[str, str], ...]
    resized: Mapping[str, tuple[Shape, Shape]]
    problems: tuple[str, ...]

    @property
    def is_changed(self) -> bool:
        """Whether anything but names differs."""
        return bool(self.new or self.dropped or self.resized)

    def describe(self, index: int) -> tuple[list[str], list[str]]:
        """Why the model is not the saved one, and what is worth knowing beside that; every tensor by name."""
        reasons = []
        if self.new:
            reasons.append(f"model {index}: new, and as the script has made them: {', '.join(self.new)}")
        if self.dropped:
            reasons.append(f"model {index}: in the checkpoint and not loaded: {', '.join(self.dropped)}")
        for name, (saved, live) in self.resized.items():
            reasons.append(
                f"model {index}: {name} was {list(saved)} and is {list(live)}: {min(saved[0], live[0])} rows are the "
                "saved ones"
            )
        pairs = ", ".join(f"{old} -> {new}" for old, new in self.renamed)
        return reasons, [f"model {index}: renamed: {pairs}"] if pairs else []


def plan_model(saved: ModelFacts, live: ModelFacts, changes: ModelChanges, index: int = 0) -> ModelPlan:
    """Find the source of every tensor of a model."""
    shapes = {tensor.fqn: tensor.shape for tensor in saved.tensors}
    wanted = {tensor.fqn: tensor.shape for tensor in live.tensors}
    by_name: dict[str, str] = {}
    problems = []
    for name in shapes:
        target = changes.translate(name)
        if target in by_name:
            problems.append(f"model {index}: rename makes {target} of both {by_name[target]} and {name}")
        by_name[target] = name
    sources = {name: by_name[name] for name in wanted if name in by_name}
    for group in live.ties:
        known = next((sources[name] for name in group if name in sources), None)
        if known is not None:
            sources.update({name: known for name in group if name in wanted and name not in sources})
    new = tuple(name for name in wanted if name not in sources)
    taken = set(sources.values())
    tied = {name for group in saved.ties if taken.intersection(group) for name in group}
    dropped = tuple(name for name in shapes if name not in taken | tied)
    resized = {name: (shapes[each], wanted[name]) for name, each in sources.items() if shapes[each] != wanted[name]}
    problems += [
        f"model {index}: {name} is in the model and not in the checkpoint (see allow_missing=)"
        for name in new
        if not _is_named(name, changes.allow_missing)
    ]
    problems += [
        f"model {index}: {name} is in the checkpoint and not in the model (see rename= and allow_unexpected=)"
        for name in dropped
        if not _is_named(name, changes.allow_unexpected)
    ]
    for name, (before, now) in resized.items():
        text = f"model {index}: {name} has shape {list(now)}, the checkpoint's has {list(before)}"
        if not before or not now or before[1:] != now[1:]:
            problems.append(f"{text}; only the first dimension can be resized")
        elif not _is_named(name, changes.resize):
            problems.append(f"{text} (see resize=)")
    return ModelPlan(
        sources=sources,
        new=new,
        dropped=dropped,
        renamed=tuple((each, name) for name, each in sources.items() if changes.translate(each) != each),
        resized=resized,
        problems=tuple(problems),
    )


def _is_named(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, each) or name.startswith(f"{each}.") for each in patterns)


def make_plans(saved: Sequence[ModelFacts], live: Sequence[ModelFacts], changes: ModelChanges) -> tuple[ModelPlan, ...]:
    """Plan every model of a run; their numbers agree."""
    pairs: Any = zip(saved, live, strict=False)
    return tuple(plan_model(before, now, changes, index) for index, (before, now) in enumerate(pairs))
