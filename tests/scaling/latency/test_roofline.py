"""Roofline, model sizes and start-up times: worked by hand, and how they move with the hardware."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rlhfless.scaling.engine_model import decode_s
from rlhfless.scaling.latency.devices import DeviceSheet, UnknownDevice, device_of, load_devices
from rlhfless.scaling.latency.roofline import Roofline
from rlhfless.scaling.latency.shape import ModelShape, UnknownShape
from rlhfless.scaling.latency.startup import start_s, weight_load_s

LLAMA_8B = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}
MIXTRAL = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
SHAPE = ModelShape.of_config(LLAMA_8B)


def device(**changes: float | dict[int, float]) -> DeviceSheet:
    """Round figures: 1 PFLOP/s, 1 TB/s, no losses."""
    rates = {
        "flops_per_s": 1e15,
        "memory_bytes_per_s": 1e12,
        "memory_bytes": 80e9,
        "link_bytes_per_s": 1e11,
        "host_bytes_per_s": 5e10,
        "matmul_efficiency": 1.0,
        "weights_efficiency": 1.0,
        "attention_efficiency": 1.0,
        "all_reduce_s": 1e-5,
    }
    together = {2: 5e10, 4: 1e10}
    figures = {
        name: {"value": value, "source": "test"}
        for name, value in (rates | {"all_reduce_bytes_per_s": together} | changes).items()
    }
    return DeviceSheet.model_validate({"kind": "test", **figures})


def test_the_sizes_of_known_models() -> None:
    assert SHAPE.parameters == pytest.approx(8.03e9, rel=1e-3)
    assert SHAPE.kv_bytes == 131072
    assert ModelShape.of_config(LLAMA_8B | {"tie_word_embeddings": True}).parameters == pytest.approx(7.50e9, rel=1e-3)
    mixtral = ModelShape.of_config(MIXTRAL)
    assert mixtral.parameters == pytest.approx(46.7e9, rel=2e-3)
    assert mixtral.active == pytest.approx(12.9e9, rel=2e-2)
    # Qwen2.5-7B: 28 layers of 4 KV heads.
    qwen = LLAMA_8B | {
        "num_hidden_layers": 28,
        "hidden_size": 3584,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    }
    assert ModelShape.of_config(qwen).kv_bytes == 57344


def test_a_batch_reads_the_experts_it_asks_for() -> None:
    mixtral = ModelShape.of_config(MIXTRAL)
    routed = 8 * mixtral.expert_mlp
    rest = mixtral.read(0)
    assert mixtral.read(1) - rest == pytest.approx(routed / 4)  # 2 of 8
    assert mixtral.read(2) - rest == pytest.approx(routed * (1 - 0.75**2))
    assert mixtral.read(1000) - rest == pytest.approx(routed)


def test_a_config_that_says_too_little() -> None:
    with pytest.raises(UnknownShape, match="`hidden_size` of the model's config is None"):
        ModelShape.of_config({key: value for key, value in LLAMA_8B.items() if key != "hidden_size"})
    with pytest.raises(UnknownShape, match="kv_lora_rank"):
        ModelShape.of_config(LLAMA_8B | {"kv_lora_rank": 512})
    with pytest.raises(UnknownShape, match="'int4'"):
        ModelShape.of_config(LLAMA_8B | {"torch_dtype": "int4"})


def test_decoding_by_hand() -> None:
    model = Roofline(SHAPE, device())
    starts_s = 3e-6 * 8 * 32
    read = SHAPE.parameters - SHAPE.head  # the embedding is looked up, not read
    assert model.iteration_s(1) == pytest.approx(2 * read / 1e12 + starts_s)
    # Computing takes longer from 2 a B / 1e15 = 2 a / 1e12, B = 1000, on.
    assert model.iteration_s(2000) == pytest.approx(2 * read * 2000 / 1e15 + starts_s)
    assert model.context_s == pytest.approx(131072 / 1e12)
    two = Roofline(SHAPE, device(), tensor_parallel=2)
    reduce_s = 2 * 32 * (1e-5 + 2 * 0.5 * (4096 * 2) / 5e10)
    assert two.iteration_s(1) == pytest.approx(read / 1e12 + starts_s + reduce_s)
    assert two.context_s == pytest.approx(131072 / 2e12)
    for devices, rate in ((3, 1e10), (4, 1e10), (16, 1e10)):  # as the next larger group of the table, or the largest
        many = Roofline(SHAPE, device(), tensor_parallel=devices)
        reduce_s = 2 * 32 * (1e-5 + 2 * (devices - 1) / devices * (4096 * 2) / rate)
        assert many.iteration_s(1) == pytest.approx(2 * read / (devices * 1e12) + starts_s + reduce_s)
    # More devices than KV heads keep copies of them.
    assert Roofline(SHAPE, device(), tensor_parallel=16).context_s == pytest.approx(131072 / 8e12)


def test_prefill_by_hand() -> None:
    model = Roofline(SHAPE, device())
    attention_s = 4 * 32 * 32 * 128 * 2000 * (500 + 1000) / 1e15
    assert model.prefill_s(2000, 500) == pytest.approx(model.iteration_s(2000) + attention_s)
    assert model.prefill_s(0, 500) == 0.0


@given(
    sequences=st.integers(1, 512),
    context=st.integers(0, 10**6),
    faster=st.floats(1.0, 10.0),
    name=st.sampled_from(["memory_bytes_per_s", "flops_per_s", "all_reduce_bytes_per_s"]),
)
def test_faster_hardware_is_never_slower(sequences: int, context: int, faster: float, name: str) -> None:
    slow = Roofline(SHAPE, device(), tensor_parallel=2)
    rates = {"memory_bytes_per_s": 1e12 * faster, "flops_per_s": 1e15 * faster}
    rates |= {"all_reduce_bytes_per_s": {2: 5e10 * faster}}
    fast = Roofline(SHAPE, device(**{name: rates[name]}), tensor_parallel=2)
    assert decode_s(fast, sequences, context, 100) <= decode_s(slow, sequences, context, 100) * (1 + 1e-12)
    assert fast.prefill_s(sequences, context) <= slow.prefill_s(sequences, context) * (1 + 1e-12)


@given(st.integers(1, 512), st.integers(1, 512), st.integers(0, 4096))
def test_more_work_takes_longer(one: int, more: int, context: int) -> None:
    model = Roofline(ModelShape.of_config(MIXTRAL), device())
    assert model.iteration_s(one + more) >= model.iteration_s(one)
    assert model.prefill_s(one + more, context) > model.prefill_s(one, context)
    assert model.prefill_s(one, context + more) > model.prefill_s(one, context)


def test_the_device_table() -> None:
    table = load_devices()
    assert {"l40s", "a100-80gb", "h100", "h200", "b200", "cpu-core"} <= set(table)
    # Figures with sparsity would be twice these.
    assert table["h100"].flops_per_s.value == 989e12
    assert table["l40s"].flops_per_s.value == 362e12
    assert yaml.safe_dump(table["h100"].model_dump(exclude={"price"})).count("source: ") == 11
    with pytest.raises(UnknownDevice, match="'h10'; did you mean `h100`"):
        device_of("h10")


def test_a_cold_start_as_it_was_measured() -> None:
    # 7 billion parameters: 33.7 + 1.95 x 7 = 47.4 s by the fit; 45.0 to 46.7 s were measured.
    seven = ModelShape.of_config(LLAMA_8B | {"num_hidden_layers": 27})
    billions = seven.parameters / 1e9
    assert start_s(seven) + weight_load_s(seven, 1.75e9) == pytest.approx(33.7 + 1.95 * billions)
