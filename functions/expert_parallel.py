"""Expert parallelism: neighbouring ranks divide the routed experts of each layer, and tokens travel to them.

Without it, FSDP gathers all experts of a layer on every rank, though a token uses few of them. With E experts over n
ranks, each rank holds E / n experts: tokens are sent to the ranks of their experts and their outputs back, by an
all-to-all each (transformers' `EpDispatchExpertsParallel`). Ranks with equal experts split them by FSDP:

    mesh                copies x shards            everything but the experts
    mesh of experts     copies x sharers x ep      shards = sharers x ep; neighbours are in one `ep` group

A rank's gradient of its experts covers the tokens of its whole `ep` group, so it is summed over sharers and copies
alone. Sums need no factor, because losses have the step's global denominators (rlhfless.functions.sharding). A rank
whose experts get no token runs one of zeros.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers.distributed.tensor_parallel import apply_expert_parallelism

from rlhfless.spec.errors import InputError, Problem

COPIES, SHARERS, EP = "copies", "sharers", "ep"

DISPATCH = "ep_dispatch_experts"
"""transformers' name for experts to which tokens are sent."""


def expert_mesh_of(
    device: torch.device,
    ranks: int,
    shard_ranks: int,
    expert_ranks: int,
    timeout: timedelta | None = None,
    *,
    connected: bool = True,
) -> DeviceMesh | None:
    """Return the mesh of experts; None for one expert rank. *Collective* if `connected`.

    Without copies it has no dimension for them. Groups have `timeout`; without `connected` there are none.
    """
    if expert_ranks == 1:
        return None
    grid = torch.arange(ranks).view(-1, shard_ranks // expert_ranks, expert_ranks)
    names: tuple[str, ...] = (COPIES, SHARERS, EP)
    if len(grid) == 1:
        grid, names = grid[0], names[1:]
    if not connected:
        return DeviceMesh(device.type, grid, mesh_dim_names=names, _init_backend=False)
    groups = [
        dist.new_subgroups_by_enumeration(grid.movedim(dim, -1).reshape(-1, size).tolist(), timeout)[0]
        for dim, size in enumerate(grid.shape)
    ]
    return DeviceMesh.from_group(groups, device.type, grid, mesh_dim_names=names)


def is_expert(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is split over a mesh of experts."""
    return isinstance(tensor, DTensor) and EP in (tensor.device_mesh.mesh_dim_names or ())


def expert_modules(model: Any) -> list[torch.nn.Module]:
    """Return the modules of routed experts whose tokens transformers can dispatch; empty if it cannot."""
    kinds = {name for name, style in model.ep_plan.items() if style == DISPATCH}
    return [module for name, module in model.named_modules() if _wildcard(name) in kinds]


def expert_blocks(model: Any) -> list[tuple[torch.nn.Module, torch.nn.Module]]:
    """Return the block and the experts of each layer with experts, in order: of models whose experts are one module."""
    # Set by transformers' `use_experts_implementation`, which is on every class of experts in one module.
    names = [name for name, module in model.named_modules() if hasattr(module, "is_concatenated")]
    return [(model.get_submodule(name.rpartition(".")[0]), model.get_submodule(name)) for name in names]


def router_modules(model: Any) -> list[torch.nn.Module]:
    """Return the modules that score experts, in order of the layers."""
    children = (pair for block, _ in expert_blocks(model) for pair in block.named_children())
    return [child for name, child in children if name in ("gate", "router")]


def require_routers(model: Any, key: str, value: object) -> list[torch.nn.Module]:
    """Return the routers. Raises InputError that `key` needs them."""
    if routers := router_modules(model):
        return routers
    what = f"{value}, but {type(model).__name__} has no routers that are known"
    raise InputError("the learner", [Problem(key, what, "leave it out")])


def split_experts(model: Any, mesh: DeviceMesh, precision: MixedPrecisionPolicy, options: dict[str, Any]) -> None:
    """Divide the experts of a blank model over the mesh of experts. `options`: those of `fully_shard`.

    Raises InputError if transformers cannot dispatch tokens to them, or their number is no multiple of the ranks.
    """
    size = mesh[EP].size()
    modules = expert_modules(model)
    if not modules:
        what = f"{size}, but transformers has no plan to send tokens to the experts of {type(model).__name__}"
        raise _refused(what, "set it to 1 or leave it out")
    for count in {count_of_experts(module) for module in modules}:
        if count % size:
            raise _refused(f"{size}, which does not divide the {count} experts", "name a divisor, or leave it out")
    apply_expert_parallelism(model, mesh[EP], None, model.ep_plan)  # type: ignore[arg-type]  # without tensor parallelism
    sharers = mesh[(COPIES, SHARERS)] if mesh.ndim == 3 else mesh[SHARERS]
    # The router's weights may be float32: FSDP must not cast them with the hidden states.
    precision = MixedPrecisionPolicy(
        precision.param_dtype, precision.reduce_dtype, precision.output_dtype, cast_forward_inputs=False
    )
    for module in modules:
        fully_shard(
            module,
            mp_policy=precision,
            **options | {"mesh": sharers, "shard_placement_fn": _placement(mesh[SHARERS].size())},
        )


def count_of_experts(module: torch.nn.Module) -> int:
    """Return the number of experts that a module's parameters hold, over all ranks."""
    return next(module.parameters()).shape[0]


def _placement(sharers: int) -> Any:
    """Return the function that tells FSDP which dimension of a parameter to split over ranks with equal experts.

    Whole experts if there are enough of them. Otherwise the last dimension that can be split evenly: files hold the
    parts that are joined along the second one (gate and up) apart, and each would be split by itself.
    """

    def place(parameter: torch.nn.Parameter) -> Shard | None:
        experts = parameter.to_local().shape[0] if isinstance(parameter, DTensor) else parameter.shape[0]
        if experts % sharers == 0:
            return None
        return Shard(next((dim for dim in reversed(range(1, parameter.ndim)) if not parameter.shape[dim] % sharers), 0))

    return place


def _wildcard(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _refused(what: str, hint: str) -> InputError:
    return InputError("the learner", [Problem("learner.expert_parallel", what, hint)])
