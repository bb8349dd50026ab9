"""The batches of a live run: groups packed into one dimension of tokens, with the algorithm's advantages."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from rlhfless.algorithms.base import BY_STALENESS, ActorCritic, Algorithm, algorithm_of
from rlhfless.algorithms.batch import PackedBatch, by_sample, in_batch_order, leave_out, pack
from rlhfless.algorithms.distill import distillation, teacher_metrics, with_teachers
from rlhfless.algorithms.kl import adapt_kl, adaptive_kl, with_kl_coefficient
from rlhfless.orchestrator.batches import Evaluate
from rlhfless.orchestrator.experience import (
    Staleness,
    added_up,
    by_token,
    readable,
    staleness_of,
    with_signal,
    without_failures,
)
from rlhfless.orchestrator.group_pipeline import ScoredGroups
from rlhfless.orchestrator.ledger import Ledger, StepAttempt
from rlhfless.orchestrator.prompt_selection import PromptHistory
from rlhfless.orchestrator.step_metrics import OF_REWARDS, TokenCounts, prompt_token_metrics, rollout_metrics
from rlhfless.records import Experience, FinishReason, FloatArray, Group, Invocation, WeightVersion
from rlhfless.scaling.function_specs import FunctionSpec
from rlhfless.spec import AlgorithmSpec, Needs, RunSpec


class AlgorithmState:
    """The algorithm's settings, which adapt from step to step."""

    def __init__(self, settings: AlgorithmSpec) -> None:
        self._first = settings
        self._settings: dict[int, AlgorithmSpec] = {}
        """Settings of the last learned step and the next one, by step; empty before the first."""

    def _at(self, step: int) -> AlgorithmSpec:
        return self._settings.get(step, self._first)

    def at(self, step: int) -> Algorithm:
        """Build the algorithm with the settings of a step."""
        return algorithm_of(self._at(step))

    def learn(self, step: int, batch: PackedBatch) -> dict[str, float]:
        """Adapt the next step's settings to the batch of this one; return this step's metrics."""
        here = self._at(step)
        kl = adaptive_kl(here)
        self._settings = {step: here, step + 1: adapt_kl(here, batch)}
        return {} if kl is None else {"kl_coefficient": kl.coefficient}

    def coefficient_after(self, step: int) -> float | None:
        """Return the KL coefficient of the step after `step`, for a checkpoint; None if it is not adaptive."""
        kl = adaptive_kl(self._at(step + 1))
        return None if kl is None else kl.coefficient

    def restore(self, step: int, coefficient: float | None) -> None:
        """Resume after `step` with the result of `coefficient_after`; with None, use the spec's settings."""
        self._settings = {} if coefficient is None else {step + 1: with_kl_coefficient(self._first, coefficient)}


