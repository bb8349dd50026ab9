"""The frozen policy as a network, on the learner's own path, so that logprobs differ by weights alone."""

from __future__ import annotations

import torch

from rlhfless.algorithms.batch import PackedBatch
from rlhfless.functions.policy import load_policy, token_logprobs
from rlhfless.records import FloatArray
from rlhfless.spec import DType, ModelSpec


class ReferencePolicy:
    """The model of the spec, as it was before training."""

    def __init__(
        self, model: ModelSpec, *, dtype: DType, micro_batch_tokens: int, temperature: float, threads: int
    ) -> None:
        torch.set_num_threads(threads)
        self._policy = load_policy(model, parameter_dtype=dtype, compute_dtype=dtype)
        self._micro_batch_tokens = micro_batch_tokens
        self._temperature = temperature

    def logprobs(self, batch: PackedBatch) -> FloatArray:
        """Logprobs `[tokens]`, 0 on prompt tokens."""
        return token_logprobs(self._policy, batch, self._temperature, self._micro_batch_tokens)
