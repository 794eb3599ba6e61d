"""Options that the script sets and a load replaces are said, with both values."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from accel_fsdp_tools.options import list_overridden, read_options


def _make(lr: float, weight_decay: float, *, is_scheduled: bool, steps: int = 0) -> SimpleNamespace:
    parameters = [torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))]
    groups = [{"params": [parameters[0]], "weight_decay": 0.0}, {"params": [parameters[1]]}]
    optimizer = torch.optim.AdamW(groups, lr=lr, weight_decay=weight_decay)
    if is_scheduled:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
    return SimpleNamespace(_optimizers=[SimpleNamespace(optimizer=optimizer)])


def test_both_values_are_said() -> None:
    script, saved = _make(0.1, 0.2, is_scheduled=False), _make(0.3, 0.4, is_scheduled=False)
    texts = list_overridden(read_options(script), read_options(saved))
    assert len(texts) == 3
    assert "parameter group 0: lr is 0.3 as in the checkpoint, not 0.1 as in this script" in texts[0]
    assert "parameter group 1: lr" in texts[1]
    assert "parameter group 1: weight_decay is 0.4 as in the checkpoint, not 0.2" in texts[2]


def test_a_learning_rate_that_a_scheduler_moves_is_no_change() -> None:
    script, saved = _make(0.1, 0.2, is_scheduled=True), _make(0.1, 0.2, is_scheduled=True, steps=3)
    assert read_options(script)[0][0]["lr"] != read_options(saved)[0][0]["lr"]
    assert list_overridden(read_options(script), read_options(saved)) == []
    other = _make(0.5, 0.2, is_scheduled=True, steps=3)
    texts = list_overridden(read_options(script), read_options(other))
    assert len(texts) == 2
    assert "initial_lr is 0.5 as in the checkpoint, not 0.1" in texts[0]


def test_a_learning_rate_may_be_a_tensor() -> None:
    script, saved = _make(0.1, 0.2, is_scheduled=False), _make(0.1, 0.2, is_scheduled=False)
    for group in saved._optimizers[0].optimizer.param_groups:
        group["lr"] = torch.tensor(0.5)
    assert len(list_overridden(read_options(script), read_options(saved))) == 2
