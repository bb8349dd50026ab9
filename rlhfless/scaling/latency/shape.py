"""The sizes of a model that determine its speed, from its Hugging Face config.

Supported are the forms of attention in `attention.py`, dense and routed gated MLPs, and weights in 16, 8 or 4 bits. Any
other quantisation is refused, because wrong figures would go unnoticed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rlhfless.scaling.latency.attention import (
    AttentionForm,
    LatentAttention,
    LinearAttention,
    UnknownShape,
    Windows,
    attention_form,
    whole,
)

DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes per number."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder-only transformer with gated MLPs. Parameter counts exclude norms and biases."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    dense_mlp: int
    """Parameters of the MLPs that every token passes through, including shared experts, over all layers."""
    expert_mlp: int
    """Parameters of one routed expert over all layers that have it; 0 in a dense model."""
    experts: int
    experts_per_token: int
    tied: bool
    """Whether the output head shares the embedding's weights."""
    weight_bytes: int
    """Bytes per parameter."""
    kv_number_bytes: int | None = None
    """Bytes per number of KV; same as the parameters if None."""
    latent: LatentAttention | None = None
    """None for grouped-query attention."""
    matrix_bytes: float | None = None
    """Bytes per parameter of attention and MLPs if quantised; embeddings and head never are."""
    plain_attention: bool = False
    """Whether attention is excluded from quantisation."""
    product_bits: int = 16
    """Bits in which the products with attention and MLP weights are computed."""
    windows: Windows | None = None
    """None if every layer attends to the whole context."""
    expert_layers: int = 0
    """Number of layers with routed experts."""
    dispatched: bool = False
    """Whether ranks can divide the experts, and send tokens to them."""
    attention_form: AttentionForm = "fused"
    """Form of attention in training."""
    linear: LinearAttention | None = None
    """None if every layer has keys and values. Otherwise full layers gate their output, with one gate per number of
    a query."""

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """Return the shape described by the values of a `config.json`. Raises UnknownShape."""
        layers, hidden, heads = (
            whole(config, "num_hidden_layers"),
            whole(config, "hidden_size"),
            whole(config, "num_attention_heads"),
        )
        experts = next((int(config[key]) for key in _EXPERT_KEYS if config.get(key)), 0)
        dense_layers = _dense_layers(config, layers) if experts else layers
        latent = LatentAttention.of_config(config)
        matrix_bytes, product_bits = _quantised(config)
        expert_width = int(config.get("moe_intermediate_size") or config.get("intermediate_size") or 0)
        shared_width = int(config.get("shared_expert_intermediate_size") or 0)
        shared_width += int(config.get("n_shared_experts") or 0) * expert_width
        dense_width = whole(config, "intermediate_size") if dense_layers else 0
        return cls(
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=1 if latent else int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            vocabulary=whole(config, "vocab_size"),
            dense_mlp=3 * hidden * (dense_layers * dense_width + (layers - dense_layers) * shared_width),
            expert_mlp=3 * hidden * expert_width * (layers - dense_layers),
            experts=experts,
            experts_per_token=whole(config, "num_experts_per_tok") if experts else 0,
            tied=bool(config.get("tie_word_embeddings", str(config.get("model_type")).startswith("gemma"))),
            weight_bytes=_bytes_of(config),
            latent=latent,
            matrix_bytes=matrix_bytes,
            plain_attention=(config.get("quantization_config") or {}).get("quant_method") == _MXFP4,
            product_bits=product_bits,
            windows=Windows.of_config(config, layers),
            expert_layers=layers - dense_layers,
            dispatched=config.get("model_type") in DISPATCHED,
            attention_form=attention_form(config)[0] if "model_type" in config else "fused",
            linear=LinearAttention.of_config(config, layers),
        )

    def up_to(self, tokens: int) -> ModelShape:
        """Return the shape for sequences of at most `tokens` tokens: a window that holds them all is dropped."""
        return replace(self, windows=None) if self.windows and tokens <= self.windows.tokens else self

    def in_bits(self, bits: int) -> ModelShape:
        """Return the shape with its layers' weights and products reduced to at most `bits` bits."""
        if bits >= 8 * self._matrix_bytes:
            return replace(self, product_bits=min(self.product_bits, bits))
        return replace(self, matrix_bytes=bits / 8, product_bits=min(self.product_bits, bits))

    @property
    def full_layers(self) -> int:
        """Return the number of layers that attend to the whole context."""
        return self.kv_layers - (self.windows.layers if self.windows else 0)

    @property
    def kv_layers(self) -> int:
        """Return the number of layers with keys and values."""
        return self.layers - (self.linear.layers if self.linear else 0)

    @property
    def attention(self) -> int:
        """Return the parameters of all attention layers."""
        if self.latent:
            return self.layers * self.latent.parameters(self.hidden, self.heads)
        if self.linear:
            full = self.kv_layers * self.hidden * self.head_dim * (3 * self.heads + 2 * self.kv_heads)
            return full + self.linear.layers * self.linear.parameters(self.hidden)
        return 2 * self.layers * self.hidden * self.head_dim * (self.heads + self.kv_heads)

    @property
    def divisible_experts(self) -> int:
        """Return the number of experts that ranks can divide; 0 if they cannot."""
        return self.experts if self.dispatched else 0

    @property
    def head(self) -> int:
        """Return the parameters of the output head."""
        return self.hidden * self.vocabulary

    @property
    def parameters(self) -> int:
        embeddings = self.head if self.tied else 2 * self.head
        return self.attention + self.dense_mlp + self.experts * self.expert_mlp + embeddings

    @property
    def active(self) -> int:
        """Return the number of parameters that one token is multiplied with."""
        return self.attention + self.dense_mlp + self.experts_per_token * self.expert_mlp + self.head

    @property
    def token_keys(self) -> float:
        """Return the number of keys whose attention takes a token as long as a layer's other products.

        A product takes 2 FLOPs per parameter, and attention 4 per key and number of the token's queries.
        """
        return (self.active - self.head) / (2 * self.layers * self.heads * self.head_dim)

    def read(self, tokens: float) -> float:
        """Return the parameters read for a batch of `tokens` tokens: only experts used by a token count."""
        asked = 1 - (1 - self.experts_per_token / self.experts) ** tokens if self.experts else 0.0
        return self.attention + self.dense_mlp + self.head + asked * self.experts * self.expert_mlp

    def read_bytes(self, tokens: float) -> float:
        """Return the bytes of the weights read for a batch of `tokens` tokens."""
        return self._bytes(self.read(tokens) - self.head) + self.head * self.weight_bytes

    @property
    def kv_bytes(self) -> int:
        """Return the bytes of KV per token, over all layers with KV.

        With windows this is an upper bound: a layer drops tokens behind its window.
        """
        return self.kv_layers * self.kv_layer_bytes

    @property
    def state_bytes(self) -> int:
        """Return the bytes of a sequence's states, which do not depend on its length; 0 without linear layers."""
        return self.linear.state_bytes(self.weight_bytes) if self.linear else 0

    @property
    def kv_layer_bytes(self) -> int:
        """Return the bytes of KV per token and layer."""
        return self.kv_width * (self.kv_number_bytes or self.weight_bytes)

    @property
    def kv_width(self) -> int:
        """Return the numbers of KV per token and layer."""
        if self.latent:
            return self.latent.kv_rank + self.latent.rope_dim
        return 2 * self.kv_heads * self.head_dim

    @property
    def query_width(self) -> int:
        """Return the width of a token's queries in one layer."""
        return self.heads * (self.latent.plain_dim + self.latent.rope_dim if self.latent else self.head_dim)

    @property
    def key_width(self) -> int:
        """Return the width of a token's keys in one layer, as multiplied with queries in training."""
        return self.query_width if self.latent else self.kv_heads * self.head_dim

    def attention_operations(self, tokens: int, context_tokens: int) -> float:
        """Return the operations of attention while `tokens` tokens are prefilled after `context_tokens`."""
        pairs = self.full_layers * tokens * (context_tokens + tokens / 2)
        if self.windows:
            pairs += self.windows.layers * self.windows.attended(tokens, context_tokens)
        values = self.heads * (self.latent.value_dim if self.latent else self.head_dim)
        states = self.linear.operations(tokens) if self.linear else 0.0
        return 2 * (self.query_width + values) * pairs + states

    @property
    def total_bytes(self) -> int:
        """Return the bytes of all weights."""
        matrices = self.attention + self.dense_mlp + self.experts * self.expert_mlp
        return int(self._bytes(matrices)) + (self.parameters - matrices) * self.weight_bytes

    @property
    def expert_bytes(self) -> float:
        """Return the bytes of all routed experts."""
        return self.experts * self.expert_mlp * self._matrix_bytes

    def _bytes(self, matrices: float) -> float:
        """Return the bytes of layer parameters, which must include all of attention's."""
        plain = self.attention if self.plain_attention else 0
        return plain * self.weight_bytes + (matrices - plain) * self._matrix_bytes

    @property
    def _matrix_bytes(self) -> float:
        return self.weight_bytes if self.matrix_bytes is None else self.matrix_bytes


