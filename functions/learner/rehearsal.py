"""A step of the real learner that computes nothing: how much memory a rank holds at most, found without its devices.

Tensors have shapes and no data (torch's FakeTensorMode), the other ranks are pretended (its fake process group), and
torch's FSDPMemTracker adds up what is alive. Everything else is the learner's own code. The optimiser's state is
counted from its tensors: the tracker does not see what is there before it begins.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM

from rlhfless.algorithms.base import algorithm_of
from rlhfless.algorithms.batch import PackedBatch, pack
from rlhfless.functions.learner.optimizer import MOMENTS, ShardedAdamW
from rlhfless.functions.learner.rank import LearnerRank
from rlhfless.functions.loading import build_blank
from rlhfless.functions.policy import TORCH_DTYPES, PolicyNetwork, checkpoint_activations, policy_of, response_logprobs
from rlhfless.functions.sharding import INSIDE, is_alone, local, mesh_of, set_gradient_reduction, shard
from rlhfless.records import FinishReason, Group, Prompt, Rollout
from rlhfless.spec import AdamWSpec, DType, GRPOSpec, LearnerSpec

MICRO_BATCHES = 2
"""The second one adds to the gradients of the first."""

CPU = torch.device("cpu")


def peak_bytes(config: Any, learner: LearnerSpec, ranks: int, rows: int, width: int) -> Mapping[str, int]:
    """What rank 0 of `ranks` holds at most during micro-batches of `rows` sequences of `width` tokens: in `total`, and
    of it by the tracker's categories.

    `config` is a transformers config. Must run in a process without a process group.
    """
    dist.init_process_group("fake", rank=0, world_size=ranks)
    try:
        mesh = mesh_of(CPU, ranks, learner.split_over(ranks))  # reads tensors
        with FakeTensorMode(allow_non_fake_inputs=True):
            rank = _rank(config, learner, mesh)
            batch = _batch(rows, width)
            rank._loss(batch)[0].backward()  # FSDP makes its groups in the first pass
            rank._policy.settle()
            rank._optimizer.forget_gradients()
            return _tracked(rank, batch)
    finally:
        dist.destroy_process_group()


def frozen_peak_bytes(config: Any, dtype: DType, ranks: int, rows: int, width: int) -> Mapping[str, int]:
    """As `peak_bytes`, of the reference: passes without a gradient, with weights in `dtype`."""
    dist.init_process_group("fake", rank=0, world_size=ranks)
    try:
        mesh = mesh_of(CPU, ranks) if ranks > 1 else None
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            policy = _policy(config, LearnerSpec(dtype="float32"), mesh, TORCH_DTYPES[dtype])
            batch = _batch(rows, width)
            response_logprobs(policy, batch, 1.0)
            policy.settle()
            tracker = FSDPMemTracker(policy.model)
            with tracker:
                response_logprobs(policy, batch, 1.0)
            return _peak(tracker)
    finally:
        dist.destroy_process_group()


def _tracked(rank: LearnerRank, batch: PackedBatch) -> Mapping[str, int]:
    tracker = FSDPMemTracker(rank._model)
    with tracker:
        for number in range(MICRO_BATCHES):
            tracker.reset_mod_stats()  # it takes one pass of each module at a time; its peak goes on
            set_gradient_reduction(rank._model, alone=rank._alone, offload=False, last=number == MICRO_BATCHES - 1)
            rank._loss(batch)[0].backward()
    states, peak = rank._optimizer.state(), _peak(tracker)
    moments = sum(local(tensor).nbytes for moment in MOMENTS for tensor in states[moment].values())
    return peak | {"AdamW": moments, "total": peak["total"] + moments}


def _peak(tracker: FSDPMemTracker) -> dict[str, int]:
    peaks = tracker.get_tracker_snapshot("peak")[CPU]
    return {str(getattr(kind, "value", kind)).lower(): int(size) for kind, size in peaks.items()}


def _rank(config: Any, learner: LearnerSpec, mesh: DeviceMesh) -> LearnerRank:
    """As LearnerRank's constructor makes it, but for the weights."""
    rank = LearnerRank.__new__(LearnerRank)
    rank._learner, rank._mesh, rank._alone = learner, mesh, is_alone(mesh, offload=False)
    rank._algorithm, rank._temperature, rank._entropy_gradient = algorithm_of(GRPOSpec()), 1.0, False
    rank._policy = _policy(config, learner, mesh)
    rank._model = rank._policy.model
    rank._optimizer = ShardedAdamW(rank._model, AdamWSpec())
    return rank


def _policy(
    config: Any, learner: LearnerSpec, mesh: DeviceMesh | None, exact: torch.dtype = torch.float32
) -> PolicyNetwork:
    model = build_blank(AutoModelForCausalLM, config, dtype=exact, attn_implementation="sdpa")
    compute = TORCH_DTYPES[learner.dtype] if exact == torch.float32 else exact
    if mesh is not None:
        shard(model, mesh, compute_dtype=compute, exact_head=learner.head_dtype == "float32")
        # The tracker sees forward passes by the hooks of modules alone: the model's own method is the pass.
        model.forward = getattr(model, INSIDE).__wrapped__
        setattr(model, INSIDE, model.__call__)
    model.to_empty(device=CPU)
    if learner.gradient_checkpointing:
        checkpoint_activations(model)
    return policy_of(model, CPU, compute, mesh, learner.logits_elements)


def _batch(rows: int, width: int) -> PackedBatch:
    """Sequences of one prompt token and a response that fills the width."""
    tokens = np.zeros(width, dtype=np.int64)
    rollouts = tuple(
        Rollout(
            "p", index, 0, tokens, np.zeros(width, dtype=np.float32), "", FinishReason.STOP, (), "rehearsal", 0.0, 0.0
        )
        for index in range(rows)
    )
    packed = pack([Group.of(Prompt("p", (0,), ""), rollouts)])
    return packed.with_columns(advantages=packed.spread(np.ones(packed.sequences)))
