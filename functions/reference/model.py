"""A frozen policy that runs on the learner's path, so that logprobs differ only by the weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.distributed.device_mesh import DeviceMesh

from rlhfless.algorithms.batch import PackedBatch
from rlhfless.functions.host_offload import kept_by
from rlhfless.functions.per_token import PerTokenSettings
from rlhfless.functions.policy import load_policy, logprob_outputs
from rlhfless.functions.ranks.shares import by_group
from rlhfless.records import FloatArray
from rlhfless.spec import ModelSpec


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
