"""Roofline, model sizes and start-up times: worked by hand, and how they move with the hardware."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rlhfless.scaling.engine_model import decode_s
from rlhfless.scaling.latency.attention import UnknownShape
from rlhfless.scaling.latency.devices import DeviceSheet, UnknownDevice, device_of, load_devices
from rlhfless.scaling.latency.roofline import BETWEEN_NODES_S, Roofline, start_s, weight_load_s
from rlhfless.scaling.latency.shape import ModelShape

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
DEEPSEEK_V3 = {
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "vocab_size": 129280,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
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
    with pytest.raises(UnknownShape, match="qk_rope_head_dim"):
        ModelShape.of_config(LLAMA_8B | {"kv_lora_rank": 512})
    with pytest.raises(UnknownShape, match="'int4'"):
        ModelShape.of_config(LLAMA_8B | {"torch_dtype": "int4"})


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"layer_types": ["full_attention", "linear_attention"]}, "`layer_types`.*'linear_attention'"),
        ({"sliding_window": 4096}, "`sliding_window` of the model's config is 4096, and nothing says in which layers"),
        ({"layer_types": ["sliding_attention"] * 32}, "`sliding_window` of the model's config is None"),
        ({"layer_types": ["sliding_attention"], "sliding_window": 8}, "names 1 of 32 layers"),
        ({"sliding_window": 512, "model_type": "mistral", "global_head_dim": 512}, "`global_head_dim`"),
        ({"index_topk": 2048}, "`index_topk`"),
        ({"mamba_d_state": 128}, "`mamba_d_state`"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "'bitsandbytes'.*known are fp8"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 3}}, "'bits': 3"),
    ],
)
def test_what_is_not_counted_is_refused(keys: dict[str, object], said: str) -> None:
    with pytest.raises(UnknownShape, match=said):
        ModelShape.of_config(LLAMA_8B | keys)
    assert ModelShape.of_config(LLAMA_8B | {"sliding_window": 4096, "use_sliding_window": False}) == SHAPE


def test_latent_attention_and_experts_by_the_published_counts() -> None:
    """DeepSeek-V3: 671 billion parameters, 37 of them active, without its extra layer (arXiv 2412.19437). The KV of a
    token is 512 + 64 numbers in each of 61 layers."""
    shape = ModelShape.of_config(DEEPSEEK_V3)
    assert shape.parameters == pytest.approx(671e9, rel=2e-3)
    assert shape.active == pytest.approx(37e9, rel=0.02)
    assert shape.kv_bytes == 61 * (512 + 64) * 2
    assert (shape.matrix_bytes, shape.product_bits) == (1.0, 8)
    assert shape.total_bytes == pytest.approx(671e9 + 2 * shape.head, rel=2e-3)
    assert Roofline(shape, device(fp8_flops_per_s=2e15), 8).context_s == pytest.approx(
        shape.kv_bytes / 1e12
    )  # a copy each
    with pytest.raises(UnknownShape, match="products of 8 bits"):
        Roofline(shape, device())


def test_quantised_weights() -> None:
    """Of matrices; embedding and head stay in 16 bits."""
    known = [
        ({"quant_method": "fp8"}, 1.0, 8),
        ({"quant_method": "awq", "bits": 4}, 0.5, 16),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 0.5625, 4),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 8}}}}, 1.0, 16),
    ]
    for settings, number_bytes, bits in known:
        shape = ModelShape.of_config(LLAMA_8B | {"quantization_config": settings})
        assert (shape.matrix_bytes, shape.product_bits) == (number_bytes, bits)
        matrices = SHAPE.parameters - 2 * SHAPE.head
        assert shape.total_bytes == int(matrices * number_bytes) + 4 * SHAPE.head


def test_layers_without_experts() -> None:
    """Of 32: the first one; every second one, as the experts are in the last of two; the named ones."""

    def dense(keys: dict[str, object]) -> float:
        shape = ModelShape.of_config(MIXTRAL | {"moe_intermediate_size": 100} | keys)
        return shape.dense_mlp / (3 * 4096 * 14336)

    assert dense({}) == 0
    assert dense({"first_k_dense_replace": 1}) == 1
    assert dense({"decoder_sparse_step": 2}) == 16
    assert dense({"mlp_only_layers": [3, 4]}) == 2
    assert dense({"moe_layer_freq": [0] + [1] * 31}) == 1


def test_data_parallel_ranks_by_hand() -> None:
    """Two ranks read all but the experts each, and half of the experts; all weights work for all tokens."""
    shape, one = ModelShape.of_config(MIXTRAL), device()
    two = Roofline(shape, one, data_parallel=2)
    experts = 8 * shape.expert_mlp
    sent_s = 64 / 2 * 2 * 4096 * 2 / 2 / 1e11
    expected_s = 2 * (shape.read(0) + (shape.read(64) - shape.read(0)) / 2) / 1e12 + 3e-6 * 8 * 32
    assert two.iteration_s(64) == pytest.approx(expected_s + 2 * 32 * (1e-5 + sent_s))
    assert two.context_s == pytest.approx(shape.kv_bytes / 2e12)
    assert experts > shape.read(64) - shape.read(0)


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
        if devices > 8:  # it spans two nodes
            reduce_s += 2 * 32 * BETWEEN_NODES_S
        assert many.iteration_s(1) == pytest.approx(2 * read / (devices * 1e12) + starts_s + reduce_s)
    # More devices than KV heads keep copies of them.
    assert Roofline(SHAPE, device(), tensor_parallel=16).context_s == pytest.approx(131072 / 8e12)


def test_an_engine_of_one_rack_spans_no_nodes() -> None:
    reduced = [Roofline(SHAPE, device_of(kind), tensor_parallel=16).iteration_s(1) for kind in ("gb200", "h100")]
    within = Roofline(SHAPE, device_of("h100").model_copy(update={"linked_devices": 16}), tensor_parallel=16)
    assert reduced[1] - within.iteration_s(1) == pytest.approx(64 * BETWEEN_NODES_S)
    rack = Roofline(SHAPE, device_of("gb200").model_copy(update={"linked_devices": 10**6}), tensor_parallel=16)
    assert reduced[0] == rack.iteration_s(1)


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
    assert yaml.safe_dump(table["h100"].model_dump(exclude={"price", "hyperscaler"})).count("source: ") == 13
    with pytest.raises(UnknownDevice, match="'h10'; did you mean `h100`"):
        device_of("h10")


def test_a_cold_start_as_it_was_measured() -> None:
    # 7 billion parameters: 33.7 + 1.95 x 7 = 47.4 s by the fit; 45.0 to 46.7 s were measured.
    seven = ModelShape.of_config(LLAMA_8B | {"num_hidden_layers": 27})
    billions = seven.parameters / 1e9
    assert start_s(seven) + weight_load_s(seven, 1.75e9) == pytest.approx(33.7 + 1.95 * billions)
