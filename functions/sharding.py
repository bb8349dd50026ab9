"""The ranks of a function, and a model whose parameters are split over them by FSDP2 (`fully_shard`).

See Zhao et al., PyTorch FSDP, arXiv 2304.11277. Each decoder layer is a group; the embeddings, which may be tied to
the head, the last norm and the head are in the root's group. A group is gathered before its forward and backward
pass and freed afterwards; gradients are summed into shards. The mesh may have a second dimension (HSDP, the paper's
hybrid sharding): neighbouring ranks then split the parameters, each set of such ranks holds a copy, and gradients
are summed between the sets once, after the last micro-batch. A single rank takes the same path, but keeps gathered
parameters until `settle`, and sums the gradients of a step before it reduces them: without other ranks, freeing and
gathering would only copy.

Invariant: every method here is collective. All ranks run the same number of forward passes, in the same order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Replicate

from rlhfless.functions.base import RankPlace
from rlhfless.functions.expert_parallel import expert_mesh_of, is_expert, require_routers, split_experts

INSIDE = "run_inside"
"""Name of the method added to a sharded model: it runs any function as one forward pass of the whole model."""

ONE_GROUP_PARAMETERS = 2**22
"""A model with fewer parameters is one group. Each group costs about 0.3 ms of Python per pass on a CPU core; with a
group for each of 4 layers, a step of a model of 0.8 M parameters took 4 % longer."""


def default_device() -> torch.device:
    """Return the GPU that this process was given, or the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def join(
    place: RankPlace, shard_ranks: int | None = None, expert_ranks: int = 1
) -> tuple[torch.device, DeviceMesh, DeviceMesh | None]:
    """Meet the other ranks, and return this rank's device, the mesh, and the mesh of experts if several ranks divide
    them (rlhfless.functions.expert_parallel).

    `shard_ranks` neighbours split a model, by default all ranks.
    """
    device, timeout = default_device(), timedelta(seconds=place.timeout_s)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # NCCL uses the current device
    # Tensors offloaded to host memory are reduced there.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, place.address, timeout, world_size=place.ranks, rank=place.rank)
    mesh = mesh_of(device, place.ranks, shard_ranks, timeout)
    return device, mesh, expert_mesh_of(device, place.ranks, shard_ranks or place.ranks, expert_ranks, timeout)


def join_frozen(place: RankPlace) -> DeviceMesh | None:
    """Join for a model that is never trained; see `join`.

    Returns None for a single rank, where a group would only gather a second copy of the weights.
    """
    return join(place)[1] if place.ranks > 1 else None


def mesh_of(
    device: torch.device,
    ranks: int,
    shard_ranks: int | None = None,
    timeout: timedelta | None = None,
    backend: str | None = None,
) -> DeviceMesh:
    """Return a mesh of all ranks: one-dimensional, or with fewer `shard_ranks` two-dimensional, (copies, shards).

    *Collective*.

    Groups created for this have `timeout` and `backend`, by default those of the process group.
    """
    if shard_ranks in (None, ranks):
        return init_device_mesh(device.type, (ranks,))
    grid = torch.arange(ranks).view(-1, shard_ranks or ranks)
    groups = [dist.new_subgroups_by_enumeration(lines.tolist(), timeout, backend)[0] for lines in (grid.T, grid)]
    return DeviceMesh.from_group(groups, device.type, grid, mesh_dim_names=("copies", "shards"))


def copies_of(tensor: torch.Tensor) -> int:
    """Return the number of ranks that hold the same part of a tensor: all of them, if it is not split."""
    if not isinstance(tensor, DTensor):
        return dist.get_world_size() if dist.is_initialized() else 1
    sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if placement.is_replicate())


