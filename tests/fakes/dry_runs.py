"""Dry runs of critic and reference (rlhfless.functions.memory_dry_run), to compare with their memory plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import DeviceMesh

from rlhfless.algorithms.base import ActorCritic, algorithm_of
from rlhfless.functions import memory_dry_run as dry_run
from rlhfless.functions.policy import TORCH_DTYPES, logprob_outputs, response_outputs
from rlhfless.functions.sharding import mesh_of
from rlhfless.functions.training.critic import NEW_VALUES, CriticRank
from rlhfless.spec import CriticSpec, DType, LearnerSpec, PPOSpec


def critic_peak_bytes(config: Any, critic: CriticSpec, ranks: int, rows: int, width: int) -> Mapping[str, int]:
    """Return the peak bytes of a critic; see memory_dry_run.peak_bytes."""
    return dry_run.dry_run_peak(
        lambda mesh, _: _critic(config, critic, mesh), critic, ranks, dry_run._batch(rows, width)
    )


def frozen_peak_bytes(config: Any, dtype: DType, ranks: int, rows: int, width: int) -> Mapping[str, int]:
    """Return the same for the reference: passes without a gradient, with weights in `dtype`."""
    dist.init_process_group("fake", rank=0, world_size=ranks)
    try:
        mesh = mesh_of(dry_run.CPU, ranks) if ranks > 1 else None
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            policy = dry_run._policy(config, LearnerSpec(dtype="float32"), mesh, TORCH_DTYPES[dtype])
            batch = dry_run._batch(rows, width)
            response_outputs(policy, batch, logprob_outputs(policy, 1.0))
            policy.settle()
            tracker = FSDPMemTracker(policy.model)
            with tracker:
                response_outputs(policy, batch, logprob_outputs(policy, 1.0))
            return dry_run._peak(tracker)
    finally:
        dist.destroy_process_group()


def _critic(config: Any, critic: CriticSpec, mesh: DeviceMesh) -> CriticRank:
    rank = CriticRank.__new__(CriticRank)
    rank._algorithm = cast(ActorCritic, algorithm_of(PPOSpec()))
    dry_run._fill(rank, critic, mesh, dry_run._network(NEW_VALUES, config, critic, mesh), critic.optimizer)
    return rank
