"""One rank of a trained model: the learner's policy, or the critic's value function.

Each rank holds its shards of the float32 master weights, gradients and AdamW state (rlhfless.functions.sharding) and
computes its share of the sequences; gradients are summed over the ranks. Losses are divided by the step's global
denominators, so the sum is the gradient of the whole batch: two ranks take the same step as a single rank.

Precision: parameters, gradients and optimiser are float32. With `dtype: bfloat16`, layers compute in bfloat16 with
weights cast when they are gathered; softmax and losses stay float32.

Invariants: all ranks run the same number of micro-batches; a rank without work runs one token with zero weight. All
ranks skip an update whose gradient is not finite, so NaN never reaches a weight. On a CPU with a fixed number of
threads, the same batch gives bitwise equal weights. Subclasses define the loss; the controller retries.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from rlhfless.algorithms.base import MAXIMUM_SUFFIX, LossOutputs, combine_metrics
from rlhfless.algorithms.batch import PackedBatch, select
from rlhfless.algorithms.passes import Passes
from rlhfless.functions.base import RankPlace
from rlhfless.functions.batching import NO_SEQUENCES, MicroBatches, cut, prompt_tokens
from rlhfless.functions.lm_head import at_least_float32
from rlhfless.functions.lora import add_adapters, peft_tensors, sum_gradients, trained_parameters
from rlhfless.functions.policy import PolicyNetwork
from rlhfless.functions.policy_loading import load_policy
from rlhfless.functions.sharding import is_alone, join, set_gradient_reduction
from rlhfless.functions.shares import share_of
from rlhfless.functions.training.checkpoint import (
    Savers,
    restore_checkpoint,
    save_checkpoint,
    try_files,
)
from rlhfless.functions.training.optimizer import ShardedAdamW, WeightAverage
from rlhfless.functions.training.publishing import published_stream
from rlhfless.functions.training.saving import Background
from rlhfless.prefixes.packing import PackedSegments
from rlhfless.records import FloatArray, IntArray
from rlhfless.spec import AdamWSpec, LearnerSpec, ModelSpec, TrainingSpec
from rlhfless.weights.files import TensorStream

NO_NOTES: Mapping[str, Any] = MappingProxyType({})

SHARED_PROMPT_TOKENS = "shared_prompt_tokens"
"""Key of a micro-batch's shared prompt tokens, next to its metrics."""


