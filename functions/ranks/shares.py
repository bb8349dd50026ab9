"""Logprobs of a batch by all ranks of a policy: each computes those of its share of the sequences."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from rlhfless.algorithms.batch import PackedBatch, select
from rlhfless.functions.batching import cut, deal, prompt_tokens
from rlhfless.functions.policy import PolicyNetwork, logprobs_of
from rlhfless.records import FloatArray, IntArray


def share_of(policy: PolicyNetwork, batch: PackedBatch, budget_tokens: int) -> IntArray:
    """This rank's sequences `[share]`: dealt out so that all ranks have equal work."""
    ranks, rank = (1, 0) if policy.mesh is None else (policy.mesh.size(), policy.mesh.get_rank())
    return deal(batch, budget_tokens, ranks, pays_below=policy.packs_below)[rank]


def share_logprobs(
    policy: PolicyNetwork, batch: PackedBatch, temperature: float, budget_tokens: int
) -> tuple[FloatArray, int]:
    """Logprobs `[tokens]` of this rank's sequences, 0 on prompt tokens and on the tokens of other ranks; and the prompt
    tokens of the share that were not computed, because a sequence with the same prefix had computed them. *Collective*.
    """
    share = share_of(policy, batch, budget_tokens)
    own = select(batch, share)
    parts = cut(own, budget_tokens, pays_below=policy.packs_below)
    values = logprobs_of(policy, own, temperature, parts)
    everything = np.zeros(len(batch.tokens), dtype=values.dtype)
    everything[np.repeat(batch.starts[share], own.lengths) + own.positions] = values
    return everything, prompt_tokens(own) - parts.prompt_tokens


def of_all_ranks(policy: PolicyNetwork, values: FloatArray) -> FloatArray:
    """The sum over the ranks, on each of them: values of shares become those of the batch. *Collective*."""
    if policy.mesh is None:
        return values
    everything = torch.from_numpy(values).to(policy.device)
    dist.all_reduce(everything)
    return everything.cpu().numpy()
