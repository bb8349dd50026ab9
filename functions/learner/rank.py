"""One rank of the learner: trains the policy, computes its logprobs, publishes its weights."""

from __future__ import annotations

import dataclasses
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch

from rlhfless.algorithms.base import LossInputs, LossOutputs, algorithm_of, common_metrics
from rlhfless.algorithms.batch import PackedBatch, declared, select
from rlhfless.algorithms.passes import Passes
from rlhfless.algorithms.supervised import SupervisedInputs, objective_of
from rlhfless.functions.base import RankPlace
from rlhfless.functions.batching import MicroBatches, cut_pairs, deal_pairs
from rlhfless.functions.learner.exact_forward import ExactForward
from rlhfless.functions.lora import adapters_of, without_adapters
from rlhfless.functions.policy import (
    TORCH_DTYPES,
    Outputs,
    PolicyNetwork,
    logprob_outputs,
    recorded_outputs,
    response_logprobs,
    response_outputs,
)
from rlhfless.functions.route_files import RecordedRoutes, RouteFiles
from rlhfless.functions.routers import Routers
from rlhfless.functions.shares import all_reduce_rows, by_group, share_of, share_outputs
from rlhfless.functions.training.checkpoint import Savers
from rlhfless.functions.training.critic import load_critic, values_of
from rlhfless.functions.training.publishing import (
    Lent,
    adapter_stream,
    divides,
    gathered_as,
    published_stream,
    sampling,
)
from rlhfless.functions.training.rank import TrainingRank, load_trained_policy
from rlhfless.prefixes.packing import PackedSegments
from rlhfless.records import BaseWeights, FloatArray, IntArray, WeightSample
from rlhfless.spec import AdamWSpec, AlgorithmSpec, DPOSpec, LearnerSpec, ModelSpec, RunType
from rlhfless.spec.algorithm import PolicyLossSpec
from rlhfless.spec.errors import InputError, Problem
from rlhfless.spec.generation import Quantization
from rlhfless.weights.digest import Digest
from rlhfless.weights.files import TensorStream

LOSS_COLUMNS = declared(PackedBatch).keys() & {field.name for field in dataclasses.fields(LossInputs)}
"""Fields of the batch that a loss reads."""


