"""Repairs of vLLM 0.32 that adapters (LoRA) need. vLLM imports this in the processes of its workers and its core.

* Rows without an adapter: on CPUs, vLLM's products take index -1 (no adapter) for the last slot, so these rows get
  another adapter's values. `GroupedPunica` computes the rows of each adapter together and leaves the others alone; it
  also is faster (1.1 to 1.5 times the time of merged weights per step, vLLM's products 1.7 to 1.8 times).
* Freed KV blocks: attention multiplies unused positions of a block by zero, and zero times NaN is NaN. A block written
  by an adapter with NaN would spoil whichever request gets it next, so new blocks are zeroed.
* Hopper GPUs (compute capability 9.x): Triton compiles the default configuration of `lora_expand` wrongly (vLLM #48590,
  #52568). vLLM 0.33 gives it one stage there, and so does this.

It also gives adapters to exactly the layers that the learner's have. By default vLLM wraps embeddings and output head
as well, and multiplies zeros for them in every iteration.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import wraps
from typing import Any

import torch
from vllm.lora.model_manager import LoRAModelManager
from vllm.lora.ops.triton_ops import lora_expand_op
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.model_executor.layers.linear import LinearBase
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig

from rlhfless.functions.generation.vllm.arguments import HAS_ADAPTERS

HOPPER = 9

BLOCK = 16
"""Rows of a product on a CPU."""


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The rows of a batch that have an adapter, in the order of their slots."""

    order: torch.Tensor | None
    """`[placed]`: the row at each place; None if all rows have an adapter and are in order already."""
    place: torch.Tensor | None
    """`[rows]`: the place of each row; `placed` for rows without an adapter. None as for `order`."""
    placed: int
    parts: tuple[tuple[int, int, int], ...]
    """(slot, first place, end) of each adapter."""

    @classmethod
    def of(cls, slots: torch.Tensor) -> AdapterRows:
        """Sort the rows by `slots` `[rows]`; -1: no adapter."""
        kinds, counts = slots.unique(return_counts=True)
        parts: list[tuple[int, int, int]] = []
        end = 0
        for slot, count in zip(kinds.tolist(), counts.tolist(), strict=True):
            if slot >= 0:
                parts.append((slot, end, end + count))
                end += count
        order = slots.argsort(stable=True)[len(slots) - end :]
        if end == len(slots) and bool((order[1:] > order[:-1]).all()):
            return cls(None, None, end, tuple(parts))
        place = torch.full_like(slots, end)
        place[order] = torch.arange(end, device=slots.device)
        return cls(order, place, end, tuple(parts))

    def add_products(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        downs: tuple[torch.Tensor, ...],
        ups: tuple[torch.Tensor, ...],
        scale: float,
        widths: tuple[int, ...],
    ) -> None:
        """Add scale B (A x) to the columns of `y` `[rows, sum of widths]`, slice by slice.

        Stacks: A `[slots, 1, rank, in]` and B `[slots, 1, width, rank]` of each slice.
        """
        if not self.parts:
            return
        own = x if self.order is None else x.index_select(0, self.order)
        added = y.new_empty(self.placed + 1, sum(widths))
        added[-1].zero_()  # for rows without an adapter
        for slot, first, end in self.parts:
            start = 0
            blocks = _blocks(own[first:end])
            for down, up, width in zip(downs, ups, widths, strict=True):
                high = [(block @ down[slot, 0].T * scale) @ up[slot, 0].T for block in blocks]
                added[first:end, start : start + width] = torch.cat(high)[: end - first]
                start += width
        y.add_(added[:-1] if self.place is None else added.index_select(0, self.place))


def _blocks(rows: torch.Tensor) -> list[torch.Tensor]:
    """Split `rows` `[rows, in]` into blocks of BLOCK rows, the last one filled up with zeros.

    Products of matrices of one shape round each row alike, so a row's result does not depend on the other rows of the
    batch, and samples are the same whatever else an engine generates.
    """
    whole = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % BLOCK))
    return list(whole.split(BLOCK))


class GroupedPunica(PunicaWrapperCPU):
    """Products of adapters on CPUs. Layers other than linear ones have no adapters here."""

    _rows: AdapterRows

    def update_metadata(
        self, mapping: Any, lora_index_to_id: list[int | None], max_loras: int, vocab_size: int, **_: Any
    ) -> None:
        self._update_base_metadata(mapping, lora_index_to_id, max_loras, vocab_size)
        self._rows = AdapterRows.of(self.token_lora_indices)

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **_: Any,
    ) -> None:
        self._rows.add_products(y, x, lora_a_stacked, lora_b_stacked, scale, output_slices)


def install() -> None:
    """Repair vLLM in this process if its engine serves adapters. Idempotent."""
    if os.environ.get(HAS_ADAPTERS) != "1":
        return
    zero_new_blocks()
    LoRAModelManager._match_target_modules = _is_target  # type: ignore[assignment,method-assign]
    if current_platform.is_cpu():
        type(current_platform).get_punica_wrapper = classmethod(_grouped)  # type: ignore[assignment,method-assign]
    elif (capability := current_platform.get_device_capability()) and capability.major == HOPPER:
        expand_in_one_stage()


def _grouped(_: type) -> str:
    return f"{__name__}.{GroupedPunica.__name__}"


def zero_new_blocks() -> None:
    """Make scheduler and workers zero each KV block before its use."""
    KVCacheConfig.needs_kv_cache_zeroing = property(lambda _: True)  # type: ignore[assignment,method-assign]


def expand_in_one_stage() -> None:
    """Give the kernel `lora_expand` one stage."""
    configured: Callable[..., Mapping[str, Any]] = lora_expand_op.get_lora_op_configs

    @wraps(configured)
    def one_stage(*args: Any, **kwargs: Any) -> Mapping[str, Any]:
        return {**configured(*args, **kwargs), "num_stages": 1}

    lora_expand_op.get_lora_op_configs = one_stage  # type: ignore[assignment]


def _is_target(manager: LoRAModelManager, module_name: str) -> bool:
    """Return whether a module is a linear layer that a pattern of LoRAConfig.target_modules matches."""
    if not isinstance(manager.model.get_submodule(module_name), LinearBase):
        return False
    name = module_name.rpartition(".")[-1]
    parts = manager.packed_modules_mapping.get(name) or [name]
    return any(fnmatchcase(part, pattern) for part in parts for pattern in manager.lora_config.target_modules or ())
