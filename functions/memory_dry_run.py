"""Dry-run a step of the real learner to find a rank's peak memory without its devices.

Tensors have shapes but no data (torch's FakeTensorMode), the other ranks are simulated (its fake process group), and
torch's FSDPMemTracker sums up live memory. Everything else is the ranks' own code. The optimiser's state is counted
from its tensors, because the tracker does not see memory allocated before it starts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed._functional_collectives import all_to_all_single
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import DeviceMesh
from transformers.distributed.tensor_parallel import EpDispatchExpertsParallel

from rlhfless.algorithms.base import algorithm_of
from rlhfless.algorithms.batch import PackedBatch, pack
from rlhfless.functions.attention_check import load_fused
from rlhfless.functions.expert_parallel import expert_mesh_of
from rlhfless.functions.learner.rank import LearnerRank
from rlhfless.functions.loading import build_blank
from rlhfless.functions.lora import add_adapters
from rlhfless.functions.policy import TORCH_DTYPES, PolicyNetwork, policy_of
from rlhfless.functions.policy_loading import POLICY, Form, checkpoint_activations
from rlhfless.functions.sharding import INSIDE, is_alone, local, mesh_of, set_gradient_reduction, shard
from rlhfless.functions.training.optimizer import ShardedAdamW
from rlhfless.functions.training.rank import TrainingRank
from rlhfless.records import FinishReason, Group, Prompt, Rollout
from rlhfless.spec import AdamWSpec, GRPOSpec, LearnerSpec, LoRASpec, TrainingSpec

MICRO_BATCHES = 2
"""The second one adds to the gradients of the first."""

CPU = torch.device("cpu")


def peak_bytes(
    config: Any, learner: LearnerSpec, ranks: int, rows: int, width: int, lora: LoRASpec | None = None
) -> Mapping[str, int]:
    """Return the peak bytes of rank 0 of `ranks`, with micro-batches of `rows` sequences of `width` tokens.

    With `lora`, the frozen layers are in the learner's dtype.

    The result has `total` and its parts by the tracker's categories. `config` is a transformers config. Must run in
    a process without a process group.
    """
    return dry_run_peak(
        lambda mesh, experts: _learner(config, learner, mesh, lora, experts), learner, ranks, _batch(rows, width)
    )


def dry_run_peak(
    make: Callable[[DeviceMesh, DeviceMesh | None], TrainingRank],
    training: TrainingSpec,
    ranks: int,
    batch: PackedBatch,
) -> Mapping[str, int]:
    """Return the peak of rank 0. `make` gets the mesh, and that of experts."""
    dist.init_process_group("fake", rank=0, world_size=ranks)
    try:
        shards = training.split_over(ranks)
        mesh = mesh_of(CPU, ranks, shards)  # reads tensors
        experts = expert_mesh_of(CPU, ranks, shards, training.experts_over(ranks))
        with FakeTensorMode(allow_non_fake_inputs=True), _dispatching_evenly(), _with_real_meshes():
            rank = make(mesh, experts)
            rank._loss(batch)[0].backward()  # FSDP makes its groups in the first pass
            rank._policy.settle()
            rank._optimizer.forget_gradients()
            return _tracked(rank, batch)
    finally:
        dist.destroy_process_group()


def _tracked(rank: TrainingRank, batch: PackedBatch) -> Mapping[str, int]:
    tracker = FSDPMemTracker(rank._model)
    with tracker:
        for number in range(MICRO_BATCHES):
            tracker.reset_mod_stats()  # it takes one pass of each module at a time; its peak is kept
            set_gradient_reduction(rank._model, alone=rank._alone, offload=False, last=number == MICRO_BATCHES - 1)
            rank._loss(batch)[0].backward()
    peak = _peak(tracker)
    moments = sum(local(tensor).nbytes for tensor in rank._optimizer.moments())
    return peak | {"AdamW": moments, "total": peak["total"] + moments}


def _peak(tracker: FSDPMemTracker) -> dict[str, int]:
    peaks = tracker.get_tracker_snapshot("peak")[CPU]
    return {str(getattr(kind, "value", kind)).lower(): int(size) for kind, size in peaks.items()}


@contextmanager
def _with_real_meshes() -> Iterator[None]:
    """Let parts of meshes be made within the block: they read the numbers of ranks from tensors."""
    part, joined = DeviceMesh.__getitem__, DeviceMesh._concatenate

    def real_part(mesh: DeviceMesh, names: Any) -> DeviceMesh:
        with unset_fake_temporarily():
            return part(mesh, names)

    def really_joined(meshes: list[DeviceMesh]) -> DeviceMesh:
        with unset_fake_temporarily():
            return joined(meshes)

    DeviceMesh.__getitem__, DeviceMesh._concatenate = real_part, staticmethod(really_joined)  # type: ignore
    try:
        yield
    finally:
        DeviceMesh.__getitem__, DeviceMesh._concatenate = part, staticmethod(joined)  # type: ignore


@contextmanager
def _dispatching_evenly() -> Iterator[None]:
    """Send every rank the same number of tokens within the block: fake tensors have no experts to count."""

    def dispatch(
        _: Any, hidden: torch.Tensor, chosen: torch.Tensor, __: int, group: dist.ProcessGroup, ranks: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[int], list[int]]:
        order = torch.argsort(chosen.reshape(-1))
        sizes = [len(part) for part in np.array_split(np.arange(chosen.numel()), ranks)]
        received = all_to_all_single(hidden[order // chosen.shape[-1]], sizes, sizes, group)
        return received, torch.zeros(len(received), dtype=torch.int64), order, sizes, sizes

    kept = EpDispatchExpertsParallel._dispatch_tokens
    EpDispatchExpertsParallel._dispatch_tokens = dispatch  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        EpDispatchExpertsParallel._dispatch_tokens = kept  # type: ignore[method-assign]


def _learner(
    config: Any,
    learner: LearnerSpec,
    mesh: DeviceMesh,
    lora: LoRASpec | None = None,
    experts: DeviceMesh | None = None,
) -> LearnerRank:
    rank = LearnerRank.__new__(LearnerRank)
    rank._algorithm, rank._temperature, rank._entropy_gradient = algorithm_of(GRPOSpec()), 1.0, False
    frozen = None if lora is None else TORCH_DTYPES[learner.dtype]
    network = _policy(config, learner, mesh, layers_dtype=frozen, experts=experts)
    if lora is not None:
        add_adapters(network.model, lora, CPU, "the model")
    _fill(rank, learner, mesh, network, AdamWSpec())
    return rank


def _fill(
    rank: TrainingRank, training: TrainingSpec, mesh: DeviceMesh, network: PolicyNetwork, optimizer: AdamWSpec
) -> None:
    """Initialise a rank like its constructor, except for the weights."""
    rank._training, rank._mesh, rank._alone = training, mesh, is_alone(mesh, offload=False)
    rank._policy, rank._model = network, network.model
    rank._optimizer = ShardedAdamW(rank._model, optimizer)


def _policy(
    config: Any, learner: LearnerSpec, mesh: DeviceMesh | None, exact: torch.dtype = torch.float32, **options: Any
) -> PolicyNetwork:
    exact_head, elements = learner.head_dtype == "float32", learner.logits_elements
    return _network(POLICY, config, learner, mesh, exact, exact_head=exact_head, logits_elements=elements, **options)


def _network(
    form: Form,
    config: Any,
    training: TrainingSpec,
    mesh: DeviceMesh | None,
    exact: torch.dtype = torch.float32,
    *,
    exact_head: bool = False,
    logits_elements: int | None = None,
    layers_dtype: torch.dtype | None = None,
    experts: DeviceMesh | None = None,
) -> PolicyNetwork:
    config = copy.deepcopy(config)
    config.update(dict(form.config))
    model = load_fused(lambda attention: build_blank(form.auto, config, dtype=exact, attn_implementation=attention))
    compute = TORCH_DTYPES[training.dtype] if exact == torch.float32 else exact
    if mesh is not None:
        options: dict[str, Any] = {"layers_dtype": layers_dtype, "exact_head": exact_head, "experts": experts}
        shard(model, mesh, compute_dtype=compute, **options)
        # The tracker sees forward passes only through module hooks: the model's own method is the pass.
        model.forward = getattr(model, INSIDE).__wrapped__
        setattr(model, INSIDE, model.__call__)
    model.to_empty(device=CPU)
    if training.recomputes:
        checkpoint_activations(model)
    return policy_of(model, CPU, compute, mesh, logits_elements, form.head)


def _batch(rows: int, width: int) -> PackedBatch:
    """Return sequences of one prompt token and a response that fills the width."""
    tokens = np.zeros(width, dtype=np.int64)
    rollouts = tuple(
        Rollout(
            "p", index, 0, tokens, np.zeros(width, dtype=np.float32), "", FinishReason.STOP, (), "rehearsal", 0.0, 0.0
        )
        for index in range(rows)
    )
    packed = pack([Group.of(Prompt("p", (0,), ""), rollouts)])
    ones = packed.spread(np.ones(packed.sequences))
    return packed.with_columns(advantages=ones, values=ones, returns=ones)
