"""Which way a run's weights go from the learner to its actors, and what keeps a way from being taken."""

from __future__ import annotations

from collections.abc import Iterable

from rlhfless.planning.host_memory import on_this_node, store_base
from rlhfless.records import FunctionRole
from rlhfless.scaling.function_kinds import name_of, publisher_of
from rlhfless.scaling.placement import CPU_KIND, Device, Placement
from rlhfless.spec import RunSpec, Transport
from rlhfless.util.errors import UserError


class TransportRefused(UserError):
    """The weights cannot come that way to where the actors are."""

    where = "weights.transport"


def transport_of(spec: RunSpec, placement: Placement) -> Transport:
    """The way of the weights, of which `http` is another one for the actors on the learner's node. Raises
    TransportRefused."""
    asked = spec.weights.transport
    if asked == "auto":
        return on_this_node(spec) if spec.placement.ray_address is None else "http"
    if asked in ("cuda_ipc", "nccl") and (why := _keeps_from_gpus(asked, spec, placement)):
        raise TransportRefused(f"weights.transport is {asked}, but {why}; set weights.transport to auto")
    if asked == "shared_memory" and spec.placement.ray_address is None and on_this_node(spec) != asked:
        raise TransportRefused(
            f"weights.transport is {asked}, but {str(store_base(spec))!r} is not in memory; set it to file, or "
            "weights.folder to a folder in memory"
        )
    return asked


def _keeps_from_gpus(asked: Transport, spec: RunSpec, placement: Placement) -> str | None:
    """Why a transport between GPUs cannot work with this placement; None if it can."""
    actors = placement.allocations[name_of(spec, FunctionRole.SAMPLES)]
    allocation = placement.allocation(publisher_of(spec), 0)
    learner = allocation.devices
    nodes = {group.node for group in placement.groups_of(allocation)}
    if asked == "cuda_ipc" and len(nodes) > 1:
        return f"the learner's ranks are on {len(nodes)} nodes, and it works on one"
    for number, actor in enumerate(actors):
        for device in (*actor.devices, *learner):
            if device.kind == CPU_KIND:
                return f"{device.name} is a CPU core, and it copies between GPUs"
        if asked == "cuda_ipc" and (apart := set(actor.devices) - set(learner)):
            return f"actor {number} is on {_names(apart)}, where the learner, on {_names(learner)}, has no rank"
        if asked == "nccl" and (both := set(actor.devices) & set(learner[:1])):
            return f"actor {number} and the learner's first rank share {_names(both)}: a broadcast goes between GPUs"
    return None


def _names(devices: Iterable[Device]) -> str:
    return ", ".join(device.name for device in devices)
