"""Scoring: rewards of complete groups on CPU cores, and reward models on devices of their own.

All groups of a call are scored together, so a batch reward sees them in one list.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import ray

from rlhfless.functions.base import CallResult, DeviceBinding, DistributedSettings, Function, FunctionSettings, admitted
from rlhfless.functions.calls import Call, CallUsage, ReplicaInfo, SharedNow
from rlhfless.functions.launching import Launch, binding
from rlhfless.functions.ranks import DistributedFunction, RankActor
from rlhfless.records import Group, Prompt, Sample, Score
from rlhfless.rewards import Outcome, Rewards, RewardSample, combined
from rlhfless.scaling.function_specs import FunctionSpec
from rlhfless.scaling.placement import Allocation
from rlhfless.spec import OnFailure, RewardModelSpec, RewardSpec, ScoringSpec
from rlhfless.spec.imports import add_import_paths, import_paths

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringSettings(FunctionSettings):
    """Settings of a scoring replica."""

    rewards: tuple[RewardSpec, ...]
    scoring: ScoringSpec
    binding: DeviceBinding
    import_paths: tuple[str, ...] = ()
    """Folders to import the user's rewards from: the driver's own `sys.path`."""


class ScoringFunction(Function):
    """A scoring replica."""

    @staticmethod
    def settings_of(launch: Launch, kind: FunctionSpec, allocation: Allocation) -> ScoringSettings:  # noqa: ARG004
        """Return a replica's settings for an allocation with bound devices."""
        return ScoringSettings(
            run_id=launch.run_id,
            lease=launch.lease,
            rewards=launch.spec.rewards,
            scoring=launch.spec.scoring,
            binding=binding(allocation.devices, exclusive=False),
            import_paths=import_paths(),
        )

    def __init__(self, settings: ScoringSettings) -> None:
        super().__init__(settings)
        settings.binding.bind()
        add_import_paths(settings.import_paths)
        self._rewards = Rewards(settings.rewards, settings.scoring)

    @admitted
    async def describe(self, _: Call) -> CallResult[ReplicaInfo]:
        """Describe this replica. The first call starts its workers; raises RewardError if a reward cannot be built."""
        await self._rewards.start()
        return CallResult(self.info(self._rewards.pids))

    @admitted
    async def stop(self, _: Call) -> CallResult[SharedNow | None]:
        """Stop the workers."""
        self._rewards.close()
        return CallResult(None)

    @admitted
    async def score(self, _: Call, groups: Sequence[Group]) -> CallResult[list[list[Score]]]:
        """Return the score of every sample of every group, in order. A failed reward marks its sample."""
        scores = await score_groups(self._rewards, groups)
        samples = [sample for group in groups for sample in group.samples]
        usage = CallUsage(sequences=len(samples), input_tokens=sum(sample.model_tokens for sample in samples))
        return CallResult(scores, usage)


async def score_groups(rewards: Rewards, groups: Sequence[Group]) -> list[list[Score]]:
    """Return scores per group, in sample order. A failed reward marks its sample."""
    return by_group(await rewards.score(samples_of(groups)), groups)


def samples_of(groups: Sequence[Group]) -> list[RewardSample]:
    """Return all samples, group by group, in the form that rewards receive."""
    return [_sample(group.prompt, sample) for group in groups for sample in group.samples]


def by_group(scores: Sequence[Score], groups: Sequence[Group]) -> list[list[Score]]:
    """Split the scores of `samples_of(groups)` by group."""
    left = iter(scores)
    return [[next(left) for _ in group.samples] for group in groups]


def _sample(prompt: Prompt, sample: Sample) -> RewardSample:
    return RewardSample(
        prompt=prompt.text,
        response=sample.text,
        response_tokens=sample.model_tokens,
        finish_reason=sample.finish_reason,
        columns=prompt.columns,
        prompt_id=prompt.prompt_id,
        sample_index=sample.sample_index,
        transcript=() if sample.episode is None else sample.episode.transcript(),
        source=prompt.source,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModelSettings(DistributedSettings):
    """Settings of a reward model replica."""

    rewards: tuple[RewardModelSpec, ...]
    on_failure: OnFailure


class RewardModelActor(RankActor[RewardModelSettings]):
    """Rank `rank` of all reward models of the run."""

    named = "reward model"

    def _load(self, address: str) -> None:
        from rlhfless.functions.scoring.reward_model import RewardModel
        from rlhfless.functions.sharding import join_frozen

        mesh = join_frozen(self._place(address))
        with self._at_work("score"):
            self._models = [RewardModel(spec, threads=self._threads, mesh=mesh) for spec in self._settings.rewards]

    def kept_on_device(self) -> Iterator[torch.Tensor]:
        for model in self._models:
            yield from model.kept_on_device()

    def score(self, samples: Sequence[RewardSample]) -> list[Mapping[int, Outcome]]:
        """Return outcomes per reward model (see RewardModel.share). *Collective.*"""
        with self._at_work("score"):
            return [model.share(samples) for model in self._models]


class RewardModelFunction(DistributedFunction):
    """One replica with all reward models of the run, each split over its ranks.

    Calls raise RewardError if a model is unusable.
    """

    named = "reward model"
    actor = RewardModelActor

    async def __init__(self, settings: RewardModelSettings) -> None:  # type: ignore[misc]
        self._settings = settings
        await super().__init__(settings)  # type: ignore[misc]  # Serve awaits constructors

    @staticmethod
    def settings_of(launch: Launch, kind: FunctionSpec, allocation: Allocation) -> RewardModelSettings:
        """Return a replica's settings for an allocation with bound devices."""
        return RewardModelSettings(
            rewards=launch.spec.reward_models,
            on_failure=launch.spec.scoring.on_failure,
            **launch.of_ranks(kind, allocation),
        )

    @admitted
    async def score(self, _: Call, groups: Sequence[Group]) -> CallResult[list[list[Score]]]:
        """Return the reward models' part of every sample's score, in sample order."""
        samples = samples_of(groups)
        rewards = self._settings.rewards
        # By rank, then reward model: outcomes of the rank's share by sample index.
        shares: list[list[Mapping[int, Outcome]]] = await self._group.call_all("score", ray.put(samples))
        columns = [_in_order(of_ranks, len(samples)) for of_ranks in zip(*shares, strict=True)]
        weights = {spec.label: spec.weight for spec in rewards}
        scores = combined(weights, columns, len(samples), self._settings.on_failure)
        tokens = sum(sample.tokens for group in groups for sample in group.samples)
        usage = CallUsage(sequences=len(samples), input_tokens=tokens * len(rewards))
        return CallResult(by_group(scores, groups), usage)


def _in_order(of_ranks: Sequence[Mapping[int, Outcome]], samples: int) -> list[Outcome | None]:
    together = {index: outcome for outcomes in of_ranks for index, outcome in outcomes.items()}
    return [together.get(index) for index in range(samples)]
