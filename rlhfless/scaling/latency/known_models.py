"""Built-in sizes of models that a scenario or a plan may name without their files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_NAMES = re.compile(
    r"(?:qwen|meta-llama|openai|zai-org)/(?:meta-)?([\w.-]+?)(?:-instruct|-base)?(?:-2507)?", re.IGNORECASE
)
"""Names on the hub; variants have the sizes of their base model."""


def _config(
    layers: int, hidden: int, heads: int, kv_heads: int, mlp: int, vocabulary: int, tied: bool = False, **more: Any
) -> Mapping[str, Any]:
    return MappingProxyType(
        {
            "num_hidden_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "intermediate_size": mlp,
            "vocab_size": vocabulary,
            "tie_word_embeddings": tied,
            **more,
        }
    )


def _qwen3(layers: int, hidden: int, heads: int, kv_heads: int, mlp: int, **more: Any) -> Mapping[str, Any]:
    return _config(layers, hidden, heads, kv_heads, mlp, 151936, head_dim=128, **more)


def _gpt_oss(layers: int, experts: int) -> Mapping[str, Any]:
    window: Any = {"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * (layers // 2)}
    routed: Any = {"num_local_experts": experts, "num_experts_per_tok": 4, "model_type": "gpt_oss"}
    return _config(layers, 2880, 64, 8, 2880, 201088, head_dim=64, **routed, **window)


def _qwen35(
    layers: int, hidden: int, heads: int, kv_heads: int, value_heads: int, mlp: int, tied: bool = False, **more: Any
) -> Mapping[str, Any]:
    """Return the sizes of a Qwen3.5 model: three of four layers are linear, with 16 key heads."""
    linear: Any = {
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "mamba_ssm_dtype": "float32",
        "full_attention_interval": 4,
        "model_type": "qwen3_5_moe_text" if more else "qwen3_5_text",
    }
    return _config(layers, hidden, heads, kv_heads, mlp, 248320, tied, head_dim=256, **linear, **more)


def _qwen35_experts(
    layers: int, hidden: int, heads: int, value_heads: int, experts: int, active: int, width: int
) -> Mapping[str, Any]:
    routed: Any = {"num_experts": experts, "num_experts_per_tok": active, "moe_intermediate_size": width}
    return _qwen35(layers, hidden, heads, 2, value_heads, width, **routed, shared_expert_intermediate_size=width)


_QWEN3_EXPERTS: Any = {"num_experts": 128, "num_experts_per_tok": 8, "model_type": "qwen3_moe"}

BUILT_IN: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "qwen2.5-0.5b": _config(24, 896, 14, 2, 4864, 151936, tied=True),
        "qwen2.5-1.5b": _config(28, 1536, 12, 2, 8960, 151936, tied=True),
        "qwen2.5-3b": _config(36, 2048, 16, 2, 11008, 151936, tied=True),
        "qwen2.5-7b": _config(28, 3584, 28, 4, 18944, 152064),
        "qwen2.5-14b": _config(48, 5120, 40, 8, 13824, 152064),
        "qwen2.5-32b": _config(64, 5120, 40, 8, 27648, 152064),
        "qwen3-0.6b": _qwen3(28, 1024, 16, 8, 3072, tied=True),
        "qwen3-1.7b": _qwen3(28, 2048, 16, 8, 6144, tied=True),
        "qwen3-4b": _qwen3(36, 2560, 32, 8, 9728, tied=True),
        "qwen3-8b": _qwen3(36, 4096, 32, 8, 12288),
        "qwen3-14b": _qwen3(40, 5120, 40, 8, 17408),
        "qwen3-32b": _qwen3(64, 5120, 64, 8, 25600),
        "qwen3-30b-a3b": _qwen3(48, 2048, 32, 4, 6144, **_QWEN3_EXPERTS, moe_intermediate_size=768),
        "qwen3-235b-a22b": _qwen3(94, 4096, 64, 4, 12288, **_QWEN3_EXPERTS, moe_intermediate_size=1536),
        "qwen3.5-0.8b": _qwen35(24, 1024, 8, 2, 16, 3584, tied=True),
        "qwen3.5-4b": _qwen35(32, 2560, 16, 4, 32, 9216, tied=True),
        "qwen3.5-9b": _qwen35(32, 4096, 16, 4, 32, 12288),
        "qwen3.5-27b": _qwen35(64, 5120, 24, 4, 48, 17408),
        "qwen3.5-35b-a3b": _qwen35_experts(40, 2048, 16, 32, 256, 8, 512),
        "qwen3.5-122b-a10b": _qwen35_experts(48, 3072, 32, 64, 256, 8, 1024),
        "qwen3.5-397b-a17b": _qwen35_experts(60, 4096, 32, 64, 512, 10, 1024),
        "gpt-oss-20b": _gpt_oss(24, 32),
        "gpt-oss-120b": _gpt_oss(36, 128),
        "glm-4.5-air": _config(
            46,
            4096,
            96,
            8,
            10944,
            151552,
            head_dim=128,
            n_routed_experts=128,
            n_shared_experts=1,
            num_experts_per_tok=8,
            first_k_dense_replace=1,
            moe_intermediate_size=1408,
            model_type="glm4_moe",
        ),
        "llama-3.1-8b": _config(32, 4096, 32, 8, 14336, 128256),
        "llama-2-70b": _config(80, 8192, 64, 8, 28672, 32000),
        "llama-3.1-70b": _config(80, 8192, 64, 8, 28672, 128256),
    }
)
"""Sizes from the models' own `config.json` on the hub, in bf16; for Qwen3.5 without its vision encoder and
multi-token prediction layers."""


def known_config(name: str) -> Mapping[str, Any] | None:
    """Return the built-in sizes of a model by its hub name, such as `Qwen/Qwen2.5-7B-Instruct`, or None."""
    match = _NAMES.fullmatch(name)
    return None if match is None else BUILT_IN.get(match[1].lower())
