"""Qwen3.5: layers of Gated DeltaNet among layers of full attention, by transformers' own model and by hand."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3_5MoeTextConfig, Qwen3_5TextConfig

from fakes.tiny_scenario import scenario
from rlhfless.scaling.latency.attention import UnknownShape
from rlhfless.scaling.latency.devices import device_of
from rlhfless.scaling.latency.known_models import BUILT_IN
from rlhfless.scaling.latency.roofline import Roofline
from rlhfless.scaling.latency.shape import ModelShape
from rlhfless.scaling.memory import kv_sequence_bytes
from rlhfless.sim.scenarios.timing import DoesNotFit, kv_tokens

QWEN_27B = ModelShape.of_config(BUILT_IN["qwen3.5-27b"])
KV_BYTES = 16 * 2 * 4 * 256 * 2
"""Of a token: 16 of 64 layers, keys and values, 4 heads of 256 numbers in bf16."""
STATE_BYTES = 48 * (48 * 128 * 128 * 4 + 3 * (2 * 16 * 128 + 48 * 128) * 2)
"""Of a sequence: 48 layers, the state of 48 heads in float32, and three tokens of the convolution in bf16."""


@pytest.mark.parametrize(
    ("config", "name"),
    [(Qwen3_5TextConfig(), "qwen3.5-9b"), (Qwen3_5MoeTextConfig(), "qwen3.5-35b-a3b")],
    ids=["dense", "experts"],
)
def test_parameters_are_those_of_transformers(config: Qwen3_5TextConfig, name: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    small = ("norm", "A_log", "dt_bias", "shared_expert_gate", "mlp.gate.")  # left out of a shape, as routers are
    counted = sum(each.numel() for key, each in model.named_parameters() if not any(part in key for part in small))
    assert ModelShape.of_config(config.to_dict()).parameters == counted
    assert ModelShape.of_config(BUILT_IN[name]).parameters == counted


def test_only_full_attention_has_kv_and_a_sequence_has_a_state() -> None:
    assert (QWEN_27B.kv_layers, QWEN_27B.kv_bytes) == (16, KV_BYTES) == (16, 65_536)
    assert QWEN_27B.state_bytes == STATE_BYTES == 153_944_064
    assert kv_sequence_bytes(QWEN_27B, "bfloat16", 1, 1000, 512) == 1000 * KV_BYTES + STATE_BYTES
    assert kv_sequence_bytes(QWEN_27B, "bfloat16", 2, 1000, 512) == (1000 * KV_BYTES + STATE_BYTES) // 2


def test_an_iteration_reads_and_writes_the_states() -> None:
    sheet = device_of("h100")
    engine = Roofline(QWEN_27B, sheet)
    rate = sheet.memory_bytes_per_s.value * sheet.attention_efficiency.value
    assert engine.context_s == pytest.approx(KV_BYTES / rate)
    more_s = engine.iteration_s(64) - engine.iteration_s(32)  # both are bound by reading the same weights
    assert more_s == pytest.approx(32 * 2 * STATE_BYTES / rate, rel=1e-6)


def test_states_of_all_sequences_are_kept_before_kv() -> None:
    one = scenario(
        model={"name": "qwen3.5-27b"},
        engine={"tensor_parallel": 2, "max_sequences": 64, "reserved_gb": 4, "memory_fraction": 0.9},
    )
    held = 2 * (80e9 * 0.9 - 4e9) - QWEN_27B.total_bytes - 64 * STATE_BYTES
    kind = "h100"
    assert kv_tokens(one, kind) == int(held / 2 / (KV_BYTES / 2))
    crowded = one.model_copy(update={"engine": one.engine.model_copy(update={"max_sequences": 550})})
    with pytest.raises(DoesNotFit, match=r"(?s)states of 85 GB.*lower engine.max_sequences"):
        kv_tokens(crowded, kind)


def test_other_linear_layers_are_refused() -> None:
    with pytest.raises(UnknownShape, match="is 'olmo_hybrid'; linear layers are known of qwen3_5_text"):
        ModelShape.of_config(BUILT_IN["qwen3.5-9b"] | {"model_type": "olmo_hybrid"})
