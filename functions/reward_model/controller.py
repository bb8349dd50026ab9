"""The reward model function: the part of scoring that runs a network, on its own devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import ray

from rlhfless.functions.base import Call, CallResult, CallUsage, DistributedSettings, admitted
from rlhfless.functions.launching import Launch
from rlhfless.functions.ranks.actor import RankActor
from rlhfless.functions.ranks.controller import DistributedFunction
from rlhfless.functions.scoring.deployment import by_group, samples_of
from rlhfless.records import Group, Score
from rlhfless.rewards import Outcome, RewardSample, combined
from rlhfless.scaling.function_specs import FunctionSpec
from rlhfless.scaling.placement import Allocation
from rlhfless.spec import OnFailure, RewardModelSpec

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModelSettings(DistributedSettings):
    """Settings of a reward model replica."""

    rewards: tuple[RewardModelSpec, ...]
    on_failure: OnFailure


class RewardModelActor(RankActor[RewardModelSettings]):
    """Rank `rank` of all reward models of the run."""

    named = "reward model"

    def _load(self, address: str) -> None:
        from rlhfless.functions.reward_model.model import RewardModel
        from rlhfless.functions.sharding import join_frozen

        settings = self._settings
        mesh = join_frozen(address, self._number, len(settings.rank_bindings), settings.call_timeout_s)
        with self._at_work("score"):
            self._models = [RewardModel(spec, threads=self._threads, mesh=mesh) for spec in settings.rewards]

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
            run_id=launch.run_id,
            lease=launch.lease,
            rewards=launch.spec.reward_models,
            on_failure=launch.spec.scoring.on_failure,
            rank_bindings=launch.rank_bindings(kind, allocation),
            call_timeout_s=launch.spec.timeouts.call_s,
            planned=launch.planned(kind, allocation),
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
