"""Each fault of torch is there without its workaround, and gone with it.

A test that finds torch *without* a fault is good news: remove that workaround from `accel_fsdp_tools/upstream.py`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness import collect, run_ranks, start_ranks

REPOSITORY = Path(__file__).parent.parent


def _build_fsdp1(use_orig_params: bool) -> Any:
    """Return an FSDP1 model on gloo ranks and its raw optimizer, by torch alone, without this package."""
    import functools

    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    from tests.models import build_tiny_llama

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model = FullyShardedDataParallel(
        build_tiny_llama(),
        device_id=torch.device("cpu"),
        use_orig_params=use_orig_params,
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer}),
    )
    # With a learning rate and a weight decay of zero the weights stay what they were.
    return model, torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)


def _full_state(model: Any) -> Any:
    from torch.distributed.fsdp import (
        FullOptimStateDictConfig,
        FullStateDictConfig,
        FullyShardedDataParallel,
        StateDictType,
    )

    return FullyShardedDataParallel.state_dict_type(
        model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
        FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True),
    )


def _take_model_state(repaired: bool) -> bool:
    """Return whether rank 0 got every weight of the model as it was built (and the other ranks nothing)."""
    import torch

    from accel_fsdp_tools import upstream
    from tests.models import build_tiny_llama

    if repaired:
        upstream.keep_cpu_flat_params()
        upstream.keep_cpu_flat_params()
    model, _ = _build_fsdp1(use_orig_params=True)
    with _full_state(model):
        state = model.state_dict()
    if torch.distributed.get_rank() != 0:
        return not state
    expected = build_tiny_llama().state_dict()
    return list(state) == list(expected) and all(torch.equal(state[k], v) for k, v in expected.items())


def test_full_state_dict_crashes_in_plain_torch(tmp_path: Path) -> None:
    outcomes = collect(start_ranks(_take_model_state, False, folder=tmp_path), folder=tmp_path, grace_s=2)
    assert signal.SIGSEGV in {-(outcome.exit_code or 0) for outcome in outcomes}
    assert not any(outcome.finished for outcome in outcomes)


def test_full_state_dict_is_exact_with_the_workaround(tmp_path: Path) -> None:
    assert run_ranks(_take_model_state, True, folder=tmp_path) == [True, True]


_FILLED = {"exp_avg": 1.0, "exp_avg_sq": 2.0}


def _take_optimizer_states(use_orig_params: bool) -> list[tuple[bool, int]]:
    """Fill the optimizer's states with known values; return, without and with the workaround, what they became.

    For each of the two: whether rank 0 got these values for every parameter, and in how many separate storages.
    """
    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel

    from accel_fsdp_tools import upstream

    model, optimizer = _build_fsdp1(use_orig_params)
    ids = torch.arange(16).reshape(2, 8)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    for state in optimizer.state.values():
        for name, value in _FILLED.items():
            state[name].fill_(value)

    def take() -> tuple[bool, int]:
        with _full_state(model):
            states = FullyShardedDataParallel.optim_state_dict(model, optimizer).get("state", {})
        tensors = [(state[name], value) for state in states.values() for name, value in _FILLED.items()]
        storages = {tensor.untyped_storage().data_ptr() for tensor, _ in tensors}
        return all(bool((tensor == value).all()) for tensor, value in tensors), len(storages)

    plain = take()
    upstream.copy_gathered_optimizer_states()
    upstream.copy_gathered_optimizer_states()
    return [plain, take()]


def test_full_optimizer_state_is_wrong_in_plain_torch_and_exact_with_the_workaround(tmp_path: Path) -> None:
    main, other = run_ranks(_take_optimizer_states, True, folder=tmp_path)
    (plain_right, _), (repaired_right, storages) = main
    assert not plain_right
    assert repaired_right
    assert storages == 2 * 21  # one per tensor: no file holds the gathered buffer once more for each view of it
    assert other == [(True, 0), (True, 0)]


def test_flat_optimizer_state_is_right_either_way(tmp_path: Path) -> None:
    (plain_right, _), (repaired_right, _) = run_ranks(_take_optimizer_states, False, folder=tmp_path)[0]
    assert plain_right
    assert repaired_right


def _save_or_load_full(folder: str, use_orig_params: bool, load: bool) -> bool:
    """Train with Accelerate and FSDP1 and save a full state; or load one over something else and compare."""
    from accel_fsdp_tools.cpu_fsdp import enable_cpu_fsdp

    enable_cpu_fsdp()
    import torch
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    from tests.models import LAYER_CLASS, build_tiny_llama

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=1,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[LAYER_CLASS],
        state_dict_type="FULL_STATE_DICT",
        use_orig_params=use_orig_params,
    )
    accelerator = Accelerator(fsdp_plugin=plugin)
    model = build_tiny_llama(seed=1 if load else 0)
    model = accelerator.prepare(model)  # before the optimizer exists: FSDP1 makes new parameters when they are flat
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=0.1))
    generator = torch.Generator().manual_seed(accelerator.process_index + (10 if load else 0))
    for _ in range(2):
        ids = torch.randint(0, 101, (2, 8), generator=generator)
        accelerator.backward(model(input_ids=ids, labels=ids).loss)
        optimizer.step()
        optimizer.zero_grad()

    def copy_shards() -> dict[str, Any]:
        shards = {f"weight {i}": p.detach().clone() for i, p in enumerate(model.parameters())}
        for i, state in enumerate(optimizer.optimizer.state_dict()["state"].values()):
            shards |= {f"{name} {i}": value.clone() for name, value in state.items()}
        return shards

    rank_file = Path(folder) / f"shards_{accelerator.process_index}.pt"
    if not load:
        torch.save(copy_shards(), rank_file)
        accelerator.save_state(f"{folder}/state")
        return True
    expected = torch.load(rank_file)
    before = copy_shards()
    assert any(not torch.equal(before[name], value) for name, value in expected.items())
    accelerator.load_state(f"{folder}/state")
    after = copy_shards()
    return after.keys() == expected.keys() and all(torch.equal(after[k], v) for k, v in expected.items())


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_accelerate_resumes_exactly_from_a_full_state(tmp_path: Path, use_orig_params: bool) -> None:
    for load in (False, True):
        arguments = (str(tmp_path), use_orig_params, load)
        assert run_ranks(_save_or_load_full, *arguments, folder=tmp_path / f"run_{load}") == [True, True]


_EXIT_SCRIPT = """
import sys, time
import torch
import torch.distributed as dist
if sys.argv[1] == "repaired":
    from accel_fsdp_tools.upstream import let_gloo_finish_before_exit
    let_gloo_finish_before_exit()

