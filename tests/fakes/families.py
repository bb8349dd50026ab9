"""Small models of the families that are supported."""

from __future__ import annotations

import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    Qwen2Config,
)

SHAPE = {
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}


FAMILIES = {
    "llama": LlamaConfig(**SHAPE),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen2_sliding": Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=6, max_window_layers=0),
    "granite": GraniteConfig(**SHAPE, logits_scaling=3.0),
    "cohere": CohereConfig(**SHAPE, logit_scale=0.25),
    "gemma2": Gemma2Config(**SHAPE, head_dim=8, final_logit_softcapping=2.0, sliding_window=6),
    "gpt2_dropout": GPT2Config(
        vocab_size=40,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=64,
        attn_pdrop=0.5,
        embd_pdrop=0.5,
        resid_pdrop=0.5,
    ),
}


def save(config, folder) -> str:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)
