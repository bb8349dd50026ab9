"""Tiny random checkpoints of families of mixtures of experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Glm4MoeConfig, GptOssConfig, MixtralConfig, Qwen3MoeConfig
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig

EXPERTS, K = 8, 2


def _shape(vocabulary: int, context_tokens: int) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": context_tokens,
        "initializer_range": 0.15,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }


def config_of(family: str, vocabulary: int = 40, context_tokens: int = 128) -> Any:
    """Return the config of a family: two layers, eight experts, two per token."""
    shape = _shape(vocabulary, context_tokens)
    experts = {"num_experts": EXPERTS, "num_experts_per_tok": K, "moe_intermediate_size": 64}
    if family == "qwen3_moe":
        return Qwen3MoeConfig(**shape, **experts, norm_topk_prob=True)
    if family == "mixtral":
        return MixtralConfig(**shape, intermediate_size=64, num_local_experts=EXPERTS, num_experts_per_tok=K)
    if family == "qwen3_5_moe_text":
        return Qwen3_5MoeTextConfig(
            **shape, **experts, shared_expert_intermediate_size=64, linear_num_key_heads=2, linear_num_value_heads=2,
            linear_key_head_dim=32, linear_value_head_dim=32, layer_types=["linear_attention", "full_attention"],
        )  # fmt: skip
    if family == "glm4_moe":
        return Glm4MoeConfig(
            **shape, intermediate_size=96, moe_intermediate_size=64, n_routed_experts=EXPERTS, n_shared_experts=1,
            num_experts_per_tok=K, first_k_dense_replace=1, num_mtp_layers=0, n_group=2, topk_group=1,
        )  # fmt: skip
    assert family == "gpt_oss"
    yarn = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0}
    yarn |= {"truncate": False, "original_max_position_embeddings": context_tokens // 4}
    return GptOssConfig(
        rope_parameters=yarn,
        **shape,
        intermediate_size=64,
        num_local_experts=EXPERTS,
        num_experts_per_tok=K,
        sliding_window=16,
    )


FAMILIES = ("qwen3_moe", "qwen3_5_moe_text", "gpt_oss", "glm4_moe", "mixtral")


def save_family(family: str, folder: Path, **sizes: int) -> Any:
    """Save a random model of a family, whose routers' biases are not zero, and return it."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(family, **sizes), dtype=torch.float32).eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith(("e_score_correction_bias", "router.bias", "sinks", "_proj_bias")):
                tensor.normal_(std=0.1)
    model.save_pretrained(folder)
    return model