class Last:  # gives up the interpreter during the shutdown, as the destructors of a real program do now and then
    def __del__(self, sleep=time.sleep):
        sleep(0.3)

last = Last()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
sys.setswitchinterval(1000)  # until then the main thread keeps it, and gloo's threads wait
for _ in range(50):
    dist.all_reduce(torch.ones(1000), async_op=True)
end = time.monotonic() + 0.3
while time.monotonic() < end:
    pass
"""


def _exit_with_gloo_at_work(folder: Path, kind: str) -> tuple[int, str]:
    script = folder / "script.py"
    script.write_text(_EXIT_SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        [sys.executable, str(script), kind], env=environment, capture_output=True, text=True, timeout=120
    )
    return process.returncode, process.stderr


def test_plain_exit_aborts_while_gloo_drops_its_tensors(tmp_path: Path) -> None:
    for _ in range(6):  # a race, lost about nine times in ten on an idle machine
        code, errors = _exit_with_gloo_at_work(tmp_path, "plain")
        if code != 0:
            break
    assert code == -signal.SIGABRT
    assert "terminate called without an active exception" in errors


def test_exit_waits_for_gloo_with_the_workaround(tmp_path: Path) -> None:
    assert _exit_with_gloo_at_work(tmp_path, "repaired") == (0, "")
