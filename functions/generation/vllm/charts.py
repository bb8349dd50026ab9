"""Charts that are kept on a node, so that a second engine of the same model and shape need not make one again.

A chart says where a worker's layers hold the elements that are read back (`read_back`). It follows from the model's
code and configuration, how the model is split, vLLM's version, the layout of the published tensors and the sampled
elements; the key has all of them. A chart that cannot be read is made again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from rlhfless.functions.generation.vllm.read_back import Chart
from rlhfless.util.folders import home, private

CONTENTS = 3
"""Raised when charts have more in them than those of earlier releases: fused experts, quantised layers."""

log = logging.getLogger(__name__)


def charts_folder() -> Path:
    """Where the charts of this node are."""
    return home() / "charts"


def key_of(
    vllm_config: Any, model: torch.nn.Module, published: Iterable[tuple[str, torch.Tensor]], tokens: Sequence[int]
) -> str:
    """What decides a worker's chart, hashed."""
    parallel = vllm_config.parallel_config
    parts = {
        "contents": CONTENTS,
        "engine": vllm_config.compute_hash(),  # vLLM's version and the model's configuration are in it
        "quantization": vllm_config.model_config.quantization,
        "model": type(model).__qualname__,
        "shape": [parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.rank],
        "tensors": [(name, list(tensor.shape), str(tensor.dtype)) for name, tensor in published],
        "tokens": sorted(set(tokens)),
    }
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def kept_or_made(key: str, model: torch.nn.Module, make: Callable[[], Chart]) -> Chart:
    """The chart of a key: as it is kept, or made now and kept from now on."""
    file = charts_folder() / f"{key}.pt"
    if file.is_file():
        try:
            return Chart.of_plain(model, torch.load(file, weights_only=True))
        except Exception as error:  # a damaged file may fail in any way
            log.warning("the chart in %s cannot be used, and is made again: %r", file, error)
    made = make()
    if made.held:
        _keep(file, made.plain(model))
    return made


def _keep(file: Path, plain: dict[str, Any]) -> None:
    """Without a place to keep it the next engine makes its own."""
    try:
        private(file.parent)
        new = file.with_name(f"{file.name}.{os.getpid()}.new")
        torch.save(plain, new)
        new.replace(file)
    except OSError as error:
        log.warning("the chart is not kept in %s: %s", file.parent, error)
