"""One rank of the learner: trains the policy, computes its logprobs, publishes its weights."""

from __future__ import annotations

import dataclasses

import torch

from rlhfless.algorithms.base import LossInputs, LossOutputs, algorithm_of, common_metrics
from rlhfless.algorithms.batch import PackedBatch, declared
from rlhfless.algorithms.passes import Passes
from rlhfless.functions.learner.exact_forward import ExactForward
from rlhfless.functions.policy import PolicyNetwork, response_logprobs
from rlhfless.functions.ranks.shares import all_reduce_rows, share_logprobs
from rlhfless.functions.training.publishing import Lent, gathered_as, published_stream, sampling
from rlhfless.functions.training.rank import TrainingRank, load_trained_policy
from rlhfless.prefixes.packing import PackedSegments
from rlhfless.records import FloatArray, WeightSample
from rlhfless.spec import AdamWSpec, AlgorithmSpec, LearnerSpec, ModelSpec
from rlhfless.spec.generation import Quantization
from rlhfless.weights.files import TensorStream

LOSS_COLUMNS = declared(PackedBatch).keys() & {field.name for field in dataclasses.fields(LossInputs)}
"""Fields of the batch that a loss reads."""


class LearnerRank(TrainingRank):
    """A learner rank of an RLHF run (see TrainingRank)."""

    _training: LearnerSpec

    def __init__(
        self,
        model: ModelSpec,
        learner: LearnerSpec,
        optimizer: AdamWSpec,
        algorithm: AlgorithmSpec,
        temperature: float,
        quantization: Quantization = "off",
        *,
        rank: int,
        world_size: int,
        init_method: str,
        timeout_s: float,
    ) -> None:
        """`temperature` and `quantization` are those of the engines; see TrainingRank for the rest."""
        self._algorithm = algorithm_of(algorithm)
        self._entropy_gradient = algorithm.needs.entropy_gradient
        self._temperature = temperature
        super().__init__(
            model,
            learner,
            optimizer,
            rank=rank,
            world_size=world_size,
            init_method=init_method,
            timeout_s=timeout_s,
        )
        self._probing = ExactForward(self._policy, trust_remote_code=model.trust_remote_code, quantization=quantization)

    def _load(self, device: torch.device) -> PolicyNetwork:
        return load_trained_policy(self._spec, self._training, device, self._mesh)

    def evaluate(self, batch: PackedBatch) -> FloatArray:
        """Compute old logprobs `[tokens]` of the whole batch, 0 on prompt tokens, on every rank. *Collective.*"""
        return all_reduce_rows(self._policy, self._evaluate_share(batch))

    def _evaluate_share(self, batch: PackedBatch) -> FloatArray:
        """Evaluate this rank's sequences; 0 on the tokens of other ranks."""
        return share_logprobs(self._policy, batch, self._temperature, self._training.pass_tokens)[0]

    def learn(self, batch: PackedBatch, passes: Passes) -> dict[str, float]:
        """Take a training step (see TrainingRank). *Collective.*

        Computes missing old logprobs before the first update. The first update needs none: its old policy is the
        current one, so a step of one update ignores old logprobs. Raises ValueError without advantages.
        """
        if batch.advantages is None:
            raise ValueError("the batch has no advantages; compute them before `learn`")
        if passes.updates == 1:
            batch = dataclasses.replace(batch, old_logprobs=None)
        elif batch.old_logprobs is None and passes.epochs > 1:
            batch = dataclasses.replace(batch, old_logprobs=self.evaluate(batch))
        if batch.old_logprobs is not None:
            return self._updates(passes.over(batch), passes.planned_updates)
        parts = list(passes.over(batch))
        parts[1:] = [dataclasses.replace(part, old_logprobs=self._evaluate_share(part)) for part in parts[1:]]
        return self._updates(parts, passes.planned_updates)

    def published(self, tokens: tuple[int, ...] = ()) -> tuple[TensorStream, dict[str, WeightSample]]:
        """Stream the weights in the published dtype under their checkpoint names, tied tensors once. *Collective*.

        Tensors may share the learner's memory. Ranks other than 0 get an empty stream, and must exhaust it too. The
        second value fills with elements of the tensors, selected by `tokens`, for engines to compare.
        """
        stream = published_stream(self._model, self._spec.dtype, self._policy.device)
        samples: dict[str, WeightSample] = {}
        return (sampling(stream, tokens, samples) if tokens else stream), samples

    def published_everywhere(self, lent: Lent | None) -> TensorStream:
        """Stream the weights on every rank, without samples. `lent` fills offloaded tensors. *Collective.*"""
        self._policy.settle()  # an evaluation leaves weights gathered
        return published_stream(self._model, self._spec.dtype, self._policy.device, everywhere=True, lent=lent)

    def probe_logprobs(self, token_ids: tuple[int, ...]) -> tuple[float, ...]:
        """Return logprobs `[probe - 1]` at temperature 1 of each token after the first, by the published weights.

        Weights are rounded to the published dtype or the engines' codes; arithmetic is float32. An engine with these
        weights returns the same values, up to its own rounding. *Collective.*
        """

        def fetch(_: str, tensor: torch.Tensor) -> torch.Tensor:
            published = gathered_as(tensor, self._spec.dtype, self._policy.device)
            return published.to(tensor.dtype)

        return self._probing.logprobs(token_ids, fetch)

    def _loss(
        self, batch: PackedBatch, packed: PackedSegments | None = None
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        current = response_logprobs(
            self._policy, batch, self._temperature, packed, entropy_gradient=self._entropy_gradient
        )
        inputs = LossInputs(
            logprobs=current.logprobs,
            entropy=current.entropy,
            denominator_tokens=batch.denominators.tokens,
            sequence_id=self._of_responses(batch, batch.sequence_id),
            denominator_sequences=batch.denominators.sequences,
            oldest=batch.oldest,
            own={name: self._of_responses(batch, values) for name, values in batch.own.items()},
            **{
                name: self._of_responses(batch, values)
                for name, values in batch.columns().items()
                if name in LOSS_COLUMNS
            },
        )
        outputs = self._algorithm.loss(inputs)
        metrics = common_metrics(inputs) | outputs.metrics | {"loss": outputs.loss}
        return self._share(LossOutputs(outputs.loss, metrics), current.logprobs)
