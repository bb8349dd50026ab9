"""Models of the hub, fetched once on every node before replicas start there, in a wait of its own."""

from __future__ import annotations

from collections.abc import Sequence

from rlhfless.fleet.each_node import on_each_node
from rlhfless.spec import RunSpec
from rlhfless.spec.errors import UserError
from rlhfless.spec.locations import is_path, shadowed

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
