"""Small random models of several families, saved in the usual ways, and ways to break them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

SHAPE = {
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SHAPE),
    "llama_tied": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SHAPE, head_dim=8),
    "gemma2": Gemma2Config(**SHAPE, head_dim=8),
    "gemma3": Gemma3TextConfig(**SHAPE, head_dim=8),
    "phi3": Phi3Config(**SHAPE),
    "gpt2": GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": Qwen3MoeConfig(**SHAPE, **EXPERTS, num_experts=4, head_dim=8),
}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def save(family: str, folder: Path, *, dtype: torch.dtype = torch.float32, shards: int = 1) -> Path:
    """Save a model of a family, as several files if `shards` is above 1."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[family]).to(dtype)
    size = sum(parameter.nbytes for parameter in model.parameters())
    model.save_pretrained(folder, max_shard_size=2 * size // shards if shards > 1 else "1GB")
    assert (folder / (SINGLE if shards == 1 else INDEX)).is_file()
    return folder


def save_reward_model(folder: Path) -> Path:
    """Save a Llama with a scoring head."""
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE, num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    return folder


def edit(folder: Path, change, file: str = SINGLE) -> None:
    """Change the tensors of a file. `change` receives them by name."""
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file, metadata={"format": "pt"})


def shards_of(folder: Path) -> list[str]:
    """Return the names of the shards, in order."""
    index = json.loads((folder / INDEX).read_text())
    return sorted(set(index["weight_map"].values()))


def edit_json(folder: Path, file: str, change) -> None:
    values = json.loads((folder / file).read_text())
    change(values)
    (folder / file).write_text(json.dumps(values))


def save_reward_model_of(policy: Path, folder: Path) -> str:
    """Save a reward model with the policy's sizes and tokenizer and with random weights."""
    torch.manual_seed(1)
    tokenizer = AutoTokenizer.from_pretrained(policy)
    config = AutoConfig.from_pretrained(policy, num_labels=1, pad_token_id=tokenizer.pad_token_id)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
