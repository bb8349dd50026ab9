"""A model's form of attention, from its Hugging Face config.

Supported are grouped-query and latent attention, to the whole context, to a window of the last tokens, or a mix by
layer, and layers of Gated DeltaNet. Any other attention is refused, because wrong figures would go unnoticed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal


class UnknownShape(ValueError):
    """Raised for a config whose sizes cannot be determined. The message names the key."""


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): heads share one compressed KV, replicated on each
    tensor-parallel rank."""

    query_rank: int
    """Width of the compressed queries; 0 if not compressed."""
    kv_rank: int
    rope_dim: int
    """Rotated part of a head's query and key; keys share it."""
    plain_dim: int
    """Part without rotation."""
    value_dim: int

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> LatentAttention | None:
        """Return the latent attention of a config, or None for grouped-query attention. Raises UnknownShape."""
        if not config.get("kv_lora_rank"):
            return None
        names = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
        return cls(int(config.get("q_lora_rank") or 0), *(whole(config, name) for name in names))

    def parameters(self, hidden: int, heads: int) -> int:
        """Return the parameters of one layer."""
        query_dim = heads * (self.plain_dim + self.rope_dim)
        queries = self.query_rank * (hidden + query_dim) if self.query_rank else hidden * query_dim
        keys = hidden * (self.kv_rank + self.rope_dim) + self.kv_rank * heads * (self.plain_dim + self.value_dim)
        return queries + keys + heads * self.value_dim * hidden


@dataclass(frozen=True, slots=True)
class Windows:
    """The layers in which a token attends only to the last `tokens` tokens, including itself."""

    layers: int
    tokens: int

    @classmethod
    def of_config(cls, config: Mapping[str, Any], layers: int) -> Windows | None:
        """Return the windows of a model with `layers` layers, or None if every layer attends to the whole context.

        The layers come from `layer_types`, or from the rule by which transformers fills it in. Raises UnknownShape for
        attention that is neither full nor windowed, and for a window whose layers cannot be determined.
        """
        _refuse_other_attention(config)
        window, kinds = config.get("sliding_window"), config.get("layer_types")
        if kinds:
            known = {"full_attention", _WINDOWED, *([_LINEAR] if config.get("linear_num_key_heads") else ())}
            if other := sorted(set(kinds) - known):
                raise UnknownShape(f"`layer_types` of the model's config has {other[0]!r}; {_COUNTED}")
            windowed = kinds.count(_WINDOWED)
            if not windowed:
                return None  # also if the list was copied from a larger model
            if len(kinds) != layers:
                raise UnknownShape(f"`layer_types` of the model's config names {len(kinds)} of {layers} layers")
            return cls(windowed, whole(config, "sliding_window"))
        if not window or not config.get("use_sliding_window", True):
            return None
        windowed = _windowed(config, layers)
        return cls(windowed, whole(config, "sliding_window")) if windowed else None

    def attended(self, tokens: float, context_tokens: float = 0) -> float:
        """Return the number of (token, attended token) pairs of `tokens` tokens after `context_tokens`, in a
        windowed layer."""
        short = min(max(self.tokens - context_tokens, 0), tokens)  # tokens that see everything before them
        return short * (context_tokens + short / 2) + (tokens - short) * self.tokens


AttentionForm = Literal["fused", "eager", "unknown"]
"""Whether a model is trained with torch's fused attention, or with transformers' own eager attention, which keeps a
matrix of scores."""

_SUPPORTS_FUSED = re.compile(r"^ +_supports_sdpa = True", re.MULTILINE)

_IGNORED_BY_FUSED = re.compile(r"\b(s_aux|position_bias)=")
"""Attention arguments that fused attention ignores: sinks, and a position bias."""


def attention_form(config: Mapping[str, Any]) -> tuple[AttentionForm, str]:
    """Return the form, and the reason if it is not `fused`, from the values of a text model's config.json.

    When a model is loaded, its outputs are compared to determine this (rlhfless.functions.attention_check), which
    imports torch. Here only transformers' source of the model is read; models with code elsewhere are `unknown`.
    """
    if cap := config.get("attn_logit_softcapping"):
        return "eager", f"its attention has a soft cap (attn_logit_softcapping: {cap:g})"
    if not (config.get("num_attention_heads") or config.get("n_head")):
        return "fused", ""  # Mamba and RWKV have no attention
    model = str(config.get("model_type", ""))
    if "auto_map" in config or (source := _source_of(model.replace("-", "_"))) is None:
        return "unknown", f"the code of model_type {model!r} is not transformers' own"
    if not _SUPPORTS_FUSED.search(source):
        return "eager", f"transformers has no other for model_type {model!r}"
    if ignored := _IGNORED_BY_FUSED.search(source):
        return "eager", f"torch's fused attention ignores {ignored[1]} of model_type {model!r}"
    return "fused", ""