_FLOATS = {"FP8": (1.0, 8), "NVFP4": (0.5 + 1 / 16, 4)}
"""Bytes per parameter and bits of products of ModelOpt's formats. In NVFP4, each block of 16 numbers has an 8-bit
scale."""

_MXFP4 = "mxfp4"
"""The format of gpt-oss, used only for its experts: each block of 32 4-bit numbers has an 8-bit scale (OCP
Microscaling Formats v1.0), and products are computed in 16 bits."""


def _dense_layers(config: Mapping[str, Any], layers: int) -> int:
    """Return the number of layers without experts in a model with experts."""
    every = config.get("moe_layer_freq") or config.get("decoder_sparse_step") or 1
    routed = [bool(one) for one in every] if isinstance(every, list) else [not (i + 1) % every for i in range(layers)]
    plain = {*range(int(config.get("first_k_dense_replace") or 0)), *(config.get("mlp_only_layers") or ())}
    return sum(index in plain or not routed[index] for index in range(layers))


def _quantised(config: Mapping[str, Any]) -> tuple[float | None, int]:
    """Return bytes per parameter of the matrices, and bits of their products. Raises UnknownShape."""
    given = config.get("quantization_config")
    if not given:
        return None, 16
    method = given.get("quant_method")
    if method == "fp8":
        return _FLOATS["FP8"]
    if method == _MXFP4:
        return 0.5 + 1 / 32, 16
    if method in ("awq", "gptq") and given.get("bits") in (4, 8):
        return given["bits"] / 8, 16
    if method == "modelopt" and (algorithm := given.get("quant_algo")) in _FLOATS:
        return _FLOATS[algorithm]
    groups = list((given.get("config_groups") or {}).values())
    if method == "compressed-tensors" and len(groups) == 1 and groups[0].get("weights", {}).get("num_bits") in (4, 8):
        activations = groups[0].get("input_activations") or {}
        return groups[0]["weights"]["num_bits"] / 8, int(activations.get("num_bits", 16))
    raise UnknownShape(
        f"`quantization_config` of the model's config is {dict(given)}; known are fp8, mxfp4, awq and gptq of 4 or "
        f"8 bits, modelopt's {' and '.join(_FLOATS)}, and compressed-tensors with one group"
    )


