"""The frozen policy as a network, on the learner's own path, so that logprobs differ by weights alone."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

from rlhfless.algorithms.batch import PackedBatch
from rlhfless.functions.packing_rate import with_measured_rates
from rlhfless.functions.policy import load_policy
from rlhfless.functions.ranks.shares import of_all_ranks, share_logprobs
from rlhfless.records import FloatArray
from rlhfless.spec import DType, ModelSpec


class ReferencePolicy:
    """The model of the spec, as it was before training; with a mesh, one rank of it."""

    def __init__(
        self,
        model: ModelSpec,
        *,
        dtype: DType,
        micro_batch_tokens: int,
        share_prefixes: bool,
        logits_elements: int | None = None,
        temperature: float,
        threads: int,
        mesh: DeviceMesh | None = None,
    ) -> None:
        """*Collective* with a mesh."""
        torch.set_num_threads(threads)
        policy = load_policy(
            model,
            parameter_dtype=dtype,
            compute_dtype=dtype,
            mesh=mesh,
            share_prefixes=share_prefixes,
            logits_elements=logits_elements,
        )
        self._policy = with_measured_rates(policy, micro_batch_tokens)
        self._micro_batch_tokens = micro_batch_tokens
        self._temperature = temperature

    def logprobs(self, batch: PackedBatch) -> tuple[FloatArray, int]:
        """Logprobs `[tokens]` of the whole batch, 0 on prompt tokens; and the prompt tokens that this rank did not
        compute, because a sequence with the same prefix had computed them. *Collective*."""
        values, shared_tokens = share_logprobs(self._policy, batch, self._temperature, self._micro_batch_tokens)
        return of_all_ranks(self._policy, values), shared_tokens
