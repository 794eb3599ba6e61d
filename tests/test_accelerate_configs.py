"""Every config that people copy means what it says to the Accelerate that is installed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.harness import run_ranks
from tests.launches import CONFIGS, merge_arguments, read_launch_environment

NAMES = sorted(path.name for path in CONFIGS.iterdir())
CPU_NAMES = [name for name in NAMES if name.endswith("_cpu.yaml")]


def test_the_list_is_complete() -> None:
    expected = ["fsdp1.yaml", "fsdp1_cpu.yaml", "fsdp2.yaml", "fsdp2_2nodes.yaml", "fsdp2_cpu.yaml", "fsdp2_hsdp.yaml"]
    assert expected == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_key_is_one_that_accelerate_knows(name: str) -> None:
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils import DistributedType

    config = load_config_from_file(str(CONFIGS / name))  # raises for unknown keys at the top level only
    assert config.distributed_type == DistributedType.FSDP
    assert config.mixed_precision in ("no", "bf16")  # an unquoted `no` would be False here
    assert config.use_cpu == (name in CPU_NAMES)
    known = vars(launch_command_parser().parse_args(["script.py"]))
    nested = {**config.fsdp_config, **config.parallelism_config}
    assert set(nested) <= set(known)
    merged = vars(merge_arguments(name))
    assert {key: merged[key] for key in nested} == nested
    assert merged["use_fsdp"] is True


@pytest.mark.parametrize("name", NAMES)
def test_the_header_says_what_to_change(name: str) -> None:
    text = (CONFIGS / name).read_text()
    header = text[: text.index("compute_environment")]
    assert f"accelerate launch --config_file accelerate_configs/{name} " in header
    assert all(key in header for key in ("num_processes", "fsdp_transformer_layer_cls_to_wrap", "mixed_precision"))
    assert 'mixed_precision: "no"' in text or "mixed_precision: bf16" in text
    assert yaml.safe_load(text)["num_processes"] >= 2


@pytest.mark.parametrize("name", NAMES)
def test_launched_processes_build_the_plugin_that_was_meant(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.utils import dataclasses
    from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy, StateDictType
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    environment = read_launch_environment(name)
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    assert environment["ACCELERATE_USE_FSDP"] == "true"
    assert environment["ACCELERATE_MIXED_PRECISION"] == ("no" if name in CPU_NAMES else "bf16")
    # FSDP1 with sync_module_states asks for the current GPU.
    monkeypatch.setattr(dataclasses, "is_cuda_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == (1 if name.startswith("fsdp1") else 2)
    assert plugin.state_dict_type == StateDictType.SHARDED_STATE_DICT
    assert plugin.auto_wrap_policy is transformer_auto_wrap_policy
    assert plugin.transformer_cls_names_to_wrap == ["LlamaDecoderLayer"]
    assert plugin.cpu_ram_efficient_loading == (name not in CPU_NAMES)
    assert not plugin.activation_checkpointing
    assert not getattr(plugin.cpu_offload, "offload_params", False)
    if plugin.fsdp_version == 1:
        assert plugin.sharding_strategy == ShardingStrategy.FULL_SHARD
        assert plugin.use_orig_params is True
        assert plugin.backward_prefetch == BackwardPrefetch.BACKWARD_PRE
        assert plugin.sync_module_states == (name not in CPU_NAMES)
    else:
        assert plugin.reshard_after_forward is True


@pytest.mark.parametrize(("flags", "backend"), [([], "static"), (["--rdzv_backend", "c10d"], "c10d")])
def test_two_nodes_meet_at_the_first(monkeypatch: pytest.MonkeyPatch, flags: list[str], backend: str) -> None:
    from accelerate.utils import launch

    monkeypatch.setattr(launch, "is_port_in_use", lambda port: False)
    for rank in (0, 1):
        arguments = merge_arguments("fsdp2_2nodes.yaml", "--machine_rank", str(rank), *flags)
        launch.prepare_multi_gpu_env(arguments)
        assert (arguments.nnodes, arguments.nproc_per_node, arguments.node_rank) == ("2", "8", rank)
        assert (arguments.rdzv_backend, arguments.rdzv_endpoint) == (backend, "10.0.0.1:29500")


def test_a_rendezvous_that_stands_in_a_config_is_ignored(tmp_path: Path) -> None:
    """By Accelerate 1.15. Once this fails, docs/restarts.md and fsdp2_2nodes.yaml can say it in the config."""
    config = tmp_path / "config.yaml"
    config.write_text((CONFIGS / "fsdp2_2nodes.yaml").read_text() + "rdzv_backend: c10d\n")
    assert merge_arguments(str(config)).rdzv_backend == "static"


def _shard_with_config(environment: dict[str, str]) -> dict[str, Any]:
    os.environ.update(environment)
    from accel_fsdp_tools.cpu_fsdp import enable_cpu_fsdp

    enable_cpu_fsdp()
    import torch
    from accelerate import Accelerator
    from torch.distributed.tensor import Replicate, Shard

    from tests.models import build_tiny_llama

    accelerator = Accelerator()
    model = build_tiny_llama()
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    parameter = next(model.parameters())
    return {
        "hybrid": parameter.placements == (Replicate(), Shard(0)),
        "mesh": tuple(parameter.device_mesh.shape),
        "names": parameter.device_mesh.mesh_dim_names,
        "groups": parameter.device_mesh.mesh.tolist(),
        "held": sum(p.to_local().numel() for p in model.parameters()) / sum(p.numel() for p in model.parameters()),
    }


def test_hsdp_shards_within_groups_and_replicates_between_them(tmp_path: Path) -> None:
    environment = read_launch_environment("fsdp2_hsdp.yaml")
    assert environment["PARALLELISM_CONFIG_DP_REPLICATE_SIZE"] == "2"
    assert environment["PARALLELISM_CONFIG_DP_SHARD_SIZE"] == "4"
    environment["PARALLELISM_CONFIG_DP_SHARD_SIZE"] = "2"  # four ranks, not eight
    results = run_ranks(_shard_with_config, environment, world_size=4, folder=tmp_path)
    for result in results:
        assert result["hybrid"]
        assert (result["mesh"], result["groups"]) == ((2, 2), [[0, 1], [2, 3]])
        assert result["held"] == pytest.approx(0.5, abs=0.01)
