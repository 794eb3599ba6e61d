"""What a snapshot copies, what it keeps, and that its memory is used again."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
import torch

from accel_fsdp_tools.host_copies import HostCopies, weigh_tensors


def test_changes_do_not_reach_the_copy_and_ties_stay_ties() -> None:
    weight = torch.arange(6.0).reshape(2, 3).t()
    copies = HostCopies()
    with copies.taking():
        copied = copies.copy_tree(("x",), {"a": weight, "b": weight.detach(), "n": [1, (2.0, "text")]})
    expected = weight.clone()
    weight.add_(1)
    assert torch.equal(copied["a"], expected)
    assert copied["a"].stride() == (1, 3), "the order in memory shows in a file"
    assert copied["a"].data_ptr() == copied["b"].data_ptr() != weight.data_ptr()
    assert copied["n"] == [1, (2.0, "text")]


def test_the_next_snapshot_uses_the_same_memory_and_frees_what_is_gone() -> None:
    held = {"a": torch.zeros(5), "b": torch.zeros(2)}
    views = [each[:] for each in held.values()]  # a training refers to them
    copies = HostCopies()
    with copies.taking():
        first = copies.copy_tree((), held)
    addresses = {name: each.data_ptr() for name, each in first.items()}
    held["a"].add_(1)
    del held["b"], first
    with copies.taking():
        second = copies.copy_tree((), held)
    assert second["a"].data_ptr() == addresses["a"]
    assert second["a"].tolist() == [1.0] * 5
    assert list(copies._buffers) == [("a",)]
    assert len(views) == 2
    held["a"] = torch.ones(7)
    keep = held["a"][:]
    with copies.taking():
        assert copies.copy_tree((), held)["a"].shape == keep.shape


def test_what_was_gathered_is_kept_unless_somebody_else_has_it() -> None:
    copies = HostCopies()
    parameter, state = torch.nn.Parameter(torch.ones(4)), torch.ones(3)
    gathered = {"made": torch.ones(4), "alias": parameter.detach(), "the same object": state}
    with copies.taking([parameter, state]):
        kept = copies.copy_tree((), gathered, is_gathered=True)
        copied = copies.copy_tree(("again",), gathered)
    assert kept["made"].data_ptr() == gathered["made"].data_ptr() != copied["made"].data_ptr()
    for copy in (kept, copied):
        assert copy["alias"].data_ptr() != parameter.data_ptr()
        assert copy["the same object"].data_ptr() != state.data_ptr()
        assert not copy["alias"].requires_grad
    # Not known to be live, but of a second tensor, of numpy, or of a module's own.
    tensor, array = torch.zeros(4), np.zeros(4)
    others = {"view": tensor[:2], "numpy": torch.from_numpy(array), "layer._extra_state": torch.zeros(1)}
    with copies.taking():
        kept = copies.copy_tree((), others, is_gathered=True)
    assert all(kept[name].data_ptr() != other.data_ptr() for name, other in others.items())


def test_state_dicts_keep_their_class_and_metadata() -> None:
    state = torch.nn.Linear(2, 2).state_dict()
    copies = HostCopies()
    with copies.taking():
        copied = copies.copy_tree((), state)
    assert type(copied) is OrderedDict
    assert copied._metadata == state._metadata  # type: ignore[attr-defined]
    assert list(copied) == ["weight", "bias"]


@pytest.mark.parametrize("tensor", [torch.zeros(0, 3), torch.tensor(3), torch.zeros(1).expand(4), torch.ones(4)[::2]])
def test_odd_tensors(tensor: torch.Tensor) -> None:
    view = tensor[...]
    copies = HostCopies()
    with copies.taking():
        copied = copies.copy_tensor((), tensor)
    assert torch.equal(copied, view)


def test_weighing() -> None:
    assert weigh_tensors({"a": [torch.zeros(3), (torch.zeros(2, dtype=torch.int8), None)], "b": "text"}) == 14
    assert weigh_tensors({"a": object()}) is None
    assert weigh_tensors([np.zeros(3)]) is None