@dataclass(slots=True)
class TokenBatch:
    """What a step learns from (implements rlhfless.orchestrator.batches.StepBatch)."""

    packed: PackedBatch
    whole: PackedBatch
    """Before truncated responses were masked."""
    experience: Experience
    """All generated samples."""
    usable: Experience
    """Those whose rewards did not fail."""
    chosen: Experience
    """Those that the step learns from."""
    staleness: Staleness | None
    spec: RunSpec
    of_teachers: Mapping[str, float]
    """Its metrics of teachers."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """See StepBatch: the staleness of its tokens, and its teachers."""
        return {**(self.staleness.metrics if self.staleness else {}), **self.of_teachers}

    @property
    def response_tokens(self) -> list[float]:
        """See StepBatch."""
        return [sample.model_tokens for sample in self.experience.samples]

    def rollout_metrics(self, prompts: int) -> dict[str, float]:
        """See StepBatch."""
        metrics = rollout_metrics(self.experience, self.usable, prompts)
        return metrics if self.spec.scores_samples else {k: v for k, v in metrics.items() if k not in OF_REWARDS}

    def prompt_metrics(self, calls: Iterable[Invocation]) -> dict[str, float]:
        """See StepBatch."""
        drawn, kept = map(TokenCounts.of, (self.experience, self.chosen))
        return prompt_token_metrics(calls, drawn, kept, self.spec.epochs_of)


class TokenBatches:
    """Makes the batches of a live run (implements rlhfless.orchestrator.batches.Batches)."""

    def __init__(self, spec: RunSpec, history: PromptHistory) -> None:
        self._spec = spec
        self._history = history
        self._algorithm = AlgorithmState(spec.algorithm)

    def key(self, group: Group) -> Hashable:
        """See Batches."""
        return group.prompt.prompt_id, tuple(sample.model_tokens for sample in group.samples)

    def described(self, experience: Experience) -> str:
        """See Batches."""
        samples = experience.samples
        tokens = sum(sample.model_tokens for sample in samples)
        return f"{len(experience.groups)} groups, {len(samples)} samples, {tokens} tokens"

    def added_up(self, groups: Sequence[Group], scored: Sequence[ScoredGroups]) -> ScoredGroups:
        """See Batches."""
        return added_up(groups, scored, self._spec.scoring)

    def read_by(self, kind: FunctionSpec, group: Group) -> Group | None:
        """See Batches."""
        return group.read_by(kind.name) if kind.computes(group.prompt.source) else None

    def to_compute(self, groups: Sequence[Group]) -> PackedBatch:
        """See Batches."""
        return pack(readable(groups))

    def by_group(self, batch: PackedBatch, values: FloatArray, groups: Sequence[Group]) -> Sequence[list[FloatArray]]:
        """See Batches."""
        return by_sample(batch, values, groups)

    async def learned_from(
        self, begun: StepAttempt, experience: Experience, learner: WeightVersion, evaluate: Evaluate
    ) -> TokenBatch:
        """See Batches."""
        spec, needs = self._spec, self._spec.algorithm.needs
        usable = without_failures(experience, spec.scoring, begun.step)
        chosen = with_signal(usable) if needs.with_signal else usable
        whole = pack(chosen.groups)
        if needs.old_logprobs:  # otherwise the learner computes them at its first update
            whole = whole.with_columns(old_logprobs=await evaluate(whole))
        metrics = {}
        if needs.teachers:
            sources = [group.prompt.source for group in in_batch_order(chosen.groups) for _ in group.samples]
            metrics = teacher_metrics(whole, spec.teachers, sources)
            whole = with_teachers(whole, spec.teachers, sources)
        whole = self.with_targets(begun.step, whole)
        staleness = staleness_of(experience, learner)
        if staleness and staleness.differs:
            behind = by_token(chosen.groups, learner)
            whole = replace(whole.with_columns(staleness=behind), oldest=max(staleness.most, 0))
        packed = learned_batch(whole, chosen, needs)
        return TokenBatch(packed, whole, experience, usable, chosen, staleness, spec, metrics)

    def with_targets(self, step: int, batch: PackedBatch) -> PackedBatch:
        """Add the training targets of policy and critic: advantages and returns `[tokens]`."""
        algorithm = self._algorithm.at(step)
        targets = {"advantages": algorithm.advantages(batch) + distillation(self._spec.algorithm, batch)}
        if self._spec.algorithm.needs.values:
            targets["returns"] = cast(ActorCritic, algorithm).returns(batch)
        return batch.with_columns(**targets)

    def learned(self, step: int, batch: TokenBatch, metrics: Mapping[str, float]) -> dict[str, float]:
        """See Batches."""
        return split(metrics) | self._algorithm.learn(step, batch.whole)

    def record(self, ledger: Ledger, step: int, experience: Experience) -> None:
        """See Batches."""
        ledger.add_rollouts(step, experience.groups)
        self._history.learned(ledger.done_in_step(step)[1])

    def kl_coefficient_after(self, step: int) -> float | None:
        """See Batches."""
        return self._algorithm.coefficient_after(step)

    def restore(self, step: int, kl_coefficient: float | None) -> None:
        """See Batches."""
        self._algorithm.restore(step, kl_coefficient)


def learned_batch(batch: PackedBatch, experience: Experience, needs: Needs) -> PackedBatch:
    """Mask truncated responses from the loss if the algorithm needs whole responses (DAPO's overlong filtering).

    They still count in the statistics of their group, and in the KL of the reward.
    """
    if not needs.whole_responses:
        return batch
    samples = [sample for group in in_batch_order(experience.groups) for sample in group.samples]
    return leave_out(batch, np.array([sample.finish_reason == FinishReason.LENGTH for sample in samples]))


def split(metrics: Mapping[str, float]) -> dict[str, float]:
    """Divide metrics that were summed by staleness by their number of tokens; drop those without tokens."""
    found = {}
    for name, value in metrics.items():
        of, _, behind = name.partition(BY_STALENESS)
        share = metrics[f"tokens{BY_STALENESS}{behind}"] if behind else 1.0
        if share:
            found[name] = value if of == "tokens" else value / share
    return found