class TrainingRank:
    """One rank. Call *collective* methods on all ranks with equal arguments."""

    def __init__(self, place: RankPlace, model: ModelSpec, training: TrainingSpec, optimizer: AdamWSpec) -> None:
        """Join the other ranks and load the model. A single rank forms a group as well."""
        torch.set_num_threads(training.threads or default_threads(place.ranks))
        self._spec = model
        self._training = training
        self._timeout_s = place.timeout_s
        shards, experts = training.split_over(place.ranks), training.experts_over(place.ranks)
        device, self._mesh, self._experts = join(place, shards, experts)
        self._alone = is_alone(self._mesh, offload=training.offload)
        self._policy = self._load(device)
        self._model = self._policy.model
        self._optimizer = ShardedAdamW(self._model, optimizer)
        decay = training.average_decay
        self._average = None if decay is None else WeightAverage(self._model, decay)
        self._savers = Savers.of(place.timeout_s)
        try_files(model, self._model, self._savers)
        self._background = Background(self._savers, place.timeout_s, self._mesh, experts)
        self.shared_prompt_tokens = 0
        """Prompt tokens of all updates that were shared within a micro-batch instead of computed. Equal on all
        ranks."""

    def _load(self, device: torch.device) -> PolicyNetwork:
        """Load the network, split over `self._mesh`. *Collective.*"""
        raise NotImplementedError

    def _loss(
        self, batch: PackedBatch, packed: PackedSegments | None = None
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss `[]` and metrics, each `[]`, of a micro-batch: its share of the mini-batch's.

        The loss must support a backward pass even without responses.
        """
        raise NotImplementedError

    def learn(self, batch: PackedBatch, passes: Passes) -> dict[str, float]:
        """Take an optimiser step per mini-batch of all passes; return the metrics of `_updates`. *Collective.*"""
        raise NotImplementedError

    def kept_on_device(self) -> list[torch.Tensor]:
        """Return the buffers and, unless they are offloaded, the shards of master weights and moments."""
        if self._training.offload:
            return list(self._model.buffers())
        tensors = [tensor for part in self._state().values() if isinstance(part, dict) for tensor in part.values()]
        frozen = (parameter for parameter in self._model.parameters() if not parameter.requires_grad)
        return [*tensors, *frozen, *self._model.buffers()]

    def _state(self) -> dict[str, Any]:
        """Return the state to checkpoint. `restore` writes into these tensors."""
        average = {} if self._average is None else {"average": self._average.tensors}
        return self._optimizer.state() | average | {"random_state": torch.get_rng_state()}

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Swap in the average of the weights, if there is one. *Collective.*"""
        if self._average is None:
            yield
            return
        self._policy.settle()
        with self._average.in_place():
            yield
            self._policy.settle()

    def close(self) -> None:
        """Leave the process group."""
        dist.destroy_process_group()

    def weights(self) -> dict[str, torch.Tensor]:
        """Return all weights in the published format, on the CPU of every rank. *Collective*."""
        stream = published_stream(self._model, self._spec.dtype, self._policy.device, everywhere=True)
        return {name: tensor.to("cpu", copy=True) for name, tensor in stream.tensors}

    def save(self, location: str | Path, notes: Mapping[str, Any] = NO_NOTES, *, background: bool = False) -> bool:
        """Write a checkpoint to a folder or URL: the Hugging Face model, the state, and `notes`. *Collective.*

        Saves the average of the weights as the model if there is one. With `background` and enough memory for a copy of
        the state, returns True after the copy; `wait_written` then waits for the files.
        """
        state = self._state()
        later = background and self._background.fits(state)
        device = self._policy.device
        if later:
            state, device = self._background.copied(state), torch.device("cpu")
        weights = state.get("average", state["master_weights"])
        if self._spec.lora is None:
            stream = published_stream(self._model, self._spec.dtype, device, tensors=weights)
        else:
            stream = TensorStream.of(peft_tensors(weights))
        write = partial(save_checkpoint, str(location), self._model, self._spec, stream, state, notes, self._savers)
        self._background.begin(str(location), write)
        if not later:
            self.wait_written()
        return later

    def wait_written(self) -> None:
        """Wait for the files of the last `save`. Raises CheckpointError."""
        self._background.wait_written()

    def restore(self, location: str | Path) -> None:
        """Resume from a checkpoint written by any number of ranks; bitwise if by the same number. *Collective.*"""
        state = self._state()
        restore_checkpoint(str(location), state)
        self._optimizer.set_restored(state)
        torch.set_rng_state(state["random_state"])

    def _updates(self, parts: Iterable[PackedBatch], planned: int) -> dict[str, float]:
        """Take an optimiser step per mini-batch. `planned`: the steps of the whole run. *Collective.*

        Returns `skipped_updates` (non-finite gradient) and the means over response tokens of the other updates (maxima
        for `*_max`), including `gradient_norm` before clipping and `learning_rate`.
        """
        updates = [(self._weight(part), self._update(part, planned)) for part in parts]
        applied = [(weight, metrics) for weight, metrics in updates if metrics is not None]
        return over_updates(applied) | {"skipped_updates": float(len(updates) - len(applied))}

    def _weight(self, batch: PackedBatch) -> int:
        """Return the weight of a mini-batch in a step's metrics."""
        return batch.denominators.tokens

    def _of_responses(self, batch: PackedBatch, values: FloatArray | IntArray) -> torch.Tensor:
        """Select the values of response tokens from `[tokens]`, on the device."""
        return torch.from_numpy(values[batch.response_mask]).to(self._policy.device)

    @staticmethod
    def _share(outputs: LossOutputs, computed: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return loss and metrics of `_loss`.

        `computed`: the model's outputs for the responses. They connect an empty micro-batch's loss to the parameters.
        """
        loss = outputs.loss if outputs.loss.requires_grad else outputs.loss + computed.sum() * 0
        return loss, {name: at_least_float32(value.detach()) for name, value in outputs.metrics.items()}

    def _sequences_of_rank(self, batch: PackedBatch) -> IntArray:
        """Return this rank's sequences of a mini-batch."""
        return share_of(self._policy, batch, self._training.pass_tokens)

    def _cut(self, batch: PackedBatch) -> MicroBatches:
        """Cut this rank's sequences into micro-batches."""
        return cut(batch, self._training.pass_tokens, packing=self._policy.packing)

    def _update(self, batch: PackedBatch, planned: int) -> dict[str, float] | None:
        """Take an optimiser step on a mini-batch. Return its metrics, or None if it was skipped."""
        share = select(batch, self._sequences_of_rank(batch))
        parts = self._cut(share)
        # Summed over micro-batches and ranks along with the loss metrics.
        shared = prompt_tokens(share) - parts.prompt_tokens
        shares = [{SHARED_PROMPT_TOKENS: torch.tensor(float(shared), device=self._policy.device)}]
        # Every rank must reduce the same metrics, so a rank without sequences runs an empty part.
        in_step = self._policy.in_step(parts.parts or (NO_SEQUENCES,))
        for number, part in enumerate(in_step, start=1):
            last = number == len(in_step)
            set_gradient_reduction(self._model, alone=self._alone, offload=self._training.offload, last=last)
            loss, metrics = self._loss(select(share, part.indices), part.packed)
            torch.autograd.backward(loss)
            shares.append(metrics)
        self._policy.settle()
        if self._spec.lora is not None:
            sum_gradients(trained_parameters(self._model).values())
        combined = over_ranks(combine_metrics(shares))
        self.shared_prompt_tokens += int(combined.pop(SHARED_PROMPT_TOKENS))
        norm = self._optimizer.gradient_norm()
        if not np.isfinite(norm):
            self._optimizer.forget_gradients()
            return None
        rate = self._optimizer.step(norm, planned)
        if self._average is not None:
            self._average.update()
        return combined | {"gradient_norm": norm, "gradient_norm_max": norm, "learning_rate": rate}


def default_threads(world_size: int) -> int:
    """Return this process's cores if it is pinned, else its share of the machine's cores."""
    usable = len(os.sched_getaffinity(0))
    pinned = usable < (os.cpu_count() or usable)
    return usable if pinned else max(1, usable // world_size)


def over_ranks(metrics: dict[str, torch.Tensor]) -> dict[str, float]:
    """Combine each rank's share `[]` of an optimiser step's metrics. *Collective.*"""
    sums = [name for name in metrics if not name.endswith(MAXIMUM_SUFFIX)]
    maxima = [name for name in metrics if name.endswith(MAXIMUM_SUFFIX)]
    combined: dict[str, float] = {}
    for names, operation in ((sums, dist.ReduceOp.SUM), (maxima, dist.ReduceOp.MAX)):
        if not names:
            continue
        values = torch.stack([metrics[name] for name in names])
        dist.all_reduce(values, op=operation)
        combined |= dict(zip(names, values.tolist(), strict=True))
    return combined


def over_updates(parts: Sequence[tuple[int, dict[str, float]]]) -> dict[str, float]:
    """Average (response tokens, metrics) of optimiser steps by tokens; take maxima of `*_max`."""
    if not parts:
        return {}
    total = sum(tokens for tokens, _ in parts)
    return {
        name: max(metrics[name] for _, metrics in parts)
        if name.endswith(MAXIMUM_SUFFIX)
        else sum(metrics[name] * tokens for tokens, metrics in parts) / max(total, 1)
        for name in parts[0][1]
    }


def load_trained_policy(
    model: ModelSpec, learner: LearnerSpec, device: torch.device, mesh: DeviceMesh, experts: DeviceMesh | None = None
) -> PolicyNetwork:
    """Load the learner's policy, with an adapter if the spec asks for one; see load_trained."""
    exact = learner.head_dtype == "float32"
    options = {"exact_head": exact, "logits_elements": learner.logits_elements, "experts": experts}
    options |= {"exact_routers": learner.router_dtype == "float32", "freeze_router": learner.freeze_router}
    frozen = None if model.lora is None else model.dtype
    policy = load_trained(model, learner, device, mesh, compiled=learner.compile, layers_dtype=frozen, **options)
    if model.lora is not None:
        add_adapters(policy.model, model.lora, device, model.path)
    return policy


def load_trained(
    model: ModelSpec, training: TrainingSpec, device: torch.device, mesh: DeviceMesh, **others: Any
) -> PolicyNetwork:
    """Load a model, split over `mesh`, with float32 master weights. *Collective.*

    `others`: further arguments of load_policy, which documents the errors.
    """
    return load_policy(
        model,
        parameter_dtype="float32",
        compute_dtype=training.dtype,
        device=device,
        gradient_checkpointing=training.recomputes,
        mesh=mesh,
        offload=training.offload,
        share_prefixes=training.share_prefixes,
        **others,
    )
