"""Convert Ray's report of a cluster's nodes to nodes with devices of the price book's kinds. Pure.

The kind of GPUs follows from their node's label `ray.io/accelerator-type`, which Ray sets where it finds NVIDIA or AMD
devices. One type is ambiguous: an A100 has 40 or 80 GB, so its memory must be read. On a node without GPUs, the devices
are its CPU cores.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rlhfless.scaling.latency.devices import AMBIGUOUS, TYPE_LABEL, UnknownAccelerator, kind_of, types_of
from rlhfless.scaling.placement import DeviceGroup, Node


def selector(kind: str) -> dict[str, str]:
    """Return the label selector of nodes with GPUs of a kind."""
    return {TYPE_LABEL: f"in({','.join(types_of(kind))})"}


def ambiguous(reported: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the nodes whose device memory must be read to determine their kind."""
    return [node["NodeID"] for node in reported if node["Alive"] and _accelerator(node) in AMBIGUOUS]


def nodes_of(
    reported: Sequence[Mapping[str, Any]],
    available: Mapping[str, Mapping[str, float]],
    known: Collection[str],
    memory_bytes: Mapping[str, int],
    wanted: str | None = None,
) -> list[Node]:
    """Return the live nodes, sorted by address.

    `reported`: `ray.nodes()`; `available`: free resources by node; `known`: kinds of the price book; `memory_bytes`:
    memory of one device, by node, for the ambiguous types. Raises UnknownAccelerator for GPUs of an unknown type,
    unless a kind is `wanted`; then they are ignored.
    """
    nodes = []
    for node in reported:
        if not node["Alive"]:
            continue
        name, resources = node["NodeID"], node["Resources"]
        free = available.get(name, {})
        gpus, kind = int(resources.get("GPU", 0)), ""
        if gpus:
            try:
                kind = kind_of(_accelerator(node), known, memory_bytes.get(name))
            except UnknownAccelerator as error:
                if wanted is None:
                    raise UnknownAccelerator(f"node {node['NodeManagerAddress']}: {error}") from error
                gpus = 0
        nodes.append(
            Node(
                name,
                node["NodeManagerAddress"],
                cores=int(resources.get("CPU", 0)),
                free_cores=int(free.get("CPU", 0)),
                gpu_kind=kind,
                gpus=gpus,
                free_gpus=min(int(free.get("GPU", 0)), gpus),
            )
        )
    return sorted(nodes, key=lambda node: (node.address, node.name))


def _accelerator(node: Mapping[str, Any]) -> str:
    return str(node["Labels"].get(TYPE_LABEL, ""))


def shortage(group: DeviceGroup, nodes: Sequence[Node]) -> str:
    """Explain why the devices of a group are not available, with the demand and the free devices."""
    count, kind = len(group.devices), group.kind
    asked = f"{count} x {kind} on one node"
    having = [node for node in nodes if node.count(kind)]
    if not having:
        return f"{asked}: no node of the cluster has any"
    free_words = ", ".join(f"{node.address} has {node.free(kind)} of {node.count(kind)} free" for node in having)
    if all(node.count(kind) < count for node in having):
        return f"{asked}: no node has that many ({free_words})"
    return f"{asked}: {free_words}"
