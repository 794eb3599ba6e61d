"""Checkpoints of models with adapters, with the directories that PEFT and transformers wrote beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

LAYER = "LlamaDecoderLayer"


def build_base(architecture: str = "llama", dtype: str = "float32") -> Any:
    """Return the base model, the same in every process."""
    import torch

    from tests.architectures import build_architecture

    return build_architecture(architecture).to(getattr(torch, dtype))


def add_adapters(base: Any, configs: dict[str, dict[str, Any]], *, autocast: bool = True) -> Any:
    """Return the base model with LoRA adapters of random values in it, the same in every process."""
    import torch
    from peft import LoraConfig, get_peft_model

    model: Any = None
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(7)
        for name, options in configs.items():
            config = LoraConfig(**options)
            if model is None:
                model = get_peft_model(base, config, adapter_name=name, autocast_adapter_dtype=autocast)
            else:
                model.add_adapter(name, config, autocast_adapter_dtype=autocast)
        model.base_model.set_adapter(next(iter(configs)))
        for name, parameter in model.named_parameters():
            if ".lora_" in name or ".modules_to_save." in name:
                parameter.normal_(std=0.3)
    return model


def make_tokens() -> Any:
    import torch

    return torch.randint(0, 37, (2, 9), generator=torch.Generator().manual_seed(1))


def _get_local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def train_and_save(
    folder: str,
    configs: dict[str, dict[str, Any]],
    *,
    fsdp_version: int = 2,
    state_dict_type: str = "SHARDED_STATE_DICT",
    checkpointing: bool = False,
) -> tuple[Any, list[str]]:
    """Train adapters for three updates, save, write what PEFT makes of the whole model; zero, load and compare.

    Returns:
        the live model's logits, and the names of tensors that the load did not bring back. Runs on every rank.
    """
    import torch
    from accelerate.utils.fsdp_utils import save_fsdp_model

    from accel_fsdp_tools import export_model, load_state, save_state, track
    from tests.exporting import make_tokenizer
    from tests.training import Setup, build_accelerator

    place = Path(folder)
    setup = Setup(fsdp_version=fsdp_version, state_dict_type=state_dict_type, accumulation=1)
    accelerator = build_accelerator(setup, wrap=[LAYER])
    accelerator.state.fsdp_plugin.activation_checkpointing = checkpointing
    model = add_adapters(build_base("llama_tied"), configs)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.05)
    model, optimizer = accelerator.prepare(model, optimizer)
    track(accelerator)
    tokens = make_tokens()
    for _ in range(3):
        accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
        optimizer.step()
        optimizer.zero_grad()
    save_state(accelerator, place / "step", step=3, tokenizer=make_tokenizer())
    if fsdp_version == 2:
        save_fsdp_model(accelerator.state.fsdp_plugin, accelerator, model, str(place / "only"), adapter_only=True)
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=tokens).logits
    model.train()
    export_model(accelerator, model, place / "live", num_threads=2)
    export_model(accelerator, model, place / "live merged", merge_adapter=True, tokenizer=make_tokenizer())
    if "style" in configs:
        export_model(accelerator, model, place / "live style", adapter="style", dtype="bf16")
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        _write_references(place, configs, state)
    before = {name: _get_local(each).clone() for name, each in model.named_parameters()}
    moments = [value.clone() for each in optimizer.optimizer.state.values() for value in _list_locals(each)]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                _get_local(parameter).zero_()
    load_state(accelerator, place / "step", allow_after_step=True)
    after = {name: _get_local(each) for name, each in model.named_parameters()}
    wrong = [name for name, each in before.items() if not torch.equal(each, after[name])]
    loaded = [value for each in optimizer.optimizer.state.values() for value in _list_locals(each)]
    if len(loaded) != len(moments) or not all(map(torch.equal, moments, loaded)):
        wrong.append("optimizer")
    return logits.numpy(), wrong


def _list_locals(state: dict[str, Any]) -> list[Any]:
    return [_get_local(state[name]) for name in sorted(state)]


def _write_references(place: Path, configs: dict[str, dict[str, Any]], state: dict[str, Any]) -> None:
    whole = add_adapters(build_base("llama_tied"), configs)
    whole.load_state_dict({name: tensor.clone() for name, tensor in state.items()})
    whole.save_pretrained(place / "reference")
    build_base("llama_tied").save_pretrained(place / "base")
    whole.merge_and_unload().save_pretrained(place / "merged")


def load_into_live_model(folder: str, configs: dict[str, dict[str, Any]]) -> Any:
    """Prepare a model under FSDP2 with adapters of zeros, load an exported one into it, and return its logits."""
    import torch
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    from tests.training import Setup, build_accelerator

    accelerator = build_accelerator(Setup(accumulation=1), wrap=[LAYER])
    model = add_adapters(build_base("llama_tied"), configs)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.zero_()
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.05)
    model, optimizer = accelerator.prepare(model, optimizer)
    set_peft_model_state_dict(model, load_file(Path(folder) / "adapter_model.safetensors"))
    model.eval()
    with torch.no_grad():
        return model(input_ids=make_tokens()).logits.numpy()
