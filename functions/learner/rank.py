"""One rank of the learner. A plain class: the actor decides when it is started, and where.

Each rank holds its shards of the float32 master weights, gradients and AdamW's state (rlhfless.functions.sharding),
works on its share of the sequences, and gradients are added up over the ranks. Losses are divided by the step's global
denominators, so the sum is the gradient of the whole batch: two ranks take the same step as a single rank.

Precision: parameters, gradients and optimiser are float32. With `dtype: bfloat16` layers compute in bfloat16, from
weights that are cast where they are gathered; softmax and losses stay float32.

Invariants: all ranks run as many micro-batches, a rank without work with one token that counts for nothing; an update
with a gradient that is not finite is skipped by all of them, so NaN never reaches a weight; and with a fixed number of
threads the same batch gives the same weights, bit for bit, on a CPU.

Deliberately not here: retries, which the front decides.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rlhfless.algorithms.base import LossInputs, algorithm_of, combine_metrics, common_metrics
from rlhfless.algorithms.batch import PackedBatch, declared, mini_batches, select
from rlhfless.functions.batching import NO_SEQUENCES, MicroBatches, cut, prompt_tokens
from rlhfless.functions.head import at_least_float32
from rlhfless.functions.learner.checkpoint import Savers, restore_checkpoint, save_checkpoint
from rlhfless.functions.learner.metrics import over_ranks, over_updates
from rlhfless.functions.learner.optimizer import ShardedAdamW
from rlhfless.functions.learner.probing import Probing
from rlhfless.functions.learner.publishing import Substitute, gathered_as, published_stream, sampling
from rlhfless.functions.learner.saving import Background
from rlhfless.functions.packing_rate import with_measured_rates
from rlhfless.functions.policy import PolicyNetwork, load_policy, response_logprobs
from rlhfless.functions.ranks.shares import of_all_ranks, share_logprobs, share_of
from rlhfless.functions.sharding import is_alone, join, set_gradient_reduction
from rlhfless.prefixes.packing import PackedSegments
from rlhfless.records import FloatArray, IntArray
from rlhfless.spec import AdamWSpec, AlgorithmSpec, LearnerSpec, ModelSpec
from rlhfless.weights.files import TensorStream
from rlhfless.weights.perturb import perturbed_by

NO_NOTES: Mapping[str, Any] = MappingProxyType({})

SHARED_PROMPT_TOKENS = "shared_prompt_tokens"
"""The key of a micro-batch's shared prompt tokens, beside its metrics."""

LOSS_COLUMNS = declared(PackedBatch).keys() & {field.name for field in dataclasses.fields(LossInputs)}
"""The columns of the batch from which a loss is computed."""


