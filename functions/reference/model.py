"""The frozen policy as a network, on the learner's own path, so that logprobs differ by weights alone."""

from __future__ import annotations

import torch

from rlhfless.algorithms.batch import PackedBatch
from rlhfless.functions.batching import cut, prompt_tokens
from rlhfless.functions.policy import load_policy, logprobs_of
from rlhfless.records import FloatArray
from rlhfless.spec import DType, ModelSpec


class ReferencePolicy:
    """The model of the spec, as it was before training."""

    def __init__(
        self,
        model: ModelSpec,
        *,
        dtype: DType,
        micro_batch_tokens: int,
        share_prefixes: bool,
        temperature: float,
        threads: int,
    ) -> None:
        torch.set_num_threads(threads)
        self._policy = load_policy(model, parameter_dtype=dtype, compute_dtype=dtype, share_prefixes=share_prefixes)
        self._micro_batch_tokens = micro_batch_tokens
        self._temperature = temperature

    def logprobs(self, batch: PackedBatch) -> tuple[FloatArray, int]:
        """Logprobs `[tokens]`, 0 on prompt tokens; and the prompt tokens that were not computed, because a sequence
        with the same prefix had computed them."""
        parts = cut(batch, self._micro_batch_tokens, may_share=self._policy.shares)
        values = logprobs_of(self._policy, batch, self._temperature, parts)
        return values, prompt_tokens(batch) - parts.prompt_tokens
