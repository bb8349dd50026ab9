"""How a model that is trained is loaded: the learner's policy, and whatever has another head."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from rlhfless.functions.policy import PolicyNetwork, load_policy
from rlhfless.spec import LearnerSpec, ModelSpec, TrainingSpec


def load_trained_policy(
    model: ModelSpec, learner: LearnerSpec, device: torch.device, mesh: DeviceMesh
) -> PolicyNetwork:
    """The learner's policy. See load_trained."""
    exact = learner.head_dtype == "float32"
    head = {"exact_head": exact, "logits_elements": learner.logits_elements}
    return load_trained(model, learner, device, mesh, compiled=learner.compile, **head)


def load_trained(
    model: ModelSpec, training: TrainingSpec, device: torch.device, mesh: DeviceMesh, **head: Any
) -> PolicyNetwork:
    """Load a model, split over `mesh`, with its master weights in float32. `head`: what load_policy takes for its
    output, and `compiled`. Raises as load_policy does. *Collective.*"""
    return load_policy(
        model,
        parameter_dtype="float32",
        compute_dtype=training.dtype,
        device=device,
        gradient_checkpointing=training.recomputes,
        mesh=mesh,
        offload=training.offload,
        share_prefixes=training.share_prefixes,
        **head,
    )