DISPATCHED = frozenset(
    [
        "afmoe",
        "axk1",
        "axk2",
        "cohere2_moe",
        "deepseek_ocr2_text",
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "deepseek_v4",
        "dots1",
        "ernie4_5_moe",
        "ernie4_5_vl_moe_text",
        "exaone_moe",
        "flex_olmo",
        "glm4_moe",
        "glm4_moe_lite",
        "glm4v_moe_text",
        "glm5_next_text",
        "glm_moe_dsa",
        "gpt_oss",
        "hunyuan_v1_moe",
        "hy_v3",
        "kimi_linear",
        "laguna",
        "lfm2_moe",
        "mellum",
        "minimax",
        "minimax_m2",
        "minimax_m3_vl_text",
        "mistral4",
        "mixtral",
        "olmoe",
        "openai_privacy_filter",
        "phimoe",
        "qwen2_moe",
        "qwen3_5_moe_text",
        "qwen3_moe",
        "qwen3_next",
        "qwen3_omni_moe_talker_text",
        "qwen3_vl_moe_text",
        "qwen4_exp_text",
        "solar_open",
        "step3p5",
        "zaya",
    ]
)
"""Model types for which transformers 5.19 has a plan to send tokens to experts on other ranks."""

_EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")


def _bytes_of(config: Mapping[str, Any]) -> int:
    name = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise UnknownShape(f"`dtype` of the model's config is {name!r}; known are {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[name]
