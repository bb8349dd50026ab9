"""Outputs of a network over its ranks, where each rank computes its share of the sequences.

`FrozenPolicy` computes those of a policy that is not trained, on the learner's path, so that logprobs differ only by
the weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from rlhfless.algorithms.batch import PackedBatch, select
from rlhfless.functions.batching import MicroBatch, cut, deal, prompt_tokens
from rlhfless.functions.host_offload import kept_by
from rlhfless.functions.policy import Outputs, PolicyNetwork, logprob_outputs, outputs_of
from rlhfless.functions.policy_loading import load_policy
from rlhfless.records import FloatArray, IntArray
from rlhfless.spec import ModelSpec

if TYPE_CHECKING:
    from rlhfless.functions.per_token import PerTokenSettings


def share_of(policy: PolicyNetwork, batch: PackedBatch, budget_tokens: int) -> IntArray:
    """Return this rank's sequences `[share]`, dealt for equal work on all ranks."""
    ranks, rank = _place(policy)
    return deal(batch, budget_tokens, ranks, packing=policy.packing)[rank]


def _place(policy: PolicyNetwork) -> tuple[int, int]:
    """Return the number of ranks, and the number of this one."""
    return (1, 0) if policy.mesh is None else (policy.mesh.size(), policy.mesh.get_rank())


def share_outputs(
    policy: PolicyNetwork, batch: PackedBatch, outputs: Outputs, budget_tokens: int
) -> tuple[FloatArray, int]:
    """Compute the first output `[tokens]` of a head for this rank's sequences. *Collective*.

    It is 0 on prompt tokens and on other ranks' tokens. Also returns the prompt tokens that a shared prefix saved.
    """
    share = share_of(policy, batch, budget_tokens)
    own = select(batch, share)
    parts = cut(own, budget_tokens, packing=policy.packing)
    values = outputs_of(policy, own, outputs, parts.parts)
    everything = np.zeros(len(batch.tokens), dtype=values.dtype)
    everything[batch.tokens_of(share)] = values
    return everything, prompt_tokens(own) - parts.prompt_tokens


def by_group(
    policy: PolicyNetwork, batch: PackedBatch, outputs: Outputs, budget_tokens: int, width: int = 1
) -> tuple[FloatArray, int]:
    """Compute the first of `outputs` `[tokens]` of the whole batch, 0 on prompt tokens, on every rank. *Collective.*
    `width`: see outputs_of.

    A rank computes whole groups, one at a time, so results are bitwise independent of batch composition and a repeated
    step learns the same. Also returns the prompt tokens of this rank's share that a shared prefix saved.
    """
    parts: list[MicroBatch] = []
    saved = 0
    ranks, rank = _place(policy)
    groups = batch.sequence_groups
    largest_first = np.argsort(-np.bincount(groups, batch.lengths), kind="stable")
    for number in largest_first[rank::ranks]:
        group = np.flatnonzero(groups == number)
        own = select(batch, group)
        pieces = cut(own, budget_tokens, packing=policy.packing)
        parts += [dataclasses.replace(part, indices=group[part.indices]) for part in pieces.parts]
        saved += prompt_tokens(own) - pieces.prompt_tokens
    return all_reduce_rows(policy, outputs_of(policy, batch, outputs, parts, width)), saved


def all_reduce_rows(policy: PolicyNetwork, values: FloatArray) -> FloatArray:
    """Sum values over the ranks, which combines shares into the whole batch. *Collective*."""
    if policy.mesh is None:
        return values
    everything = torch.from_numpy(values).to(policy.device)
    dist.all_reduce(everything)
    return everything.cpu().numpy()


class FrozenPolicy:
    """Computes logprobs under the spec's model from before training (a PerTokenWorker)."""

    def __init__(self, settings: PerTokenSettings, threads: int, mesh: DeviceMesh | None = None) -> None:
        torch.set_num_threads(threads)
        self._policy = load_policy(
            self.model_of(settings),
            parameter_dtype=settings.dtype,
            compute_dtype=settings.dtype,
            mesh=mesh,
            share_prefixes=settings.share_prefixes,
            logits_elements=settings.logits_elements,
        )
        self._settings = settings

    @staticmethod
    def model_of(settings: PerTokenSettings) -> ModelSpec:
        """Return the spec of the model to load."""
        return settings.model

    def kept_on_device(self) -> Iterator[torch.Tensor]:
        return kept_by(self._policy.model)

    def compute(self, batch: PackedBatch) -> tuple[FloatArray, int]:
        settings = self._settings
        logprobs = logprob_outputs(self._policy, settings.temperature)
        return by_group(self._policy, batch, logprobs, settings.micro_batch_tokens)


class FrozenTeacher(FrozenPolicy):
    """Computes logprobs and entropies, `[tokens, 2]` (a PerTokenWorker)."""

    def compute(self, batch: PackedBatch) -> tuple[FloatArray, int]:
        settings = self._settings
        outputs = logprob_outputs(self._policy, settings.temperature, "value")
        return by_group(self._policy, batch, outputs, settings.micro_batch_tokens, width=2)
