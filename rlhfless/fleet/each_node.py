"""Work on every node of the cluster, whatever is on it: small tasks, and models of the hub, fetched once on every
node before replicas start there."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Sequence

import ray
from ray.exceptions import RayError

from rlhfless.functions.on_node import on_node
from rlhfless.spec import RunSpec
from rlhfless.spec.data import is_path, shadowed
from rlhfless.util.errors import UserError

log = logging.getLogger(__name__)


def on_each_node(
    work: Callable[..., object], *arguments: object, timeout_s: float, with_cores: bool = False
) -> dict[str, object]:
    """Run `work` on each node that is alive; returns the results by the node's address. `with_cores`: only on nodes
    that can hold functions, and not on a head that is for drivers alone.

    A node that was lost, or on which the work raised or did not end within `timeout_s`, has no result; the log says so.
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
    """Remove these folders of this node, those that exist."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.py", "*.jinja")
"""The files of a model that transformers and vLLM read. Other formats of the same weights, which may be as large, are
not fetched."""


class ModelNotThere(UserError):
    """A model of the hub could not be fetched on a node."""


def hub_models(spec: RunSpec) -> tuple[str, ...]:
    """The models and tokenizers of a run that are not folders."""
    critic = {spec.critic_source.path} if spec.critic is not None else set()
    named = {spec.model.path, spec.model.tokenizer, *(model.path for model in spec.reward_models), *critic}
    return tuple(sorted(name for name in named if name and not is_path(name)))


def fetch_on_nodes(models: Sequence[str], timeout_s: float) -> None:
    """Fetch models on every node of the cluster. Raises ModelNotThere, which names the nodes without them."""
    by_node = on_each_node(fetch_fault, models, timeout_s=timeout_s)
    faults = [f"node {node}: {fault}" for node, fault in by_node.items() if fault is not None]
    if not by_node:
        faults.append(f"no node had it within timeouts.download_s ({timeout_s:.0f} s)")
    if faults:
        raise ModelNotThere(f"{', '.join(models)} could not be fetched: {'; '.join(faults)}")


def fetch_fault(models: Sequence[str]) -> str | None:
    """Fetch models into the cache of this node; returns the first fault, None if there is none."""
    from huggingface_hub import snapshot_download

    for model in models:
        if why := shadowed(model):
            return why
        try:
            snapshot_download(model, allow_patterns=list(FILES))
        except Exception as error:  # of the hub, its HTTP library, or the disk
            return f"{model}: {type(error).__name__}: {error}"
    return None
