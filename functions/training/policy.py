"""The policy as the learner loads it."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

from rlhfless.functions.packing_rate import with_measured_rates
from rlhfless.functions.policy import PolicyNetwork, load_policy
from rlhfless.spec import LearnerSpec, ModelSpec


def load_trained_policy(
    model: ModelSpec, learner: LearnerSpec, device: torch.device, mesh: DeviceMesh
) -> PolicyNetwork:
    """Load the policy, split over `mesh`, with its master weights in float32. Raises as load_policy does.
    *Collective.*"""
    policy = load_policy(
        model,
        parameter_dtype="float32",
        compute_dtype=learner.dtype,
        device=device,
        gradient_checkpointing=learner.gradient_checkpointing,
        mesh=mesh,
        offload=learner.offload,
        exact_head=learner.head_dtype == "float32",
        share_prefixes=learner.share_prefixes,
        logits_elements=learner.logits_elements,
    )
    return with_measured_rates(policy, learner.micro_batch_tokens)