class LearnerRank:
    """Rank `rank` of `world_size`. *Collective* methods must be called on all ranks, with equal arguments."""

    def __init__(
        self,
        model: ModelSpec,
        learner: LearnerSpec,
        optimizer: AdamWSpec,
        algorithm: AlgorithmSpec,
        temperature: float,
        *,
        rank: int,
        world_size: int,
        init_method: str,
        timeout_s: float,
    ) -> None:
        """Joins the process group at `init_method` (`tcp://host:port` or `file:///path`) and loads the model.

        `timeout_s` bounds the rendezvous and each collective; torch raises an error that names the operation.
        One rank forms a group, too: one path for any number.
        """
        torch.set_num_threads(learner.threads or default_threads(world_size))
        self._spec = model
        self._learner = learner
        self._algorithm = algorithm_of(algorithm)
        self._entropy_gradient = algorithm.needs.entropy_gradient
        self._temperature = temperature
        device, self._mesh = join(init_method, rank, world_size, timeout_s, learner.split_over(world_size))
        self._alone = is_alone(self._mesh, offload=learner.offload)
        self._policy = self._load(device)
        self._model = self._policy.model
        self._optimizer = ShardedAdamW(self._model, optimizer)
        self._probing = Probing(self._policy, trust_remote_code=model.trust_remote_code)
        self._timeout_s = timeout_s
        self._savers = Savers.of(timeout_s)
        self._background = Background(self._savers, timeout_s, self._mesh)
        self._substitute: Substitute | None = None
        self.shared_prompt_tokens = 0
        """Prompt tokens that no rank has computed in an update so far, because a sequence of the same micro-batch had
        computed the same prefix. Equal on all ranks."""

    def _load(self, device: torch.device) -> PolicyNetwork:
        policy = load_policy(
            self._spec,
            parameter_dtype="float32",
            compute_dtype=self._learner.dtype,
            device=device,
            gradient_checkpointing=self._learner.gradient_checkpointing,
            mesh=self._mesh,
            offload=self._learner.offload,
            exact_head=self._learner.head_dtype == "float32",
            share_prefixes=self._learner.share_prefixes,
            logits_elements=self._learner.logits_elements,
        )
        return with_measured_rates(policy, self._learner.micro_batch_tokens)

    def kept_on_device(self) -> list[torch.Tensor]:
        """Shards of the master weights and of the optimiser's moments, and buffers; nothing that is offloaded."""
        state = self._optimizer.state()
        tensors = [tensor for part in state.values() if isinstance(part, dict) for tensor in part.values()]
        if self._learner.offload:
            tensors = []
        return [*tensors, *self._model.buffers()]

    def close(self) -> None:
        """Leave the process group."""
        dist.destroy_process_group()

    def evaluate(self, batch: PackedBatch) -> FloatArray:
        """Old logprobs `[tokens]` of the whole batch, 0 on prompt tokens, on every rank. *Collective.*"""
        return of_all_ranks(self._policy, self._evaluate_share(batch))

    def _evaluate_share(self, batch: PackedBatch) -> FloatArray:
        """`evaluate` for this rank's sequences; 0 on the tokens of other ranks."""
        return share_logprobs(self._policy, batch, self._temperature, self._learner.micro_batch_tokens)[0]

    def learn(self, batch: PackedBatch, count: int) -> dict[str, float]:
        """One training step: an optimiser step on each of `count` mini-batches. *Collective.*

        A batch without old logprobs is evaluated here, except its first mini-batch, for which the old policy is the
        current one. Returns `skipped_updates`, the updates whose gradient was not finite, and for the other updates
        means over their response tokens (`*_max` are maxima), including `gradient_norm` before clipping and
        `learning_rate`.
        Raises ValueError if the batch lacks advantages.
        """
        if batch.advantages is None:
            raise ValueError("the batch has no advantages; compute them before `learn`")
        parts = list(mini_batches(batch, count))
        if batch.old_logprobs is None:
            parts[1:] = [part.with_columns(old_logprobs=self._evaluate_share(part)) for part in parts[1:]]
        updates = [(part.denominators.tokens, self._update(part)) for part in parts]
        applied = [(tokens, metrics) for tokens, metrics in updates if metrics is not None]
        return over_updates(applied) | {"skipped_updates": float(len(updates) - len(applied))}

    def published(self, tokens: tuple[int, ...] = ()) -> tuple[TensorStream, dict[str, bytes]]:
        """The weights in the published dtype, by the names in a checkpoint, tied tensors once; they may share the
        learner's memory. On rank 0; the other ranks' streams are empty. *Collective*: every rank must take all tensors.

        And elements of those that were taken, which an engine that has loaded them reads back; none without `tokens`,
        which select them.
        """
        stream = published_stream(self._model, self._spec.dtype, self._policy.device, self._substitute)
        samples: dict[str, bytes] = {}
        return (sampling(stream, tokens, samples) if tokens else stream), samples

    def weights(self) -> dict[str, torch.Tensor]:
        """All that is published, on the CPU and on every rank, at once: for models that fit into one process.
        *Collective*."""
        stream = published_stream(self._model, self._spec.dtype, self._policy.device, self._substitute, everywhere=True)
        return {name: tensor.to("cpu", copy=True) for name, tensor in stream.tensors}

    def probe_logprobs(self, token_ids: tuple[int, ...]) -> tuple[float, ...]:
        """Logprobs at temperature 1 of each token after the first, `[probe - 1]`, of the published weights.

        The weights are rounded to the published dtype and the arithmetic is float32: the answer of an engine that has
        loaded them, up to the engine's own rounding. *Collective.*
        """

        def fetch(name: str, tensor: torch.Tensor) -> torch.Tensor:
            published = gathered_as(name, tensor, self._spec.dtype, self._policy.device, self._substitute)
            return published.to(tensor.dtype)

        return self._probing.logprobs(token_ids, fetch)

    @contextmanager
    def perturbed(self, seed: int) -> Iterator[None]:
        """Within the block what is published is perturbed, by `seed` and each parameter's name.

        `published` and `probe_logprobs` see the perturbed values: with them an engine's load is
        proven to reach every tensor. The shards are not touched.
        """
        self._substitute = perturbed_by(seed)
        try:
            yield
        finally:
            self._substitute = None

    def save(self, location: str | Path, notes: Mapping[str, Any] = NO_NOTES, *, background: bool = False) -> bool:
        """Write a checkpoint to a folder or a URL: model and tokenizer in Hugging Face format, the state for `restore`,
        and `notes`. With `background`, and where there is memory for a copy of the state, this returns True at once,
        and `wait_written` when it is done. *Collective.*"""
        state = self._optimizer.state() | {"random_state": torch.get_rng_state()}
        later = background and self._background.fits(state)
        device = self._policy.device
        if later:
            state, device = self._background.copied(state), torch.device("cpu")
        stream = published_stream(self._model, self._spec.dtype, device, tensors=state["master_weights"])
        write = partial(save_checkpoint, str(location), self._model, self._spec, stream, state, notes, self._savers)
        self._background.begin(write)
        if not later:
            self.wait_written()
        return later

    def wait_written(self) -> None:
        """Wait until the checkpoint that `save` began is complete. Raises CheckpointError, or TimeoutError."""
        self._background.wait_written(self._timeout_s)

    def restore(self, location: str | Path) -> None:
        """Continue from a checkpoint of `save`, written by any number of ranks; bit for bit if by as many.
        *Collective.*"""
        state = self._optimizer.state() | {"random_state": torch.get_rng_state()}
        restore_checkpoint(str(location), state)
        self._optimizer.set_restored(state)
        torch.set_rng_state(state["random_state"])

    def _cut(self, batch: PackedBatch) -> MicroBatches:
        return cut(batch, self._learner.micro_batch_tokens, pays_below=self._policy.packs_below)

    def _update(self, batch: PackedBatch) -> dict[str, float] | None:
        """One optimiser step on a mini-batch. Returns its metrics, or None if it was skipped."""
        share = select(batch, share_of(self._policy, batch, self._learner.micro_batch_tokens))
        parts = self._cut(share)
        # Beside the metrics of the loss, which are shares too: so it is summed over micro-batches and ranks.
        shared = prompt_tokens(share) - parts.prompt_tokens
        shares = [{SHARED_PROMPT_TOKENS: torch.tensor(float(shared), device=self._policy.device)}]
        # A rank without sequences has metrics, too, all 0: every rank must reduce the same ones.
        in_step = self._policy.in_step(parts.parts or (NO_SEQUENCES,))
        for number, part in enumerate(in_step, start=1):
            last = number == len(in_step)
            set_gradient_reduction(self._model, alone=self._alone, offload=self._learner.offload, last=last)
            loss, metrics = self._loss(select(share, part.indices), part.packed)
            torch.autograd.backward(loss)
            shares.append(metrics)
        self._policy.settle()
        combined = over_ranks(combine_metrics(shares))
        self.shared_prompt_tokens += int(combined.pop(SHARED_PROMPT_TOKENS))
        norm = self._optimizer.gradient_norm()
        if not np.isfinite(norm):
            self._optimizer.forget_gradients()
            return None
        rate = self._optimizer.step(norm)
        return combined | {"gradient_norm": norm, "gradient_norm_max": norm, "learning_rate": rate}

    def _loss(
        self, batch: PackedBatch, packed: PackedSegments | None = None
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Loss and metrics of one micro-batch: its share of the mini-batch's."""

        def of_responses(values: FloatArray | IntArray) -> torch.Tensor:
            return torch.from_numpy(values[batch.response_mask]).to(self._policy.device)

        current = response_logprobs(
            self._policy, batch, self._temperature, packed, entropy_gradient=self._entropy_gradient
        )
        inputs = LossInputs(
            logprobs=current.logprobs,
            entropy=current.entropy,
            denominator_tokens=batch.denominators.tokens,
            sequence_id=of_responses(batch.sequence_id),
            denominator_sequences=batch.denominators.sequences,
            own={name: of_responses(values) for name, values in batch.own.items()},
            **{name: of_responses(values) for name, values in batch.columns().items() if name in LOSS_COLUMNS},
        )
        outputs = self._algorithm.loss(inputs)
        metrics = common_metrics(inputs) | outputs.metrics | {"loss": outputs.loss}
        # Nothing of an empty micro-batch may reach an algorithm's loss, and still its backward pass must run.
        loss = outputs.loss if outputs.loss.requires_grad else outputs.loss + current.logprobs.sum() * 0
        return loss, {name: at_least_float32(value.detach()) for name, value in metrics.items()}


def default_threads(world_size: int) -> int:
    """The cores that this process may use, divided among the ranks unless it was pinned to its own."""
    usable = len(os.sched_getaffinity(0))
    pinned = usable < (os.cpu_count() or usable)
    return usable if pinned else max(1, usable // world_size)
