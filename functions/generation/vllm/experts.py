"""Where the weights of fused experts are in their layer's parameters, for the read-back.

vLLM loads them one expert at a time into a parameter of all experts. Two of its kernels compute with the parameter as
it was loaded, and one with both halves of `w13` (the gate's and the up projection's) in the other order. Others pack or
shuffle it, and CPUs do: these are not read back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

_AS_LOADED = (UnquantizedMoeBackend.TRITON, UnquantizedMoeBackend.BATCHED_TRITON)
_HALVES_SWAPPED = UnquantizedMoeBackend.FLASHINFER_CUTLASS

EVERYWHERE, NOWHERE = slice(None), slice(0, 0)


def lie_open(method: object) -> bool:
    """Whether the kernel of a layer's method computes with values that lie in the parameters."""
    return isinstance(method, UnquantizedFusedMoEMethod) and (
        method.unquantized_backend in _AS_LOADED or method.unquantized_backend is _HALVES_SWAPPED
    )


def in_order(layer: Any, name: str, shape: torch.Size, indices: torch.Tensor) -> torch.Tensor:
    """From positions `[elements]` in the flattened parameter as it was loaded, of `shape`, to the positions of the same
    values as the kernel has them."""
    method = getattr(layer, "quant_method", None)
    if not isinstance(method, UnquantizedFusedMoEMethod) or method.unquantized_backend is not _HALVES_SWAPPED:
        return indices
    if name != "w13_weight" or not method.moe.is_act_and_mul:
        return indices
    size = math.prod(shape[1:])
    return indices // size * size + (indices % size + size // 2) % size


def written(
    layer: Any, shape: torch.Size, loaded: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> slice:
    """The part of the flattened parameter, of `shape`, into which a loader that was called with these arguments has
    loaded: one expert's, if it is one of a layer of experts."""
    if not isinstance(getattr(layer, "quant_method", None), UnquantizedFusedMoEMethod) or loaded.dim() == len(shape):
        return EVERYWHERE
    number = kwargs["expert_id"] if "expert_id" in kwargs else args[2]  # after the tensor's name and the shard's
    local = layer._map_global_expert_id_to_local_expert_id(number)
    size = math.prod(shape[1:])
    return NOWHERE if local < 0 else slice(local * size, (local + 1) * size)


def repack(model: torch.nn.Module) -> None:
    """Give CPU kernels their packed experts again. vLLM packs them after the first load alone, and after a reload would
    take plain values for packed ones."""
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if (
            isinstance(method, UnquantizedFusedMoEMethod)
            and method.unquantized_backend is UnquantizedMoeBackend.CPU
            and method.moe_kernel is not None
        ):
            method.moe_kernel.fused_experts.process_weights_after_loading(layer)
