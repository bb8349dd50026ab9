"""One data-parallel rank of the learner. A plain class: the actor decides when it is started, and where.

Every rank holds the whole model: float32 master weights and AdamW's state. It works on its share of the
sequences, and gradients are added up over the ranks. Losses are divided by the step's global denominators, so
the sum is the gradient of the whole batch: two ranks take the same step as a single rank.

Precision: parameters, gradients and optimiser are float32. With `dtype: bfloat16` matrix products run in
bfloat16 (torch.autocast casts the weights per pass); norms, softmax and losses stay float32.

Invariants: all ranks hold the same weights, bit for bit, because they apply the same summed gradient; an
update with a gradient that is not finite is skipped by all of them, so NaN never reaches a weight; and with a
fixed number of threads the same batch gives the same weights, bit for bit, on a CPU.

Deliberately not here: sharded states (FSDP), and retries, which the front decides.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rlhfless.algorithms.base import LossInputs, algorithm_of, combine_metrics, common_metrics
from rlhfless.algorithms.batch import PackedBatch, declared, mini_batches, select
from rlhfless.functions.batching import MicroBatch, MicroBatches, cut, deal, prompt_tokens
from rlhfless.functions.learner.checkpoint import load_state, save_checkpoint
from rlhfless.functions.learner.metrics import over_ranks, over_updates
from rlhfless.functions.learner.publishing import published_samples, published_weights, rounded_to, substituted
from rlhfless.functions.policy import (
    default_device,
    load_policy,
    logprobs_of,
    response_logprobs,
)
from rlhfless.prefixes.packing import PackedSegments
from rlhfless.records import FloatArray, IntArray
from rlhfless.spec import AdamWSpec, AlgorithmSpec, LearnerSpec, ModelSpec
from rlhfless.weights.perturb import perturbed_by

NO_NOTES: Mapping[str, Any] = MappingProxyType({})
NO_SEQUENCES = MicroBatch(np.zeros(0, dtype=np.int64))

SHARED_PROMPT_TOKENS = "shared_prompt_tokens"
"""Of a micro-batch, beside its metrics."""

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
        self._optimizer_spec = optimizer
        self._algorithm = algorithm_of(algorithm)
        self._temperature = temperature
        self._rank = rank
        self._world_size = world_size
        device = default_device()
        dist.init_process_group(
            backend="nccl" if device.type == "cuda" else "gloo",
            init_method=init_method,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        self._policy = load_policy(
            model,
            parameter_dtype="float32",
            compute_dtype=learner.dtype,
            device=device,
            gradient_checkpointing=learner.gradient_checkpointing,
            share_prefixes=learner.share_prefixes,
        )
        self._model = self._policy.model
        self._gradient = _flat_gradient(self._model)
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(),
            lr=optimizer.learning_rate,
            betas=optimizer.betas,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            fused=True,  # in place, without a temporary copy of all parameters
        )
        self._updates = 0
        self.shared_prompt_tokens = 0
        """Prompt tokens that no rank has computed in an update so far, because a sequence of the same micro-batch had
        computed the same prefix. Equal on all ranks."""

    def close(self) -> None:
        """Leave the process group."""
        dist.destroy_process_group()

    def evaluate(self, batch: PackedBatch) -> FloatArray:
        """Old logprobs `[tokens]` of the whole batch, 0 on prompt tokens, on every rank. *Collective.*"""
        everything = torch.from_numpy(self._evaluate_share(batch)).to(self._policy.device)
        dist.all_reduce(everything)
        return everything.cpu().numpy()

    def _evaluate_share(self, batch: PackedBatch) -> FloatArray:
        """`evaluate` for this rank's sequences; 0 on the tokens of other ranks."""
        share = self._share(batch)
        mine = select(batch, share)
        parts = self._cut(mine)
        everything = np.zeros(len(batch.tokens), dtype=np.float32)
        everything[np.repeat(batch.starts[share], mine.lengths) + mine.positions] = logprobs_of(
            self._policy, mine, self._temperature, parts
        )
        return everything

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

    def weights(self) -> dict[str, torch.Tensor]:
        """A copy on the CPU, in the published dtype, by the names in a checkpoint; tied tensors once."""
        return published_weights(self._model, self._spec.dtype)

    def probe_logprobs(self, token_ids: tuple[int, ...]) -> tuple[float, ...]:
        """Logprobs at temperature 1 of each token after the first, `[probe - 1]`, of the published weights.

        The weights are rounded to the published dtype and the arithmetic is float32: the answer of an engine that has
        loaded them, up to the engine's own rounding.
        """
        tokens = torch.tensor([token_ids], device=self._policy.device)
        with torch.no_grad(), substituted(self._model, rounded_to(self._spec.dtype)):
            hidden = self._policy.hidden_states(tokens[:, :-1])[0]
            logprobs = self._policy.head.logits(hidden).log_softmax(-1)
        return tuple(logprobs.gather(1, tokens[0, 1:, None]).squeeze(1).tolist())

    def weight_samples(self, token_ids: tuple[int, ...]) -> dict[str, bytes]:
        """Elements of the published weights, by tensor: an engine that has loaded them reads back the same."""
        return published_samples(self._model, self._spec.dtype, token_ids)

    @contextmanager
    def perturbed(self, seed: int) -> Iterator[None]:
        """Within the block every parameter is perturbed, by `seed` and its name; after it, as before.

        `weights`, `probe_logprobs` and `weight_samples` see the perturbed values: with them an engine's load is proven
        to reach every tensor.
        """
        with substituted(self._model, perturbed_by(seed)):
            yield

    def save(self, folder: str | Path, notes: Mapping[str, Any] = NO_NOTES) -> None:
        """Write a checkpoint: model and tokenizer in Hugging Face format, the state for `restore`, and `notes`.

        All ranks hold the same state, so one of them saves.
        """
        state = {
            "updates": self._updates,
            "optimizer": self._optimizer.state_dict(),
            "random_state": torch.get_rng_state(),
            # The model's own file may have a coarser format than the master weights.
            "master_weights": {name: value.detach() for name, value in self._model.named_parameters()},
        }
        save_checkpoint(Path(folder), self._model, self._spec, state, notes)

    def restore(self, folder: str | Path) -> None:
        """Continue from a checkpoint of `save`, bit for bit. Every rank restores."""
        state = load_state(Path(folder), self._policy.device)
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                parameter.copy_(state["master_weights"][name])
        self._optimizer.load_state_dict(state["optimizer"])
        self._updates = state["updates"]
        torch.set_rng_state(state["random_state"].cpu())

    def _share(self, batch: PackedBatch) -> IntArray:
        """This rank's sequences `[share]`: dealt out so that all ranks have equal work."""
        budget = self._learner.micro_batch_tokens
        return deal(batch, budget, self._world_size, may_share=self._policy.shares)[self._rank]

    def _cut(self, batch: PackedBatch) -> MicroBatches:
        return cut(batch, self._learner.micro_batch_tokens, may_share=self._policy.shares)

    def _update(self, batch: PackedBatch) -> dict[str, float] | None:
        """One optimiser step on a mini-batch. Returns its metrics, or None if it was skipped."""
        self._gradient.zero_()
        mine = select(batch, self._share(batch))
        parts = self._cut(mine)
        # Beside the metrics of the loss, which are shares too: so it is summed over micro-batches and ranks.
        shared = prompt_tokens(mine) - parts.prompt_tokens
        shares = [{SHARED_PROMPT_TOKENS: torch.tensor(float(shared), device=self._policy.device)}]
        # A rank without sequences has metrics, too, all 0: every rank must reduce the same ones.
        for part in parts.parts or (NO_SEQUENCES,):
            loss, metrics = self._loss(select(mine, part.indices), part.packed)
            if loss.requires_grad:
                torch.autograd.backward(loss)
            shares.append(metrics)
        dist.all_reduce(self._gradient)
        combined = over_ranks(combine_metrics(shares))
        self.shared_prompt_tokens += int(combined.pop(SHARED_PROMPT_TOKENS))
        norm = float(torch.linalg.vector_norm(self._gradient))
        if not np.isfinite(norm):
            return None
        return combined | {"gradient_norm": norm, "gradient_norm_max": norm, "learning_rate": self._apply(norm)}

    def _loss(self, batch: PackedBatch, packed: PackedSegments | None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Loss and metrics of one micro-batch: its share of the mini-batch's."""

        def of_responses(values: FloatArray) -> torch.Tensor:
            return torch.from_numpy(values[batch.response_mask]).to(self._policy.device)

        current = response_logprobs(self._policy, batch, self._temperature, packed)
        inputs = LossInputs(
            logprobs=current.logprobs,
            entropy=current.entropy,
            denominator_tokens=batch.denominators.tokens,
            **{name: of_responses(values) for name, values in batch.columns().items() if name in LOSS_COLUMNS},
        )
        outputs = self._algorithm.loss(inputs)
        metrics = common_metrics(inputs) | outputs.metrics | {"loss": outputs.loss}
        return outputs.loss, {name: value.detach().float() for name, value in metrics.items()}

    def _apply(self, norm: float) -> float:
        """Clip the gradient, whose norm is `norm`, and step. Returns the learning rate."""
        limit = self._optimizer_spec.max_grad_norm
        if limit is not None and norm > limit:
            self._gradient.mul_(limit / norm)
        self._updates += 1
        warmed_up = min(1.0, self._updates / max(self._optimizer_spec.warmup_steps, 1))
        learning_rate = self._optimizer_spec.learning_rate * warmed_up
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        return learning_rate


def default_threads(world_size: int) -> int:
    """The cores that this process may use, divided among the ranks unless it was pinned to its own."""
    usable = len(os.sched_getaffinity(0))
    pinned = usable < (os.cpu_count() or usable)
    return usable if pinned else max(1, usable // world_size)


def _flat_gradient(model: torch.nn.Module) -> torch.Tensor:
    """One tensor that all parameters' gradients are views of.

    Backward passes accumulate into it, so zeroing, reducing, measuring and clipping are one operation each,
    and a parameter that a rank's share does not reach has a gradient of 0, not none, on that rank.
    """
    parameters = list(model.parameters())
    flat = torch.zeros(sum(parameter.numel() for parameter in parameters), device=parameters[0].device)
    sizes = [parameter.numel() for parameter in parameters]
    for parameter, view in zip(parameters, torch.split(flat, sizes), strict=True):
        parameter.grad = view.view_as(parameter)
    return flat
