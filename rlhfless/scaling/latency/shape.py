"""The sizes of a model that decide its speed, from its Hugging Face config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes per number."""


class UnknownShape(ValueError):
    """A config whose sizes cannot be determined. The message names the key."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder-only transformer with gated MLPs. Counts of parameters leave out norms and biases."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    dense_mlp: int
    """Parameters of the MLPs (shared experts among them) that every token passes, over all layers."""
    expert_mlp: int
    """Parameters of one routed expert, over all layers that have them; 0 in a dense model."""
    experts: int
    experts_per_token: int
    tied: bool
    """Whether the output head is the embedding."""
    weight_bytes: int
    """Bytes per parameter."""
    kv_number_bytes: int | None = None
    """Bytes per number of KV; those of a parameter if None."""

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """The shape by the values of a `config.json`. Raises UnknownShape."""
        if "kv_lora_rank" in config:
            raise UnknownShape("`kv_lora_rank`: latent attention keeps another KV than this model of it counts")
        layers, hidden, heads = (
            _whole(config, "num_hidden_layers"),
            _whole(config, "hidden_size"),
            _whole(config, "num_attention_heads"),
        )
        experts = next((int(config[key]) for key in _EXPERT_KEYS if config.get(key)), 0)
        dense_layers = int(config.get("first_k_dense_replace", 0)) if experts else layers
        expert_width = int(config.get("moe_intermediate_size") or config.get("intermediate_size") or 0)
        shared_width = int(config.get("shared_expert_intermediate_size") or 0)
        shared_width += int(config.get("n_shared_experts") or 0) * expert_width
        dense_width = _whole(config, "intermediate_size") if dense_layers else 0
        return cls(
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            vocabulary=_whole(config, "vocab_size"),
            dense_mlp=3 * hidden * (dense_layers * dense_width + (layers - dense_layers) * shared_width),
            expert_mlp=3 * hidden * expert_width * (layers - dense_layers),
            experts=experts,
            experts_per_token=_whole(config, "num_experts_per_tok") if experts else 0,
            tied=bool(config.get("tie_word_embeddings", False)),
            weight_bytes=_bytes_of(config),
        )

    @property
    def attention(self) -> int:
        """Parameters of all attention layers."""
        return 2 * self.layers * self.hidden * self.head_dim * (self.heads + self.kv_heads)

    @property
    def head(self) -> int:
        """Parameters of the output head."""
        return self.hidden * self.vocabulary

    @property
    def parameters(self) -> int:
        """All parameters."""
        embeddings = self.head if self.tied else 2 * self.head
        return self.attention + self.dense_mlp + self.experts * self.expert_mlp + embeddings

    @property
    def active(self) -> int:
        """Parameters that one token is multiplied with."""
        return self.attention + self.dense_mlp + self.experts_per_token * self.expert_mlp + self.head

    def read(self, tokens: float) -> float:
        """Parameters that are read for a batch of `tokens` tokens: of the experts only those that a token uses."""
        asked = 1 - (1 - self.experts_per_token / self.experts) ** tokens if self.experts else 0.0
        return self.attention + self.dense_mlp + self.head + asked * self.experts * self.expert_mlp

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV per token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * (self.kv_number_bytes or self.weight_bytes)

    @property
    def total_bytes(self) -> int:
        """All weights."""
        return self.parameters * self.weight_bytes


_EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")


def _whole(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise UnknownShape(f"`{key}` of the model's config is {value!r}; a decoder-only transformer has a whole number")
    return value


def _bytes_of(config: Mapping[str, Any]) -> int:
    name = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise UnknownShape(f"`dtype` of the model's config is {name!r}; known are {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[name]