@cache
def _source_of(model: str) -> str | None:
    """Return transformers' source of a model type, which may be the text part of a model (`gemma3_text`), or None."""
    package = find_spec("transformers")
    if package is None or package.origin is None or not model.isidentifier():
        return None
    for name in (model, model.removesuffix("_text")):
        file = Path(package.origin).parent / "models" / name / f"modeling_{name}.py"
        if file.is_file():
            return file.read_text("utf-8")
    return None


@dataclass(frozen=True, slots=True)
class LinearAttention:
    """Layers of Gated DeltaNet (arXiv 2412.06464), as in transformers' Qwen3_5GatedDeltaNet: each sequence has a
    state of fixed size instead of KV."""

    layers: int
    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    kernel: int
    """Tokens covered by the convolution before the state."""
    state_number_bytes: int
    """Bytes per number of the recurrent state; the convolution uses the model's own format."""

    @classmethod
    def of_config(cls, config: Mapping[str, Any], layers: int) -> LinearAttention | None:
        """Return the linear layers of a config, or None. Raises UnknownShape for an unsupported model type."""
        if not config.get("linear_num_key_heads"):
            return None
        if (kind := config.get("model_type")) not in _GATED_DELTA_NETS:
            known = ", ".join(_GATED_DELTA_NETS)
            raise UnknownShape(f"`model_type` of the model's config is {kind!r}; linear layers are known of {known}")
        kinds = config.get("layer_types")
        every = int(config.get("full_attention_interval") or 4)
        linear = kinds.count(_LINEAR) if kinds else layers - layers // every
        if kinds and len(kinds) != layers:
            raise UnknownShape(f"`layer_types` of the model's config names {len(kinds)} of {layers} layers")
        names = ("key_heads", "key_dim", "value_heads", "value_dim", "kernel")
        keys = ("num_key_heads", "key_head_dim", "num_value_heads", "value_head_dim", "conv_kernel_dim")
        sizes = {name: whole(config, f"linear_{key}") for name, key in zip(names, keys, strict=True)}
        numbers = 2 if config.get("mamba_ssm_dtype") in ("bfloat16", "float16") else 4
        return cls(layers=linear, state_number_bytes=numbers, **sizes)

    def parameters(self, hidden: int) -> int:
        """Return the parameters of one layer: input projections, gates, the convolution, and the output."""
        values = self.value_heads * self.value_dim
        return hidden * (self._channels + 2 * values + 2 * self.value_heads) + self._channels * self.kernel

    def state_bytes(self, number_bytes: int) -> int:
        """Return the bytes that a sequence holds in all layers (`gated_delta_net_state_shape` of vLLM 0.32)."""
        convolved = (self.kernel - 1) * self._channels * number_bytes
        return self.layers * (self._state * self.state_number_bytes + convolved)

    def operations(self, tokens: float) -> float:
        """Return the operations of `tokens` tokens on the states.

        Each token reads its state twice and adds to it, at 2 operations per number.
        """
        return 6 * self.layers * self._state * tokens

    @property
    def _channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def _state(self) -> int:
        return self.value_heads * self.key_dim * self.value_dim


_LINEAR = "linear_attention"

_GATED_DELTA_NETS = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
"""`model_type` of models with these linear layers, whose full layers gate their output."""

_WINDOWED, _COUNTED = "sliding_attention", "attention to all tokens or to a window is counted"

_EVERY_LAYER = ("mistral", "mixtral", "phi3")
"""`model_type` of models whose `sliding_window` applies to every layer."""

_OTHER_ATTENTION = (
    "attention_chunk_size",
    "attn_layer_period",
    "global_head_dim",
    "index_topk",
    "mamba_d_state",
    "mamba_num_heads",
    "num_kv_shared_layers",
    "ssm_state_size",
    "swa_num_key_value_heads",
)
"""Keys of unsupported attention: over chunks or selected tokens, layers with a state instead of KV or with another
layer's KV, and windowed layers with other heads."""


def _windowed(config: Mapping[str, Any], layers: int) -> int:
    """Return the number of windowed layers of a config without `layer_types`.

    They are all but each `sliding_window_pattern`th, all from `max_window_layers` on, or all for certain model types.
    """
    kind, pattern = config.get("model_type"), config.get("sliding_window_pattern")
    pattern = pattern or {"gemma2": 2, "gemma3_text": 6}.get(str(kind))
    if pattern:
        return layers - layers // int(pattern)
    if "max_window_layers" in config:
        return max(layers - whole(config, "max_window_layers"), 0)
    if kind in _EVERY_LAYER:
        return layers
    raise UnknownShape(
        f"`sliding_window` of the model's config is {config['sliding_window']}, and nothing says in which layers; add "
        "`layer_types`"
    )


def _refuse_other_attention(config: Mapping[str, Any]) -> None:
    for key in _OTHER_ATTENTION:
        if config.get(key):
            raise UnknownShape(f"`{key}` of the model's config: only {_COUNTED}")


def whole(config: Mapping[str, Any], key: str) -> int:
    """Return a positive whole number of a config. Raises UnknownShape."""
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise UnknownShape(f"`{key}` of the model's config is {value!r}; a decoder-only transformer has a whole number")
    return value
