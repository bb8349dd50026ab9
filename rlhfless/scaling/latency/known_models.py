"""Sizes of models that a scenario or a plan may name without their files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_NAMES = re.compile(
    r"(?:qwen|meta-llama)/(?:meta-)?(qwen2\.5-[\d.]+b|llama-[\d.]+-[\d]+b)(?:-instruct)?", re.IGNORECASE
)


def _config(
    layers: int, hidden: int, heads: int, kv_heads: int, mlp: int, vocabulary: int, tied: bool = False
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
        }
    )


BUILT_IN: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "qwen2.5-0.5b": _config(24, 896, 14, 2, 4864, 151936, tied=True),
        "qwen2.5-1.5b": _config(28, 1536, 12, 2, 8960, 151936, tied=True),
        "qwen2.5-3b": _config(36, 2048, 16, 2, 11008, 151936, tied=True),
        "qwen2.5-7b": _config(28, 3584, 28, 4, 18944, 152064),
        "qwen2.5-14b": _config(48, 5120, 40, 8, 13824, 152064),
        "qwen2.5-32b": _config(64, 5120, 40, 8, 27648, 152064),
        "llama-3.1-8b": _config(32, 4096, 32, 8, 14336, 128256),
        "llama-2-70b": _config(80, 8192, 64, 8, 28672, 32000),
        "llama-3.1-70b": _config(80, 8192, 64, 8, 28672, 128256),
    }
)
"""Sizes by the models' own `config.json` on the hub, in bf16."""


def known_config(name: str) -> Mapping[str, Any] | None:
    """The sizes of a model by its name on the hub, such as `Qwen/Qwen2.5-7B-Instruct`; None if it is not built in."""
    match = _NAMES.fullmatch(name)
    return None if match is None else BUILT_IN.get(match[1].lower())
