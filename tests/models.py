"""The tiny model that tests train: a real Llama with `LlamaDecoderLayer`s to wrap, small enough for two cores."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

LAYER_CLASS = "LlamaDecoderLayer"


def build_tiny_llama(
    vocab_size: int = 101,
    num_layers: int = 2,
    hidden_size: int = 32,
    tie: bool = False,
    attention_dropout: float = 0.0,
    seed: int | None = 0,
) -> LlamaForCausalLM:
    """Return a randomly initialised causal language model with about 20 thousand parameters.

    The default vocabulary is odd on purpose, so that two ranks hold shards of different sizes. With `seed` the
    weights are the same in every process and the global generator is left as it was; `None` draws from it.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tie,
        attention_dropout=attention_dropout,
        attn_implementation="eager",
        use_cache=False,
        pad_token_id=None,
        bos_token_id=1,
        eos_token_id=2,
    )
    if seed is None:
        return LlamaForCausalLM(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)
