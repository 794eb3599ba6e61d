"""Checkpoints to export, with the directory that `save_pretrained` of the whole model wrote beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def make_tokenizer() -> Any:
    """Return a tokenizer that needs no download."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {word: index for index, word in enumerate(["[UNK]", "a", "b", "c"])}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="[UNK]")))
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    return tokenizer


def save_with_reference(
    path: str,
    reference: str,
    architecture: str,
    *,
    fsdp_version: int = 2,
    state_dict_type: str = "SHARDED_STATE_DICT",
    max_shard_size: str = "50GB",
    plain: bool = False,
    dtype: str | None = None,
) -> None:
    """Prepare a model under FSDP, save its state, and write what `save_pretrained` makes of it. Runs on every rank.

    The reference is saved from a whole model: gathered tensors lie in padded storages and are no longer tied, which
    transformers counts into sizes, and so into how it cuts files.

    `plain` saves with Accelerate alone, so that there is no manifest.
    """
    import torch

    from accel_fsdp_tools import save_state, track
    from tests.architectures import build_architecture
    from tests.training import Setup, build_accelerator

    layer = "MixtralDecoderLayer" if architecture == "mixtral" else "LlamaDecoderLayer"
    accelerator = build_accelerator(Setup(fsdp_version=fsdp_version, state_dict_type=state_dict_type), wrap=[layer])
    torch.manual_seed(5)
    model = build_architecture(architecture)
    if dtype is not None:
        model = model.to(getattr(torch, dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    track(accelerator)
    if plain:
        accelerator.save_state(path)
    else:
        save_state(accelerator, path, step=3, tokenizer=make_tokenizer())
    state_dict = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        whole = build_architecture(architecture).to(dtype=getattr(torch, dtype or "float32"))
        whole.load_state_dict({name: tensor.clone() for name, tensor in state_dict.items()})
        whole.save_pretrained(reference, max_shard_size=max_shard_size)


def compare_directories(out: Path, reference: Path) -> list[str]:
    """Return the names of files of `reference` that `out` lacks or has with other bytes."""
    return [
        path.name
        for path in sorted(reference.iterdir())
        if not (out / path.name).is_file() or (out / path.name).read_bytes() != path.read_bytes()
    ]
