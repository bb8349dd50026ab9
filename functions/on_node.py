"""Run work on a given node of the cluster, whatever else runs there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray

from rlhfless.scaling.latency.devices import NODE_LABEL


def on_node(node: str, work: Callable[..., object], *arguments: object) -> Any:
    """Run `work` on a node, in a separate process without devices, and return Ray's reference to its result."""
    options = {"num_cpus": 0, "num_gpus": 0, "max_retries": 0, "max_calls": 1, "label_selector": {NODE_LABEL: node}}
    task: Any = ray.remote(**options)(work)  # type: ignore[call-overload]  # Ray's types know no labels
    return task.remote(*arguments)


def node_address() -> str:
    """Return the address of this process's node, as Ray knows it."""
    return ray.util.get_node_ip_address()
