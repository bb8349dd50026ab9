"""A model's form of attention, from its Hugging Face config.

Known are grouped-query and latent attention, to the whole context or to a window of the last tokens, or both by layer,
and layers of Gated DeltaNet. Any other attention is refused: nobody would see that figures of such a model are wrong.
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

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> LatentAttention | None:
        """None for a model with grouped-query attention. Raises UnknownShape."""
        if not config.get("kv_lora_rank"):
            return None
        names = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
        return cls(int(config.get("q_lora_rank") or 0), *(whole(config, name) for name in names))

    def parameters(self, hidden: int, heads: int) -> int:
        """Of one layer."""
        query_dim = heads * (self.plain_dim + self.rope_dim)
        queries = self.query_rank * (hidden + query_dim) if self.query_rank else hidden * query_dim
        keys = hidden * (self.kv_rank + self.rope_dim) + self.kv_rank * heads * (self.plain_dim + self.value_dim)
        return queries + keys + heads * self.value_dim * hidden


@dataclass(frozen=True, slots=True)
class Windows:
    """The layers in which a token attends to the last `tokens` tokens only, itself among them."""

    layers: int
    tokens: int

    @classmethod
    def of_config(cls, config: Mapping[str, Any], layers: int) -> Windows | None:
        """The windows of a model with `layers` layers; None if every layer attends to the whole context.

        The layers are those of `layer_types`, or of the rule by which transformers fills it in. Raises UnknownShape for
        attention that is neither full nor to a window, and for a window whose layers neither tells.
        """
        _refuse_other_attention(config)
        window, kinds = config.get("sliding_window"), config.get("layer_types")
        if kinds:
            known = {"full_attention", _WINDOWED, *([_LINEAR] if config.get("linear_num_key_heads") else ())}
            if other := sorted(set(kinds) - known):
                raise UnknownShape(f"`layer_types` of the model's config has {other[0]!r}; {_COUNTED}")
            windowed = kinds.count(_WINDOWED)
            if not windowed:
                return None  # also where the list is of the model that layers were taken from
            if len(kinds) != layers:
                raise UnknownShape(f"`layer_types` of the model's config names {len(kinds)} of {layers} layers")
            return cls(windowed, whole(config, "sliding_window"))
        if not window or not config.get("use_sliding_window", True):
            return None
        windowed = _windowed(config, layers)
        return cls(windowed, whole(config, "sliding_window")) if windowed else None

    def attended(self, tokens: float, context_tokens: float = 0) -> float:
        """The pairs of one of `tokens` tokens and one that it attends to, in a windowed layer and behind
        `context_tokens` others; the last of them have only the window before them."""
        short = min(max(self.tokens - context_tokens, 0), tokens)  # tokens that see all that is before them
        return short * (context_tokens + short / 2) + (tokens - short) * self.tokens


AttentionForm = Literal["fused", "eager", "unknown"]
"""Whether a model is trained with torch's fused attention, or transformers' own, which keeps a matrix of scores."""

_SUPPORTS_FUSED = re.compile(r"^ +_supports_sdpa = True", re.MULTILINE)

_IGNORED_BY_FUSED = re.compile(r"\b(s_aux|position_bias)=")
"""Arguments of attention that the fused one ignores: sinks, and a bias of positions."""


def attention_form(config: Mapping[str, Any]) -> tuple[AttentionForm, str]:
    """Return the form, and the reason where it is not `fused`, from the values of a text model's config.json.

    The load of a model compares outputs to decide this (rlhfless.functions.attention_form), and imports torch. Here
    transformers' source of the model is read; it is `unknown` for a model whose code is elsewhere.
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
    """transformers' source of a model type, which may be the text part of a model (`gemma3_text`)."""
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
    """Layers of Gated DeltaNet (arXiv 2412.06464), as transformers' Qwen3_5GatedDeltaNet has them: each sequence has a
    state of fixed size in place of KV."""

    layers: int
    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    kernel: int
    """Tokens that the convolution before the state sees."""
    state_number_bytes: int
    """Bytes per number of the recurrent state; the convolution's are of the model's own."""

    @classmethod
    def of_config(cls, config: Mapping[str, Any], layers: int) -> LinearAttention | None:
        """None for a model without such layers. Raises UnknownShape for a model type whose layers are not known."""
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
        """Of one layer: projections of queries, keys, values and gates, the convolution, and the output."""
        values = self.value_heads * self.value_dim
        return hidden * (self._channels + 2 * values + 2 * self.value_heads) + self._channels * self.kernel

    def state_bytes(self, number_bytes: int) -> int:
        """Bytes that a sequence holds in all layers (`gated_delta_net_state_shape` of vLLM 0.32)."""
        convolved = (self.kernel - 1) * self._channels * number_bytes
        return self.layers * (self._state * self.state_number_bytes + convolved)

    def operations(self, tokens: float) -> float:
        """Operations of `tokens` tokens on the states: each reads its state twice, and adds to it, in 2 operations a
        number."""
        return 6 * self.layers * self._state * tokens

    @property
    def _channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def _state(self) -> int:
        return self.value_heads * self.key_dim * self.value_dim


_LINEAR = "linear_attention"

_GATED_DELTA_NETS = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
"""`model_type` of models whose linear layers are these, and whose full ones gate their output."""

_WINDOWED, _COUNTED = "sliding_attention", "attention to all tokens or to a window is counted"

_EVERY_LAYER = ("mistral", "mixtral", "phi3")
"""`model_type` of models whose `sliding_window` holds in every layer."""

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
"""Keys of attention over chunks or chosen tokens, of layers with a state in place of KV or with another layer's KV, and
of windowed layers with other heads."""


def _windowed(config: Mapping[str, Any], layers: int) -> int:
    """Windowed layers of a config without `layer_types`: all but each `sliding_window_pattern`th, all from
    `max_window_layers` on, or all of a model type that is known for it."""
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
    """A count of a config. Raises UnknownShape."""
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise UnknownShape(f"`{key}` of the model's config is {value!r}; a decoder-only transformer has a whole number")
    return value
