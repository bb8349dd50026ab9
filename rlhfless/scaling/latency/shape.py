"""The sizes of a model that decide its speed, from its Hugging Face config.

Known are grouped-query and latent attention over the whole context, dense and routed gated MLPs, and weights in 16, 8
or 4 bits. Any other attention or quantisation is refused: nobody would see that figures of such a model are wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes per number."""


class UnknownShape(ValueError):
    """A config whose sizes cannot be determined. The message names the key."""


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): heads share one compressed KV, which each
    tensor-parallel rank holds whole."""

    query_rank: int
    """Width of the compressed queries; 0 if they are not compressed."""
    kv_rank: int
    rope_dim: int
    """Of a head's query and key, the part with rotation; keys share it."""
    plain_dim: int
    """The part without."""
    value_dim: int

    def parameters(self, hidden: int, heads: int) -> int:
        """Of one layer."""
        query_dim = heads * (self.plain_dim + self.rope_dim)
        queries = self.query_rank * (hidden + query_dim) if self.query_rank else hidden * query_dim
        keys = hidden * (self.kv_rank + self.rope_dim) + self.kv_rank * heads * (self.plain_dim + self.value_dim)
        return queries + keys + heads * self.value_dim * hidden


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
    latent: LatentAttention | None = None
    """None: grouped-query attention."""
    matrix_bytes: float | None = None
    """Bytes per parameter of attention and MLPs, if they are quantised; embeddings and head never are."""
    product_bits: int = 16
    """Bits in which the products of attention's and MLPs' weights are computed."""

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """The shape by the values of a `config.json`. Raises UnknownShape."""
        _refuse_other_attention(config)
        layers, hidden, heads = (
            _whole(config, "num_hidden_layers"),
            _whole(config, "hidden_size"),
            _whole(config, "num_attention_heads"),
        )
        experts = next((int(config[key]) for key in _EXPERT_KEYS if config.get(key)), 0)
        dense_layers = _dense_layers(config, layers) if experts else layers
        latent = _latent(config)
        matrix_bytes, product_bits = _quantised(config)
        expert_width = int(config.get("moe_intermediate_size") or config.get("intermediate_size") or 0)
        shared_width = int(config.get("shared_expert_intermediate_size") or 0)
        shared_width += int(config.get("n_shared_experts") or 0) * expert_width
        dense_width = _whole(config, "intermediate_size") if dense_layers else 0
        return cls(
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=1 if latent else int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            vocabulary=_whole(config, "vocab_size"),
            dense_mlp=3 * hidden * (dense_layers * dense_width + (layers - dense_layers) * shared_width),
            expert_mlp=3 * hidden * expert_width * (layers - dense_layers),
            experts=experts,
            experts_per_token=_whole(config, "num_experts_per_tok") if experts else 0,
            tied=bool(config.get("tie_word_embeddings", False)),
            weight_bytes=_bytes_of(config),
            latent=latent,
            matrix_bytes=matrix_bytes,
            product_bits=product_bits,
        )

    @property
    def attention(self) -> int:
        """Parameters of all attention layers."""
        if self.latent:
            return self.layers * self.latent.parameters(self.hidden, self.heads)
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

    def read_bytes(self, tokens: float) -> float:
        """Bytes of the weights that are read for a batch of `tokens` tokens."""
        return (self.read(tokens) - self.head) * self._matrix_bytes + self.head * self.weight_bytes

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV per token."""
        return self.layers * self.kv_width * (self.kv_number_bytes or self.weight_bytes)

    @property
    def kv_width(self) -> int:
        """Numbers of KV per token and layer."""
        if self.latent:
            return self.latent.kv_rank + self.latent.rope_dim
        return 2 * self.kv_heads * self.head_dim

    @property
    def query_width(self) -> int:
        """Numbers of the queries of a token in one layer."""
        return self.heads * (self.latent.plain_dim + self.latent.rope_dim if self.latent else self.head_dim)

    @property
    def key_width(self) -> int:
        """Numbers of the keys of a token in one layer, as they are multiplied with queries in training."""
        return self.query_width if self.latent else self.kv_heads * self.head_dim

    @property
    def pair_operations(self) -> int:
        """Operations of attention for a prefilled token and one that it attends to."""
        values = self.heads * (self.latent.value_dim if self.latent else self.head_dim)
        return 2 * self.layers * (self.query_width + values)

    @property
    def total_bytes(self) -> int:
        """All weights."""
        matrices = self.attention + self.dense_mlp + self.experts * self.expert_mlp
        return int(matrices * self._matrix_bytes) + (self.parameters - matrices) * self.weight_bytes

    @property
    def expert_bytes(self) -> float:
        """All routed experts."""
        return self.experts * self.expert_mlp * self._matrix_bytes

    @property
    def _matrix_bytes(self) -> float:
        return self.weight_bytes if self.matrix_bytes is None else self.matrix_bytes


_OTHER_ATTENTION = (
    "attention_chunk_size",
    "attn_layer_period",
    "index_topk",
    "linear_num_key_heads",
    "mamba_d_state",
    "mamba_num_heads",
    "ssm_state_size",
)
"""Keys of attention over chunks or chosen tokens, and of layers with a state in place of KV."""

_FLOATS = {"FP8": (1.0, 8), "NVFP4": (0.5 + 1 / 16, 4)}
"""Bytes per parameter and bits of products of ModelOpt's formats; a block of 16 numbers of NVFP4 has a scale of 8
bits."""


def _refuse_other_attention(config: Mapping[str, Any]) -> None:
    kinds = sorted(set(config.get("layer_types") or ()) - {"full_attention"})
    if kinds:
        raise UnknownShape(f"`layer_types` of the model's config has {kinds[0]!r}; only full attention is counted")
    if config.get("sliding_window") and config.get("use_sliding_window", True) and not config.get("layer_types"):
        raise UnknownShape(f"`sliding_window` is {config['sliding_window']}; only full attention is counted")
    for key in _OTHER_ATTENTION:
        if config.get(key):
            raise UnknownShape(f"`{key}` of the model's config: only full attention over KV is counted")


def _latent(config: Mapping[str, Any]) -> LatentAttention | None:
    if not config.get("kv_lora_rank"):
        return None
    names = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    return LatentAttention(int(config.get("q_lora_rank") or 0), *(_whole(config, name) for name in names))


def _dense_layers(config: Mapping[str, Any], layers: int) -> int:
    """Layers of a model with experts that have none."""
    every = config.get("moe_layer_freq") or config.get("decoder_sparse_step") or 1
    routed = [bool(one) for one in every] if isinstance(every, list) else [not (i + 1) % every for i in range(layers)]
    plain = {*range(int(config.get("first_k_dense_replace") or 0)), *(config.get("mlp_only_layers") or ())}
    return sum(index in plain or not routed[index] for index in range(layers))


def _quantised(config: Mapping[str, Any]) -> tuple[float | None, int]:
    """Bytes per parameter of the matrices, and bits of their products. Raises UnknownShape."""
    given = config.get("quantization_config")
    if not given:
        return None, 16
    method = given.get("quant_method")
    if method == "fp8":
        return _FLOATS["FP8"]
    if method in ("awq", "gptq") and given.get("bits") in (4, 8):
        return given["bits"] / 8, 16
    if method == "modelopt" and (algorithm := given.get("quant_algo")) in _FLOATS:
        return _FLOATS[algorithm]
    groups = list((given.get("config_groups") or {}).values())
    if method == "compressed-tensors" and len(groups) == 1 and groups[0].get("weights", {}).get("num_bits") in (4, 8):
        activations = groups[0].get("input_activations") or {}
        return groups[0]["weights"]["num_bits"] / 8, int(activations.get("num_bits", 16))
    raise UnknownShape(
        f"`quantization_config` of the model's config is {dict(given)}; known are fp8, awq and gptq of 4 or 8 bits, "
        f"modelopt's {' and '.join(_FLOATS)}, and compressed-tensors with one group"
    )


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
