"""The bundled policy: a Qwen3 of half a million parameters, with a tokenizer of one token per word.

Both are saved in Hugging Face format, so every engine and trainer loads them like any other model. One token per number
keeps the skill easy (the successor of a number is a look-up), and a response has as many tokens as numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from rlhfless.bundled.task import BundledTask, TaskRecipe

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"


@dataclass(frozen=True)
class ModelSize:
    """The shape of the network. The vocabulary follows from the task."""

    hidden: int = 128
    layers: int = 2
    heads: int = 4
    key_value_heads: int = 2
    head_dim: int = 64
    """Supported by vLLM's attention kernels on CPU and GPU."""
    mlp: int = 320
    max_positions: int = 256
    experts: int = 0
    """Experts of each layer, each of half the width of the MLP that they replace. A token passes two."""


SMALLEST = ModelSize(hidden=32, layers=1, heads=1, key_value_heads=1, mlp=64)
"""For tests that need an untrained model."""

EXPERTS_PER_TOKEN = 2

ROPE_THETA = 1e6
"""As in Qwen3. Slow rotations let a query find an equal number at any distance."""

INITIALIZER_RANGE = 0.05
"""Standard deviation of the initial weights. Qwen's 0.02 is meant for wide networks and learns slowly here at first."""


def build_tokenizer(task: BundledTask, max_positions: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer that splits words and numbers at white space and punctuation, and joins them with spaces.

    Encoding adds no tokens. As in Qwen, `<bos>` is unused and exists for tools that require one.
    """
    vocabulary = [PAD, BOS, EOS, UNK, *task.vocabulary]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        model_max_length=max_positions,
        clean_up_tokenization_spaces=False,
    )


def build_model(
    tokenizer: PreTrainedTokenizerFast, size: ModelSize, seed: int
) -> Qwen3ForCausalLM | Qwen3MoeForCausalLM:
    """Create a randomly initialised policy in float32, without touching torch's global random state."""
    experts: dict[str, Any] = {}
    if size.experts:
        experts = {
            "num_experts": size.experts,
            "num_experts_per_tok": EXPERTS_PER_TOKEN,
            "moe_intermediate_size": size.mlp // EXPERTS_PER_TOKEN,
            "norm_topk_prob": True,
        }
    kind: Any = Qwen3MoeConfig if experts else Qwen3Config
    config = kind(
        vocab_size=len(tokenizer),
        hidden_size=size.hidden,
        intermediate_size=size.mlp,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.key_value_heads,
        head_dim=size.head_dim,
        max_position_embeddings=size.max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        initializer_range=INITIALIZER_RANGE,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        dtype="float32",
        **experts,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return (Qwen3MoeForCausalLM if experts else Qwen3ForCausalLM)(config)


def build_random(path: Path, seed: int, *, size: ModelSize = SMALLEST, recipe: TaskRecipe | None = None) -> None:
    """Write an untrained model and its tokenizer to the folder `path`."""
    tokenizer = build_tokenizer(recipe or TaskRecipe(), size.max_positions)
    build_model(tokenizer, size, seed).save_pretrained(path)
    tokenizer.save_pretrained(path)