class LearnerRank(TrainingRank):
    """A learner rank of an RLHF run (see TrainingRank)."""

    _training: LearnerSpec

    def __init__(
        self,
        place: RankPlace,
        model: ModelSpec,
        learner: LearnerSpec,
        optimizer: AdamWSpec,
        algorithm: AlgorithmSpec,
        temperature: float,
        quantization: Quantization = "off",
        publishes_adapters: bool = False,
        routes_folder: str = "",
    ) -> None:
        """`temperature` and `quantization` are those of the engines, whose routes are in `routes_folder`; see
        TrainingRank for the rest."""
        self._replay = algorithm.router_replay if isinstance(algorithm, PolicyLossSpec) else "off"
        self._routes_folder = Path(routes_folder)
        self._adapters_only = publishes_adapters
        self._base: BaseWeights | None = None
        self._algorithm = algorithm_of(algorithm)
        self._entropy_gradient = algorithm.needs.entropy_gradient
        self._temperature = temperature
        super().__init__(place, model, learner, optimizer)
        self._probing = ExactForward(self._policy, trust_remote_code=model.trust_remote_code, quantization=quantization)

    def _load(self, device: torch.device) -> PolicyNetwork:
        policy = load_trained_policy(self._spec, self._training, device, self._mesh, self._experts)
        routers = None if self._training.compile else Routers.of(policy.model)
        if routers is None:
            if self._replay != "off":
                what = f"{self._replay}, but the model has no experts whose choice can be replayed"
                raise InputError("the learner", [Problem("algorithm.router_replay", what, "set it to off")])
            return policy
        if self._replay != "off":
            tokens = torch.zeros(1, 1, dtype=torch.int64, device=device)
            with torch.no_grad():
                routers.require_reached(lambda: policy.inside(policy.hidden_states, tokens), 1, device)
            policy.settle()
        if self._replay == "engine":
            routers.source = RouteFiles(self._routes_folder, routers.layers, routers.k)
        return dataclasses.replace(policy, routers=routers)

    def evaluate(self, batch: PackedBatch) -> FloatArray:
        """Compute old logprobs `[tokens]` of the whole batch, 0 on prompt tokens, on every rank. *Collective.*

        Computed by group, as those of frozen models, so that equal weights have equal logprobs.
        """
        logprobs = logprob_outputs(self._policy, self._temperature)
        return by_group(self._policy, batch, logprobs, self._training.pass_tokens)[0]

    def _evaluate_share(self, batch: PackedBatch) -> FloatArray:
        """Evaluate this rank's sequences; 0 on the tokens of other ranks."""
        return share_outputs(
            self._policy, batch, logprob_outputs(self._policy, self._temperature), self._training.pass_tokens
        )[0]

    def compute(self, batch: PackedBatch) -> tuple[FloatArray, int]:
        """Return reference logprobs `[tokens]` of complete groups (see reference_of). *Collective.*"""
        return reference_of(self._policy, batch, self._temperature, self._training)

    def learn(self, batch: PackedBatch, passes: Passes) -> dict[str, float]:
        """Take a training step (see TrainingRank). *Collective.*

        Computes missing old logprobs before the first update. The first update needs none: its old policy is the
        current one, so a step of one update ignores old logprobs. Raises ValueError without advantages.
        """
        if batch.advantages is None:
            raise ValueError("the batch has no advantages; compute them before `learn`")
        routers = self._policy.routers
        metrics = self._learn(batch, passes)
        if routers is None:
            return metrics
        replayed = self._replay == "engine" or (self._replay == "recorded" and passes.updates > 1)
        return metrics | routers.taken_metrics(self._policy.device, replayed=replayed)

    def _learn(self, batch: PackedBatch, passes: Passes) -> dict[str, float]:
        if self._replay == "recorded" and passes.updates > 1:
            return self._learn_recorded(batch, passes)
        if passes.updates == 1:
            batch = dataclasses.replace(batch, old_logprobs=None)
        elif batch.old_logprobs is None and passes.epochs > 1:
            share = self._evaluate_share(batch)
            batch = dataclasses.replace(batch, old_logprobs=all_reduce_rows(self._policy, share))
        if batch.old_logprobs is not None:
            return self._updates(passes.over(batch), passes.planned_updates)
        parts = list(passes.over(batch))
        parts[1:] = [dataclasses.replace(part, old_logprobs=self._evaluate_share(part)) for part in parts[1:]]
        return self._updates(parts, passes.planned_updates)

    def _learn_recorded(self, batch: PackedBatch, passes: Passes) -> dict[str, float]:
        """Learn with the routes that the policy has before the first update (R2)."""
        assert self._policy.routers is not None
        source = self._policy.routers.source = RecordedRoutes()
        try:
            if passes.epochs > 1:
                return self._updates(passes.over(self._recorded(batch, source)), passes.planned_updates)
            parts = list(passes.over(batch))  # the first one meets the policy whose routes would be recorded
            parts[1:] = [self._recorded(part, source) for part in parts[1:]]
            return self._updates(parts, passes.planned_updates)
        finally:
            self._policy.routers.source = None

    def _recorded(self, batch: PackedBatch, source: RecordedRoutes) -> PackedBatch:
        """Return the batch with the routes of this rank's tokens, and old logprobs if it has none. *Collective.*"""
        logprobs = logprob_outputs(self._policy, self._temperature)
        share = share_of(self._policy, batch, self._training.pass_tokens)
        own = select(batch, share)
        values, rows = recorded_outputs(self._policy, own, logprobs, self._cut(own).parts)
        file, row = np.zeros((2, len(batch.tokens)), dtype=np.int64)
        indices = batch.tokens_of(share)
        file[indices], row[indices] = 1, 1 + np.arange(len(indices))
        if batch.old_logprobs is None:
            everything = np.zeros(len(batch.tokens), dtype=values.dtype)
            everything[indices] = values
            batch = dataclasses.replace(batch, old_logprobs=all_reduce_rows(self._policy, everything))
        return dataclasses.replace(batch, route_file=file, route_row=row, route_files=(source.add(rows),))

    @cached_property
    def writers(self) -> Savers | None:
        """The ranks, if each can write its own experts of a version; None if rank 0 gathers all. *Collective.*"""
        if self._experts is None or self._adapters_only or not divides(self._model):
            return None
        return Savers.of(self._timeout_s)

    def published(
        self, tokens: tuple[int, ...] = (), *, own_experts: bool = False
    ) -> tuple[TensorStream, dict[str, WeightSample]]:
        """Stream the weights in the published dtype under their checkpoint names, tied tensors once; or the adapter
        alone, by PEFT's names. *Collective*.

        Tensors may share the learner's memory. Ranks other than 0 get an empty stream, or with `own_experts` their
        experts, and must exhaust it too. The second value fills with elements of the tensors, selected by `tokens`, for
        engines to compare.
        """
        samples: dict[str, WeightSample] = {}
        if self._adapters_only:
            assert self._spec.lora is not None, "the run has an adapter"
            stream = adapter_stream(self._model, self._spec.dtype, self.base(tokens).digest, self._spec.lora.alpha)
            if self._mesh.get_rank():
                return TensorStream({}, iter(())), samples
        else:
            device = self._policy.device
            stream = published_stream(self._model, self._spec.dtype, device, own_experts=own_experts)
        return (sampling(stream, tokens, samples) if tokens else stream), samples

    def base(self, tokens: tuple[int, ...] = ()) -> BaseWeights:
        """Return the digest and samples of the frozen weights, computed once. *Collective.*

        Ranks other than 0 do not see whole tensors, and return a digest of nothing.
        """
        if self._base is None:
            self._policy.settle()
            stream = published_stream(self._model, self._spec.dtype, self._policy.device, base=True)
            samples: dict[str, WeightSample] = {}
            digest = Digest()
            for _ in digest.passing((sampling(stream, tokens, samples) if tokens else stream).tensors):
                pass
            self._base = BaseWeights(digest.hexdigest(), samples)
        return self._base

    def published_everywhere(self, lent: Lent | None) -> TensorStream:
        """Stream the weights on every rank, without samples. `lent` fills offloaded tensors. *Collective.*"""
        self._policy.settle()  # an evaluation leaves weights gathered
        return published_stream(self._model, self._spec.dtype, self._policy.device, everywhere=True, lent=lent)

    def probe_logprobs(self, token_ids: tuple[int, ...]) -> tuple[float, ...]:
        """Return logprobs `[probe - 1]` at temperature 1 of each token after the first, by the published weights.

        Weights are rounded to the published dtype or the engines' codes; arithmetic is float32. An engine with these
        weights returns the same values, up to its own rounding. *Collective.*
        """

        adapters, dtype = adapters_of(self._model), TORCH_DTYPES[self._spec.dtype]

        def fetch(name: str, tensor: torch.Tensor) -> torch.Tensor:
            adapter, exact = adapters.get(name), torch.promote_types(tensor.dtype, torch.float32)
            merged = None if self._adapters_only else adapter
            published = gathered_as(tensor, self._spec.dtype, self._policy.device, merged).to(exact)
            # An engine rounds the product of an adapter, never its sum with the weight.
            return adapter.rounded(dtype).merged(published) if adapter and self._adapters_only else published

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


