"""Kernel tables: a folder of tables that follow a known law, and the real ones of aiconfigurator-core."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlhfless.scaling.latency.aiconfigurator import MeasuredKernels
from rlhfless.scaling.latency.devices import device_of
from rlhfless.scaling.latency.kernel_tables import SYSTEMS, Grid, NoTables, tables_folder
from rlhfless.scaling.latency.roofline import Roofline
from rlhfless.scaling.latency.shape import ModelShape

CONFIG = {
    "num_hidden_layers": 2,
    "hidden_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 4096,
    "vocab_size": 32768,
}
SHAPE = ModelShape.of_config(CONFIG)
HEADS = {"window_size": 0, "attn_dtype": "bfloat16", "kv_cache_dtype": "bfloat16", "head_dim": 128}


def write(folder: Path, family: str, name: str, rows: list[dict[str, Any]], version: str = "0.24.0") -> None:
    path = folder / "h100_sxm" / family / "vllm" / version / f"{name}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    """A product takes m n k nanoseconds / 1000, attention a microsecond a token, an all-reduce a microsecond a KiB."""
    sizes = (1, 64, 4096)
    products = [
        {"gemm_dtype": dtype, "m": m, "n": n, "k": k, "latency": factor * m * n * k * 1e-9}
        for m, n, k in itertools.product(sizes, (1024, 8192), (1024, 8192))
        for dtype, factor in (("bfloat16", 1.0), ("fp8", 0.5))
    ]
    write(tmp_path, "gemm", "gemm_perf", products)
    write(tmp_path, "gemm", "gemm_perf", [row | {"latency": 99.0} for row in products], version="0.9.0")
    for heads, kv_heads in ((8, 4), (4, 2)):
        of_heads = HEADS | {"num_heads": heads, "num_key_value_heads": kv_heads}
        prefill = [of_heads | {"batch_size": 1, "isl": size, "latency": size * 1e-3} for size in sizes]
        decode = [
            of_heads | {"batch_size": batch, "isl": 1, "step": step, "latency": max(2e-3, batch * (step + 1) * 1e-6)}
            for batch, step in itertools.product((1, 16, 256), (1, 1023, 65535))
        ]
        for name, rows in (("context_attention_perf", prefill), ("generation_attention_perf", decode)):
            path = tmp_path / "h100_sxm/attention/vllm/0.24.0" / f"{name}.parquet"
            before = pq.read_table(path).to_pylist() if path.exists() else []
            write(tmp_path, "attention", name, before + rows)
    messages = [
        {"num_gpus": 2, "kernel_source": "vLLM_custom_graph", "message_size": size, "latency": size / 1024 * 1e-3}
        for size in (1024, 1024**2)
    ]
    write(tmp_path, "comm", "custom_allreduce_perf", messages)
    return tmp_path


def test_between_measured_sizes_a_power_law_is_met() -> None:
    sizes = np.array([1.0, 10, 100])
    rows = np.array(list(itertools.product(sizes, sizes)))
    grid = Grid.of([rows[:, 0], rows[:, 1]], rows[:, 0] * rows[:, 1] ** 0.5)
    assert grid.at(5, 50) == pytest.approx(5 * 50**0.5)
    assert grid.at(100, 100) == pytest.approx(1000)
    assert grid.at(0.5, 1) == pytest.approx(1)  # below the smallest, nothing is gained
    assert grid.at(300, 100) == pytest.approx(3000)  # above the largest, in proportion


def test_what_was_not_measured_grows_in_proportion() -> None:
    grid = Grid.of([np.array([1.0, 1, 2]), np.array([1.0, 4, 1])], np.array([3.0, 6, 5]))
    assert grid.at(2, 4) == pytest.approx(20)
    # (2, 1) from (2, 4), the next larger one.
    assert Grid.of([np.array([1.0, 1, 2]), np.array([1.0, 4, 4])], np.array([3.0, 6, 8])).at(2, 1) == pytest.approx(2)
    # Of three sizes nothing was measured at (2, 2, any): they come from (1, 2, any) along the second last size.
    sizes = np.array([(1.0, 1, 1), (1, 2, 1), (2, 1, 1), (2, 1, 2)])
    grid = Grid.of(list(sizes.T), np.array([1.0, 2, 3, 6]))
    assert grid.at(2, 2, 1) == pytest.approx(6)


def test_an_iteration_is_the_sum_of_its_kernels(tables: Path) -> None:
    model = MeasuredKernels.of(SHAPE, "h100", (1, 1), tables)
    # Per layer q, k, v (2048 x 1024), output (1024 x 1024), gate and up (8192 x 1024), down (1024 x 4096).
    products = 2048 * 1024 + 1024 * 1024 + 8192 * 1024 + 1024 * 4096
    layer_s = 64 * products * 1e-12 + 4 * 3e-6
    assert model.iteration_s(64) == pytest.approx(2 * (layer_s + 2e-6) + 64 * 32768 * 1024 * 1e-12)
    # 200 MB of KV in a layer are 97,656 tokens of 2 x 4 x 128 x 2 bytes: only contexts beyond count, 1 ns a token.
    assert model.context_s == pytest.approx(2 * 1e-9)


def test_prefill_counts_the_context_before_it(tables: Path) -> None:
    model = MeasuredKernels.of(SHAPE, "h100", (1, 1), tables)
    fresh, behind = model.prefill_s(64), model.prefill_s(64, context_tokens=64)
    # 64 tokens attend to 32 on average, and behind 64 others to 96: three times 64 us, in 2 layers.
    assert behind - fresh == pytest.approx(2 * 2 * 64e-6)
    assert model.prefill_s(0, 10) == 0.0


def test_two_devices_halve_the_products_and_exchange(tables: Path) -> None:
    model = MeasuredKernels.of(SHAPE, "h100", (2, 1), tables)
    products = 1024 * 1024 + 1024 * 1024 + 4096 * 1024 + 1024 * 2048  # k of 512 counts as the smallest, 1,024
    exchange_s = 2 * 64 * 1024 * 2 / 1024 * 1e-6
    layer_s = 64 * products * 1e-12 + 4 * 3e-6 + exchange_s + 2e-6
    assert model.iteration_s(64) == pytest.approx(2 * layer_s + 64 * 16384 * 1024 * 1e-12)


def test_what_has_no_table_is_said(tables: Path) -> None:
    with pytest.raises(NoTables, match="no tables of 'h10'; did you mean `h100`"):
        MeasuredKernels.of(SHAPE, "h10", (1, 1), tables)
    with pytest.raises(NoTables, match=r"custom_allreduce_perf of h100 has num_gpus 8"):
        MeasuredKernels.of(SHAPE, "h100", (8, 1), tables)
    with pytest.raises(NoTables, match="gemm_perf of h200"):
        MeasuredKernels.of(SHAPE, "h200", (1, 1), tables)
    with pytest.raises(NoTables, match="kernels of experts are not summed; take a roofline"):
        MeasuredKernels.of(
            ModelShape.of_config(CONFIG | {"num_local_experts": 4, "num_experts_per_tok": 2}), "h100", (1, 1), tables
        )
    shape = ModelShape.of_config(CONFIG | {"quantization_config": {"quant_method": "gptq", "bits": 8}})
    with pytest.raises(NoTables, match="8 bits multiplied in 16"):
        MeasuredKernels.of(shape, "h100", (1, 1), tables)


def test_a_quantised_model_takes_the_table_of_its_format(tables: Path) -> None:
    shape = ModelShape.of_config(CONFIG).in_bits(8)
    assert (shape.matrix_bytes, shape.product_bits) == (1.0, 8)
    fast, full = (MeasuredKernels.of(each, "h100", (1, 1), tables) for each in (shape, SHAPE))
    # Products of layers take half as long; the head's stay in 16 bits.
    products = 2048 * 1024 + 1024 * 1024 + 8192 * 1024 + 1024 * 4096
    assert full.iteration_s(64) - fast.iteration_s(64) == pytest.approx(2 * 64 * products * 0.5e-12)


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(NoTables, match=r"rlhfless\[aiconfigurator\]"):
        tables_folder()


WIDE = CONFIG | {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}


@pytest.mark.parametrize("kind", sorted(SYSTEMS))
def test_real_tables_are_near_the_roofline(kind: str) -> None:
    shape = ModelShape.of_config(WIDE | {"intermediate_size": 14336})
    model = MeasuredKernels.of(shape, kind, (1, 1), tables_folder())
    assert 2e-3 < model.iteration_s(1) < model.iteration_s(256) < 0.2
    assert model.prefill_s(4096) > model.prefill_s(1024) > 0
    if kind in ("h100", "h200", "l40s", "b200"):
        assert model.iteration_s(16) == pytest.approx(Roofline(shape, device_of(kind)).iteration_s(16), rel=0.4)
