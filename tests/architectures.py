"""Architectures built tiny from their configs: what `save_pretrained` does to a model differs from one to the next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_TEXT: dict[str, Any] = {
    "vocab_size": 37,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MOE: dict[str, Any] = {**_TEXT, "moe_intermediate_size": 12, "num_experts_per_tok": 2}
_SEQ2SEQ: dict[str, Any] = {
    "vocab_size": 37,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "max_position_embeddings": 32,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 20,
    "decoder_ffn_dim": 20,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": 2,
}
_CLIP = {
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
    "projection_dim": 16,
}


@dataclass(frozen=True)
class Architecture:
    """Names of a model class and its config class in transformers, and what makes it tiny.

    `parts` are sub-configs by argument, as name of the class and arguments. `change` is applied to the built model.
    """

    model: str
    config: str
    options: dict[str, Any]
    parts: dict[str, tuple[str, dict[str, Any]]] | None = None
    change: Callable[[Any], Any] | None = None
    is_converted: bool = False  # some tensors in the files are not tensors of the model


def _to_half_but_kept(model: Any) -> None:
    """As `from_pretrained` in half precision leaves a T5: its output projections stay in fp32."""
    import torch

    model.to(torch.bfloat16)
    for name, module in model.named_modules():
        if name.endswith(".wo"):
            module.to(torch.float32)


def _tie_by_hand(model: Any) -> None:
    """Untie what the class would tie, as training with a changed config does."""
    import torch

    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM", "LlamaConfig", _TEXT),
    "llama_tied": Architecture("LlamaForCausalLM", "LlamaConfig", {**_TEXT, "tie_word_embeddings": True}),
    "llama_untied": Architecture(
        "LlamaForCausalLM", "LlamaConfig", {**_TEXT, "tie_word_embeddings": True}, change=_tie_by_hand
    ),
    "llama_classifier": Architecture("LlamaForSequenceClassification", "LlamaConfig", {**_TEXT, "num_labels": 3}),
    "qwen3": Architecture("Qwen3ForCausalLM", "Qwen3Config", {**_TEXT, "head_dim": 4, "tie_word_embeddings": True}),
    "gemma2": Architecture("Gemma2ForCausalLM", "Gemma2Config", {**_TEXT, "head_dim": 4}),
    "gemma3": Architecture("Gemma3ForCausalLM", "Gemma3TextConfig", {**_TEXT, "head_dim": 4}),
    "gpt2": Architecture(
        "GPT2LMHeadModel", "GPT2Config", {"vocab_size": 37, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
    ),
    "opt": Architecture(
        "OPTForCausalLM",
        "OPTConfig",
        {**_TEXT, "ffn_dim": 20, "word_embed_proj_dim": 12, "num_key_value_heads": 4},
    ),
    "bert": Architecture("BertForMaskedLM", "BertConfig", _TEXT),
    "t5": Architecture(
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": 37, "d_model": 16, "d_kv": 8, "d_ff": 20, "num_layers": 2, "num_heads": 2},
        change=_to_half_but_kept,
    ),
    "bart": Architecture("BartForConditionalGeneration", "BartConfig", _SEQ2SEQ),
    "marian": Architecture("MarianMTModel", "MarianConfig", _SEQ2SEQ),
    "mixtral": Architecture("MixtralForCausalLM", "MixtralConfig", {**_MOE, "num_local_experts": 3}, is_converted=True),
    "qwen2_moe": Architecture(
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {**_MOE, "num_experts": 3, "shared_expert_intermediate_size": 20},
        is_converted=True,
    ),
    "qwen3_moe": Architecture(
        "Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**_MOE, "num_experts": 11, "head_dim": 4}, is_converted=True
    ),
    "llava": Architecture(
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        {"image_token_index": 36},
        parts={"vision_config": ("CLIPVisionConfig", _CLIP), "text_config": ("LlamaConfig", _TEXT)},
    ),
    "qwen2_vl": Architecture(
        "Qwen2VLForConditionalGeneration",
        "Qwen2VLConfig",
        {
            "vision_config": {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "patch_size": 4},
            "text_config": {**_TEXT, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 0]}},
        },
    ),
    "mamba": Architecture(
        "MambaForCausalLM", "MambaConfig", {"vocab_size": 37, "hidden_size": 16, "num_hidden_layers": 2}
    ),
    "olmo_hybrid": Architecture(  # one convolution in memory, three in the file
        "OlmoHybridForCausalLM",
        "OlmoHybridConfig",
        {**_TEXT, "num_key_value_heads": 4, "layer_types": ["linear_attention", "full_attention"]},
        is_converted=True,
    ),
    "hrm_text": Architecture(  # rows of the projections in another order
        "HrmTextForCausalLM", "HrmTextConfig", {**_TEXT, "head_dim": 4, "num_hidden_layers": 1}, is_converted=True
    ),
    "nomic_bert": Architecture("NomicBertForMaskedLM", "NomicBertConfig", _TEXT, is_converted=True),
}


def build_architecture(name: str) -> Any:
    """Return a model with a random value in every parameter and buffer, the same in every process."""
    import torch
    import transformers

    made = ARCHITECTURES[name]
    parts = {key: getattr(transformers, cls)(**options) for key, (cls, options) in (made.parts or {}).items()}
    config = getattr(transformers, made.config)(**made.options, **parts)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(5)
        model = getattr(transformers, made.model)(config)
        if made.change is not None:
            made.change(model)
        for tensor in {id(each): each for each in model.state_dict().values()}.values():
            if tensor.is_floating_point():
                tensor.normal_()
    return model
