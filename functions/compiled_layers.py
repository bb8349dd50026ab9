"""Run decoder layers through `torch.compile`: norms, rotary embeddings and activation functions in fused kernels.

The forward method of a layer is compiled inside FSDP's hooks and activation checkpointing, and all layers share one
graph. Packed-row attention is excluded, because its layout differs with every micro-batch. Lengths are dynamic.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface

from rlhfless.functions.prefix_attention import NAME, shared_prefix_attention
from rlhfless.functions.sharding import layers_of

BACKEND = "inductor"


def compile_layers(model: Any) -> None:
    """Compile each decoder layer at its first forward pass, which takes a minute with inductor."""
    AttentionInterface.register(NAME, torch.compiler.disable(shared_prefix_attention))
    for layer in layers_of(model):
        layer.forward = torch.compile(layer.forward, backend=BACKEND, dynamic=True)  # type: ignore[method-assign]


def restore_layers(model: Any) -> None:
    """Undo `compile_layers`."""
    for layer in layers_of(model):
        vars(layer).pop("forward", None)
    AttentionInterface.register(NAME, shared_prefix_attention)
