"""Work on every node of the cluster, whatever is on it: small tasks, and models of the hub, fetched once on every
node before replicas start there."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from rlhfless.fleet.nodes import NODE_LABEL
from rlhfless.spec import RunSpec
from rlhfless.spec.data import is_path, shadowed
from rlhfless.spec.errors import UserError

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


FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.py", "*.jinja")
"""What transformers and vLLM read of a model. Other formats of the same weights, which may be as large, are left."""


class ModelNotThere(UserError):
    """A model of the hub could not be fetched on a node."""


def hub_models(spec: RunSpec) -> tuple[str, ...]:
    """The models and tokenizers of a run that are not folders."""
    named = {spec.model.path, spec.model.tokenizer, *(model.path for model in spec.reward_models)}
    return tuple(sorted(name for name in named if name and not is_path(name)))


def fetch_on_nodes(models: Sequence[str], timeout_s: float) -> None:
    """Fetch models on every node that is there. Raises ModelNotThere, with the nodes."""
    by_node = on_each_node(fetch_fault, models, timeout_s=timeout_s)
    faults = [f"node {node}: {fault}" for node, fault in by_node.items() if fault is not None]
    if not by_node:
        faults.append(f"no node had it within timeouts.download_s ({timeout_s:.0f} s)")
    if faults:
        raise ModelNotThere(f"{', '.join(models)} could not be fetched: {'; '.join(faults)}")


def fetch_fault(models: Sequence[str]) -> str | None:
    """To be called on a node: fetch models into its cache; what went wrong, if anything did."""
    from huggingface_hub import snapshot_download

    for model in models:
        if why := shadowed(model):
            return why
        try:
            snapshot_download(model, allow_patterns=list(FILES))
        except Exception as error:  # of the hub, its HTTP library, or the disk
            return f"{model}: {type(error).__name__}: {error}"
    return None
