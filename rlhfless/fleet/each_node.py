"""Small pieces of work on every node of the cluster, whatever is on it."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from rlhfless.fleet.nodes import NODE_LABEL

log = logging.getLogger(__name__)


def on_node(node: str, work: Callable[..., object], *arguments: object) -> Any:
    """Ray's reference to what `work` will have returned on a node, in a process that ends with it. Holds no device."""
    options = {"num_cpus": 0, "num_gpus": 0, "max_retries": 0, "max_calls": 1, "label_selector": {NODE_LABEL: node}}
    task: Any = ray.remote(**options)(work)  # type: ignore[call-overload]  # Ray's types know no labels
    return task.remote(*arguments)


def on_each_node(
    work: Callable[..., object], *arguments: object, timeout_s: float, with_cores: bool = False
) -> dict[str, object]:
    """What `work` returned on each node that is alive, by the node's address; `with_cores`: where functions can be, and
    not on a head that is for drivers alone.

    A node on which it did not end within `timeout_s`, or raised, or which was lost, is not among them; the log says so.
    """
    nodes = [node for node in ray.nodes() if node["Alive"] and (node["Resources"].get("CPU") or not with_cores)]
    calls = {on_node(node["NodeID"], work, *arguments): node["NodeManagerAddress"] for node in nodes}
    ended, late = ray.wait(list(calls), num_returns=len(calls), timeout=timeout_s)
    for call in late:
        log.warning("%s did not end within %.0f s on node %s", work.__name__, timeout_s, calls[call])
    results: dict[str, object] = {}
    for call in ended:
        try:
            results[calls[call]] = ray.get(call)
        except RayError as error:
            log.warning("%s failed on node %s: %s", work.__name__, calls[call], error)
    return results


def remove_folders(folders: Sequence[str]) -> None:
    """To be called on a node: remove these folders, as far as they are there."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
