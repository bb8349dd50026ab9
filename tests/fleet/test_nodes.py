"""Nodes as Ray reports them."""

from __future__ import annotations

from typing import Any

import pytest

from rlhfless.fleet.nodes import ambiguous, nodes_of, selector, shortage
from rlhfless.scaling.latency.devices import UnknownAccelerator
from rlhfless.scaling.placement import Device, DeviceGroup, Node

TYPE = "ray.io/accelerator-type"


def reported(name: str, *, alive: bool = True, accelerator: str = "", **resources: float) -> dict[str, Any]:
    """Return a node as in `ray.nodes()`."""
    labels = {"ray.io/node-id": name} | ({TYPE: accelerator} if accelerator else {})
    return {
        "NodeID": name,
        "NodeManagerAddress": f"10.0.0.{name}",
        "Alive": alive,
        "Resources": resources,
        "Labels": labels,
    }


def test_nodes_have_their_gpus_or_their_cores() -> None:
    nodes = nodes_of(
        [
            reported("2", CPU=96.0, GPU=8.0, accelerator="H100"),
            reported("1", CPU=4.0),
            reported("3", alive=False, CPU=4.0),
        ],
        {"2": {"CPU": 90.0, "GPU": 3.0}, "1": {}},
        ["h100"],
        {},
    )
    assert nodes == [Node("1", "10.0.0.1", 4, 0), Node("2", "10.0.0.2", 96, 90, "h100", 8, 3)]
    assert (nodes[1].count("h100"), nodes[1].count("l40s"), nodes[1].count("cpu-core")) == (8, 0, 96)


def test_the_memory_is_looked_at_where_the_type_is_ambiguous() -> None:
    found = [reported("1", CPU=8, GPU=8, accelerator="A100"), reported("2", CPU=8, GPU=8, accelerator="H100")]
    assert ambiguous(found) == ["1"]
    nodes = nodes_of(found, {}, ["h100"], {"1": 84_987_740_160})
    assert [node.gpu_kind for node in nodes] == ["a100-80gb", "h100"]


def test_unknown_gpus_are_refused_unless_others_are_wanted() -> None:
    found = [reported("1", CPU=8, GPU=2), reported("2", CPU=8, GPU=8, accelerator="H100")]
    with pytest.raises(UnknownAccelerator, match=r"node 10.0.0.1: GPUs without a type are not known"):
        nodes_of(found, {}, ["h100"], {})
    nodes = nodes_of(found, {}, ["h100"], {}, wanted="h100")
    assert [(node.gpus, node.gpu_kind) for node in nodes] == [(0, ""), (8, "h100")]


def test_a_shortage_says_what_is_asked_and_what_is_free() -> None:
    group = DeviceGroup("generation-0", tuple(Device(f"gpu-{i}", "h100", i) for i in range(4)))
    busy, small = Node("a", "10.0.0.1", 8, 8, "h100", 8, 2), Node("b", "10.0.0.2", 8, 8, "h100", 2, 2)
    assert shortage(group, [busy, small]) == "4 x h100 on one node: 10.0.0.1 has 2 of 8 free, 10.0.0.2 has 2 of 2 free"
    assert shortage(group, [small]) == "4 x h100 on one node: no node has that many (10.0.0.2 has 2 of 2 free)"
    assert shortage(group, [Node("c", "10.0.0.3", 8, 8)]) == "4 x h100 on one node: no node of the cluster has any"


def test_nodes_are_selected_by_the_types_of_a_kind() -> None:
    assert selector("h100") == {TYPE: "in(H100)"}
    assert selector("a100-80gb") == {TYPE: "in(A100-80G,A100)"}
