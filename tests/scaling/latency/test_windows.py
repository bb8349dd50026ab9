"""Models with sliding windows: layers of each kind from real configs, and sizes and times worked by hand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless.scaling.latency.attention import Windows
from rlhfless.scaling.latency.devices import DeviceSheet
from rlhfless.scaling.latency.roofline import Roofline
from rlhfless.scaling.latency.shape import ModelShape
from rlhfless.scaling.memory import kv_sequence_bytes

GPT_OSS_20B: dict[str, Any] = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 24,
    "hidden_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 2880,
    "vocab_size": 201088,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
}
GEMMA_3_27B: dict[str, Any] = {
    "model_type": "gemma3_text",
    "num_hidden_layers": 62,
    "hidden_size": 5376,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "intermediate_size": 21504,
    "vocab_size": 262208,
    "sliding_window": 1024,
}
QWEN_2_5_7B: dict[str, Any] = {
    "model_type": "qwen2",
    "num_hidden_layers": 28,
    "hidden_size": 3584,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "sliding_window": 131072,
    "max_window_layers": 28,
    "use_sliding_window": False,
}
GEMMA, GPT_OSS = ModelShape.of_config(GEMMA_3_27B), ModelShape.of_config(GPT_OSS_20B)


def device() -> DeviceSheet:
    """1 PFLOP/s, 1 TB/s, no losses."""
    rates: dict[str, object] = {"flops_per_s": 1e15, "memory_bytes_per_s": 1e12, "memory_bytes": 80e9}
    rates |= dict.fromkeys(("link_bytes_per_s", "host_bytes_per_s", "all_reduce_s"), 1.0)
    rates |= dict.fromkeys(("matmul_efficiency", "weights_efficiency", "attention_efficiency"), 1.0)
    figures = {name: {"value": value, "source": "test"} for name, value in rates.items()}
    return DeviceSheet.model_validate(
        {"kind": "test", "all_reduce_bytes_per_s": {"value": {2: 1.0}, "source": "test"}, **figures}
    )


def test_gpt_oss_has_a_window_in_every_second_layer_and_experts_of_4_bits() -> None:
    """20.9 billion parameters, 3.6 of them active, and a checkpoint of 12.8 GiB (arXiv 2508.10925, table 1)."""
    assert GPT_OSS.windows == Windows(12, 128)
    assert GPT_OSS.parameters == 637_009_920 + 19_110_297_600 + 2 * 579_133_440
    assert GPT_OSS.active == pytest.approx(3.6e9, rel=0.01)
    assert GPT_OSS.total_bytes == 19_110_297_600 * 17 // 32 + 2 * (637_009_920 + 2 * 579_133_440)
    assert GPT_OSS.total_bytes / 2**30 == pytest.approx(12.8, rel=0.001)
    assert GPT_OSS.kv_bytes == 24 * 2 * 8 * 64 * 2
    # A batch that needs every expert reads all but the embedding.
    assert GPT_OSS.read_bytes(10_000) == pytest.approx(GPT_OSS.total_bytes - 2 * 579_133_440)


def test_gemma_attends_to_the_whole_context_in_every_sixth_layer() -> None:
    assert GEMMA.windows == Windows(52, 1024)
    assert GEMMA.parameters == 62 * (66_060_288 + 346_816_512) + 1_409_630_208
    kinds = (["sliding_attention"] * 5 + ["full_attention"]) * 10 + ["sliding_attention"] * 2
    assert ModelShape.of_config(GEMMA_3_27B | {"layer_types": kinds, "tie_word_embeddings": True}) == GEMMA


def test_rules_of_other_configs() -> None:
    def windows(**keys: object) -> Windows | None:
        return ModelShape.of_config(QWEN_2_5_7B | keys).windows

    assert windows() is None  # as the config says
    # The list of a model of which these layers were taken.
    assert windows(layer_types=["full_attention"] * 80) is None
    assert windows(use_sliding_window=True) is None  # from layer 28 of 28 on
    assert windows(use_sliding_window=True, max_window_layers=21) == Windows(7, 131072)
    plain = {key: value for key, value in QWEN_2_5_7B.items() if "window" not in key}
    seven = ModelShape.of_config(plain | {"model_type": "mistral", "sliding_window": 4096})
    assert (seven.windows, seven.full_layers) == (Windows(28, 4096), 0)
    assert ModelShape.of_config(plain | {"model_type": "gemma2", "sliding_window": 4096}).windows == Windows(14, 4096)


def test_reading_and_computing_by_hand() -> None:
    """62 layers have 2 x 16 x 128 numbers of 2 bytes a token; at 1 TB/s."""
    model, full = Roofline(GEMMA, device()), Roofline(GEMMA.up_to(1024), device())
    assert model.context_s == pytest.approx(10 * 8192 / 1e12)
    assert full.context_s == pytest.approx(62 * 8192 / 1e12)
    assert model.iteration_s(3) - full.iteration_s(3) == pytest.approx(3 * 52 * 1024 * 8192 / 1e12)
    # 1,000 tokens after 500: the first 524 see all before them, 500 to 1,023; the others see 1,024.
    pairs = 10 * 1000 * (500 + 500) + 52 * (524 * (500 + 262) + 476 * 1024)
    assert GEMMA.attention_operations(1000, 500) == 2 * (4096 + 4096) * pairs
    assert GEMMA.up_to(1025) == GEMMA


@given(st.integers(1, 3000), st.integers(0, 3000), st.integers(1, 2000))
def test_attended_pairs_are_the_sum_over_tokens(tokens: int, context: int, window: int) -> None:
    """Of each token, those before it in the window; up to half a pair a token, which the closed form leaves out."""
    counted = sum(min(context + index, window) for index in range(tokens))
    assert counted <= Windows(1, window).attended(tokens, context) <= counted + tokens / 2


def test_a_sequence_fills_the_cache_as_vllm_reserves_it() -> None:
    """Of gemma, 10 layers and 60, in groups of 10; with batches of 512 tokens, two of them in flight, a windowed layer
    holds at most 1,023 + 1,024 tokens. gpt-oss has as many of each, and Mistral's layers are all alike."""
    assert kv_sequence_bytes(GEMMA, "bfloat16", 1, 32_768, 512) == (10 * 32_768 + 60 * 2047) * 8192
    assert kv_sequence_bytes(GEMMA, "bfloat16", 1, 1000, 512) == 70 * 1000 * 8192
    assert kv_sequence_bytes(GPT_OSS, "bfloat16", 2, 32_768, 512) == 12 * (32_768 + 127 + 1024) * 1024
    assert kv_sequence_bytes(GEMMA.up_to(1024), "bfloat16", 1, 1000, 512) == 62 * 1000 * 8192