def layers_of(model: Any) -> list[torch.nn.Module]:
    """Return the decoder layers: the blocks that the model's class declares unsplittable, or else its longest list."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if layers:
        return layers
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return list(max(lists, key=len, default=()))


def shard(
    model: Any,
    mesh: DeviceMesh,
    *,
    compute_dtype: torch.dtype,
    offload: bool = False,
    exact_head: bool = False,
    layers_dtype: torch.dtype | None = None,
    experts: DeviceMesh | None = None,
    exact_routers: bool = False,
) -> None:
    """Split a model's parameters over a mesh. Those of a blank model stay without data.

    Matrix products are in `compute_dtype`; shards and gradient sums keep the parameters' own dtype. `offload`: keep
    shards, gradients and optimiser in host memory. `exact_head`: the root's group also computes in the parameters'
    own dtype. `layers_dtype`: keep the parameters of layers in this format, unless the model is one group. `experts`:
    the mesh over which experts are divided, each layer's in a group of their own; see `split_experts` for errors.
    `exact_routers`: routers compute in the parameters' own dtype, each in a group of its own.
    """
    model.tie_weights()  # a tied tensor must be a single one when the groups are created
    exact = next(model.parameters()).dtype
    options: dict[str, Any] = {
        "mesh": mesh,
        # Pinned memory is copied while the GPU computes; only CUDA can pin.
        "offload_policy": CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy(),
        "reshard_after_forward": not is_alone(mesh, offload=offload),
    }
    in_layers = _precision(compute_dtype, exact)
    exact_root = exact_head and exact != compute_dtype
    one_group = sum(map(torch.Tensor.numel, model.parameters())) < ONE_GROUP_PARAMETERS and not exact_root
    layers = [] if one_group else layers_of(model)
    for part in (part for layer in layers if layers_dtype for part in layer.modules()):
        for name, parameter in part.named_parameters(recurse=False):  # `to` cannot replace fake tensors
            setattr(part, name, torch.nn.Parameter(parameter.detach().to(layers_dtype)))
    if experts is not None:
        split_experts(model, experts, in_layers, options)
    for router in require_routers(model, "learner.router_dtype", "float32") if exact_routers else ():
        fully_shard(router, mp_policy=MixedPrecisionPolicy(exact, exact), **options)
    for layer in layers[:-1]:
        fully_shard(layer, mp_policy=in_layers, **options)
    for layer in layers[-1:]:  # a norm needs input and weight in the same dtype
        output = exact if exact_root else None
        fully_shard(layer, mp_policy=_precision(compute_dtype, exact, output), **options)
    in_root = _precision(exact if exact_root else compute_dtype, exact)
    # The root's group is needed first in the backward pass, right after the forward pass.
    fully_shard(model, mp_policy=in_root, **(options | {"reshard_after_forward": False}))
    for module in _groups(model) if mesh.size() > 1 else ():
        # Losses have the step's global denominators: gradients are summed, not averaged.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    setattr(model, INSIDE, _run)
    register_fsdp_forward_method(model, INSIDE)
    if is_alone(mesh, offload=offload):
        model.set_reshard_after_backward(False)


def _run(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


def _precision(
    compute: torch.dtype, exact: torch.dtype, output_dtype: torch.dtype | None = None
) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(None if compute == exact else compute, exact, output_dtype)


def _groups(model: torch.nn.Module) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def is_alone(mesh: DeviceMesh, *, offload: bool) -> bool:
    """Return whether this is the only rank, with all states on its device: it keeps gathered parameters."""
    return mesh.size() == 1 and not offload


def set_gradient_reduction(model: Any, *, alone: bool, offload: bool, last: bool) -> None:
    """Set how the next backward pass reduces gradients.

    A single rank reduces them only in the `last` pass of a step. Copies are summed only in the last pass, unless
    gradients are offloaded: they would wait on the device.
    """
    model.set_requires_gradient_sync(last or not alone)
    model.set_requires_all_reduce(last or offload)


def settle(model: Any) -> None:
    """Free gathered parameters.

    Needed after the last pass before anything writes to the shards: a group that is still gathered would use the old
    values in the next pass.
    """
    model.reset_iter_state()


def class_of(model: torch.nn.Module) -> type[torch.nn.Module]:
    """Return the model's own class, not the one generated by `fully_shard`.

    No config and no other program knows the generated class.
    """
    kinds = (kind for kind in type(model).__mro__ if issubclass(kind, torch.nn.Module))
    return next(kind for kind in kinds if not issubclass(kind, FSDPModule))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor; all of it if it is not split."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Gather a tensor on every rank, on `device`. *Collective* if the tensor is split.

    It is cast first, so that no more bytes than needed are sent. The result may share memory with the tensor.
    """
    part = local(tensor.detach()).to(device, dtype)
    if not isinstance(tensor, DTensor) or tensor.device_mesh.size() == 1:
        return part
    spread = DTensor.from_local(
        part,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
    if is_expert(tensor):  # torch warns about both dimensions at once
        ours = [Replicate()] * (spread.device_mesh.ndim - 1)
        spread = spread.redistribute(placements=[*ours, spread.placements[-1]])
    return spread.full_tensor()


def whole_on_first(
    tensor: torch.Tensor,
    device: torch.device,
    dtype: torch.dtype | None = None,
    shards: dist.ProcessGroup | None = None,
) -> torch.Tensor | None:
    """Gather a tensor only on the first rank of the mesh, as `whole` does, copying each byte once. *Collective*.

    Returns None on the other ranks, which send their own parts. `shards`: the group of all ranks that a copy is split
    over, needed for experts.
    """
    if not isinstance(tensor, DTensor):
        return local(tensor.detach()).to(device, dtype) if dist.get_rank() == 0 else None
    mesh = tensor.device_mesh
    split = [dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    place = mesh.get_coordinate()
    assert place is not None, "this is a rank of the mesh"
    if any(at for dim, at in enumerate(place) if dim not in split):
        return None  # a replica of a part that another rank sends
    part = local(tensor.detach()).to(device, dtype)
    if math.prod(mesh.size(dim) for dim in split) == 1:
        return part
    group = mesh.get_group(split[0]) if len(split) == 1 else shards
    assert group is not None, "given for tensors that are split twice"
    if any(place):
        _transfer([dist.P2POp(dist.isend, part.contiguous(), group=group, group_peer=0)] if part.numel() else [])
        return None
    everything = torch.empty(tensor.shape, dtype=part.dtype, device=device)
    ranks = itertools.product(*(range(mesh.size(dim)) for dim in split))
    parts = [everything[part_of(tensor, dict(zip(split, at, strict=True)))] for at in ranks]
    parts[0].copy_(part)
    others = [(rank, other) for rank, other in enumerate(parts) if rank and other.numel()]
    received = [other if other.is_contiguous() else torch.empty_like(other) for _, other in others]
    _transfer(
        [
            dist.P2POp(dist.irecv, buffer, group=group, group_peer=rank)
            for (rank, _), buffer in zip(others, received, strict=True)
        ]
    )
    for (_, other), buffer in zip(others, received, strict=True):
        if buffer is not other:
            other.copy_(buffer)
    return everything


def part_of(tensor: DTensor, place: Mapping[int, int]) -> tuple[slice, ...]:
    """Return the part of a tensor held by the rank at `place`, its coordinate by mesh dimension.

    The last mesh dimension splits first: FSDP, which is the first, splits what expert parallelism has left.
    """
    starts, ends = [0] * tensor.ndim, list(tensor.shape)
    for mesh_dim in sorted(place, reverse=True):
        dim = tensor.placements[mesh_dim].dim  # type: ignore[attr-defined]  # not replicated
        step = -(-(ends[dim] - starts[dim]) // tensor.device_mesh.size(mesh_dim))
        starts[dim] = min(starts[dim] + step * place[mesh_dim], ends[dim])
        ends[dim] = min(starts[dim] + step, ends[dim])
    return tuple(map(slice, starts, ends))


def first_row(tensor: torch.Tensor) -> int | None:
    """Return the first row of this rank's part of a split tensor; None on ranks of other copies than the first."""
    assert isinstance(tensor, DTensor)
    place = tensor.device_mesh.get_coordinate()
    assert place is not None, "this is a rank of the mesh"
    split = [dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    if any(at for dim, at in enumerate(place) if dim not in split):
        return None
    return part_of(tensor, {dim: place[dim] for dim in split})[0].start


def shards_group(tensors: Iterable[torch.Tensor]) -> dist.ProcessGroup | None:
    """Return the group of ranks that split a copy of a model with these tensors; None if it is not split."""
    dense = (each for each in tensors if isinstance(each, DTensor) and not is_expert(each))
    mesh = next((each.device_mesh for each in dense), None)
    return None if mesh is None else mesh.get_group(mesh.ndim - 1)


def _transfer(transfers: list[dist.P2POp]) -> None:
    for work in dist.batch_isend_irecv(transfers) if transfers else ():
        work.wait()
