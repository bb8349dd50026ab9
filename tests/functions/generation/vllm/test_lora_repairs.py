"""Repairs of vLLM for adapters, without an engine: each test also shows what vLLM does without its repair."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhfless.weights.adapters import tied_to_base
from rlhfless.weights.store import FolderStore

SLOTS, RANK, WIDTH, ROWS = 3, 4, 24, 64
SLICES = (16, 8)


def modules() -> SimpleNamespace:
    """Imported here: vLLM takes seconds, in each process that reads this file."""
    from vllm.lora.layers import LoRAMapping
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    from rlhfless.functions.generation.vllm import lora_repairs, lora_slots

    return SimpleNamespace(
        repairs=lora_repairs, slots=lora_slots, Mapping=LoRAMapping, vllms=PunicaWrapperCPU,
        ours=lora_repairs.GroupedPunica,
    )  # fmt: skip


class Layer:
    """A layer with two slices, as vLLM's wrapper of fused layers."""

    def __init__(self, wrapper: Any) -> None:
        random = torch.Generator().manual_seed(1)
        self.output_slices = SLICES
        self.lora_a_stacked = tuple(torch.randn(SLOTS, 1, RANK, WIDTH, generator=random) for _ in SLICES)
        self.lora_b_stacked = tuple(torch.randn(SLOTS, 1, width, RANK, generator=random) for width in SLICES)
        self.punica_wrapper = wrapper

    def reset_lora(self, slot: int) -> None:
        for stack in (*self.lora_a_stacked, *self.lora_b_stacked):
            stack[slot] = 0


def managed(wrapper: Any) -> Any:
    """Return a stand-in for vLLM's manager, with one layer."""
    slots = SimpleNamespace(
        modules={"proj": Layer(wrapper)}, lora_slots=SLOTS, lora_index_to_id=[None] * SLOTS, _last_mapping=0,
        model=SimpleNamespace(), packed_modules={},
    )  # fmt: skip
    slots._set_adapter_mapping = lambda mapping: wrapper.update_metadata(mapping, slots.lora_index_to_id, SLOTS + 1, 9)
    config = SimpleNamespace(lora_dtype=torch.float32)
    return SimpleNamespace(_adapter_manager=slots, max_num_batched_tokens=ROWS, lora_config=config, _load_adapter=None)


def test_products_are_tried_and_vllms_own_are_wrong_on_a_cpu() -> None:
    vllm = modules()
    good, bad = (managed(kind(ROWS, ROWS, device="cpu")) for kind in (vllm.ours, vllm.vllms))
    vllm.slots.LoraSlots(good).try_products()
    assert good._adapter_manager.lora_index_to_id == [None] * SLOTS
    with pytest.raises(RuntimeError, match=r"wrong products of adapters at proj .* generation.lora to merged"):
        vllm.slots.LoraSlots(bad).try_products()


def test_rows_of_each_adapter_get_its_product_alone() -> None:
    vllm = modules()
    wrapper = vllm.ours(ROWS, ROWS, device="cpu")
    layer, ids = Layer(wrapper), [7, None, 5]
    layer.lora_b_stacked[0][0] = float("nan")  # of number 7, in slot 0
    random = torch.Generator().manual_seed(2)
    of_row = (5, 0, 7, 5, 0, 0, 5, 7)
    x = torch.randn(len(of_row), WIDTH, generator=random)
    wrapper.update_metadata(vllm.Mapping(of_row, of_row, is_prefill=True), ids, SLOTS + 1, 9)
    y = torch.ones(len(of_row), sum(SLICES))
    wrapper.add_lora_linear(y, x, layer.lora_a_stacked, layer.lora_b_stacked, 0.5, SLICES)
    for row, number in enumerate(of_row):
        if number == 0:
            assert bool((y[row] == 1).all())
        elif number == 5:
            parts = zip(layer.lora_a_stacked, layer.lora_b_stacked, strict=True)
            exact = torch.cat([1 + 0.5 * up[2, 0] @ (down[2, 0] @ x[row]) for down, up in parts])
            torch.testing.assert_close(y[row], exact)
        else:
            assert not bool(torch.isfinite(y[row, : SLICES[0]]).any())


def test_a_row_is_rounded_alike_in_every_batch() -> None:
    vllm = modules()
    random = torch.Generator().manual_seed(3)
    x = torch.randn(ROWS, 384, generator=random)
    downs = tuple(torch.randn(SLOTS, 1, RANK, 384, generator=random) for _ in SLICES)
    ups = tuple(torch.randn(SLOTS, 1, width, RANK, generator=random) for width in SLICES)

    def products(slots: list[int]) -> torch.Tensor:
        y = torch.zeros(len(slots), sum(SLICES))
        rows = vllm.repairs.AdapterRows.of(torch.tensor(slots))
        rows.add_products(y, x[: len(slots)], downs, ups, 1.0, SLICES)
        return y

    whole = products([1] * ROWS)
    for count in (1, 2, 7, 16, 17, 33):
        assert torch.equal(products([1] * count), whole[:count])
        mixed = products([1 if row % 3 else -1 for row in range(count)])
        assert all(torch.equal(mixed[row], whole[row]) for row in range(count) if row % 3)


def test_an_adapter_is_loaded_from_memory_whenever_vllm_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM reads an evicted adapter again within an iteration, and scales its B in place."""
    vllm = modules()
    monkeypatch.setattr(vllm.slots, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(vllm.slots, "get_tensor_model_parallel_world_size", lambda: 1)
    up = torch.ones(8, RANK)
    name = "base_model.model.proj"
    tensors = {f"{name}.lora_A.weight": torch.ones(RANK, WIDTH), f"{name}.lora_B.weight": up}
    store = FolderStore(tmp_path)
    stored = store.put("run", 0, 1, tensors | tied_to_base("0b" * 16, 8))
    manager = managed(None)
    slots = vllm.slots.LoraSlots(manager)
    consumed = slots.fetch(store, stored.location, "rlhfless:9")
    assert len(consumed.hashes) == stored.tensors == 4
    store.delete(stored.version)
    for _ in range(2):
        loaded = manager._load_adapter(SimpleNamespace(lora_path="rlhfless:9", lora_int_id=9))
        loaded.loras["proj"].optimize()
        assert torch.equal(loaded.loras["proj"].lora_b, 2 * up)
    with pytest.raises(ValueError, match=r"belongs to base weights with digest 0b0b.*; this engine has None"):
        slots.add("run/0/1", 9, "rlhfless:9")


def test_hopper_expands_in_one_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    repairs = modules().repairs
    expand = repairs.lora_expand_op
    asked = ("expand", 2, 512, 4096, 16, 1)
    before = expand.get_lora_op_configs(*asked)
    assert before["num_stages"] == 2, "vLLM has changed its configuration: is the repair still needed?"
    monkeypatch.setattr(expand, "get_lora_op_configs", expand.get_lora_op_configs)
    repairs.expand_in_one_stage()
    assert expand.get_lora_op_configs(*asked) == before | {"num_stages": 1}


def test_new_blocks_are_zeroed(monkeypatch: pytest.MonkeyPatch) -> None:
    repairs = modules().repairs
    kind = repairs.KVCacheConfig
    monkeypatch.setattr(kind, "needs_kv_cache_zeroing", kind.needs_kv_cache_zeroing)
    config = kind(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[])
    assert not config.needs_kv_cache_zeroing
    repairs.zero_new_blocks()
    assert config.needs_kv_cache_zeroing