class SupervisedRank(TrainingRank):
    """A rank of a supervised learner (see TrainingRank), with batches of rlhfless.algorithms.supervised."""

    _training: LearnerSpec

    def __init__(
        self,
        place: RankPlace,
        model: ModelSpec,
        learner: LearnerSpec,
        optimizer: AdamWSpec,
        run_type: RunType,
        dpo: DPOSpec,
    ) -> None:
        self._type = run_type
        self._objective = objective_of(run_type, dpo, learner.dtype)
        super().__init__(place, model, learner, optimizer)

    def _load(self, device: torch.device) -> PolicyNetwork:
        if self._type != "reward_model":
            return load_trained_policy(self._spec, self._training, device, self._mesh, self._experts)
        return load_critic(self._spec, self._training, device, self._mesh, self._experts, new_head=True)

    @property
    def _outputs(self) -> Outputs:
        """The output per learned token: its logprob, or the score of its sequence."""
        return values_of(self._policy) if self._type == "reward_model" else logprob_outputs(self._policy, 1.0)

    def evaluate(self, batch: PackedBatch) -> FloatArray:
        """Compute outputs `[tokens]` of the whole batch, 0 on tokens that are not learned, on every rank. *Collective.*

        Uses the average of the weights if there is one.
        """
        with self.averaged():
            values, _ = share_outputs(self._policy, batch, self._outputs, self._training.pass_tokens)
            return all_reduce_rows(self._policy, values)

    def compute(self, batch: PackedBatch) -> tuple[FloatArray, int]:
        """Return reference logprobs `[tokens]` of whole pairs (see reference_of). *Collective.*"""
        return reference_of(self._policy, batch, 1.0, self._training)

    def learn(self, batch: PackedBatch, passes: Passes) -> dict[str, float]:
        """Take a training step (see TrainingRank). *Collective.*"""
        return self._updates(passes.over(batch), passes.planned_updates)

    def _weight(self, batch: PackedBatch) -> int:
        return batch.denominators.tokens if self._type == "sft" else batch.denominators.groups

    def _sequences_of_rank(self, batch: PackedBatch) -> IntArray:
        if self._type == "sft":
            return super()._sequences_of_rank(batch)
        return deal_pairs(batch, self._mesh.size())[self._mesh.get_rank()]

    def _cut(self, batch: PackedBatch) -> MicroBatches:
        if self._type == "sft":
            return super()._cut(batch)
        return cut_pairs(batch, self._training.pass_tokens, packing=self._policy.packing)

    def _loss(
        self, batch: PackedBatch, packed: PackedSegments | None = None
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        outputs, *_ = response_outputs(self._policy, batch, self._outputs, packed)
        of_tokens, reference = partial(self._of_responses, batch), batch.reference_logprobs
        inputs = SupervisedInputs(
            outputs,
            of_tokens(batch.sequence_id),
            batch.denominators.tokens,
            batch.denominators.groups,
            None if reference is None else of_tokens(reference),
        )
        given = self._objective.loss(inputs)
        return self._share(LossOutputs(given.loss, {"loss": given.loss} | given.metrics), outputs)


def reference_of(
    policy: PolicyNetwork, batch: PackedBatch, temperature: float, learner: LearnerSpec
) -> tuple[FloatArray, int]:
    """Return logprobs `[tokens]` of the policy without its adapters, and the prompt tokens saved (see by_group).

    A policy that trains adapters contains the frozen model, so no other function holds it. *Collective.*
    """
    batch = dataclasses.replace(batch, route_file=None, route_row=None)  # another policy's routes
    with without_adapters(policy.model):
        return by_group(policy, batch, logprob_outputs(policy, temperature), learner.pass_tokens)
