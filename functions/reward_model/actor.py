"""One rank of the reward model function as a Ray actor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlhfless.functions.ranks.actor import RankActor
from rlhfless.functions.reward_model.settings import RewardModelSettings
from rlhfless.rewards import Outcome, RewardSample


class RewardModelActor(RankActor[RewardModelSettings]):
    """Rank `rank` of all reward models of the run."""

    named = "reward model"

    def _load(self, address: str) -> None:
        from rlhfless.functions.ranks.process_group import join_frozen
        from rlhfless.functions.reward_model.model import RewardModel

        settings = self._settings
        mesh = join_frozen(address, self._number, len(settings.rank_bindings), settings.call_timeout_s)
        with self._memory_told("score"):
            self._models = [RewardModel(spec, threads=self._threads, mesh=mesh) for spec in settings.rewards]

    def score(self, samples: Sequence[RewardSample]) -> list[Mapping[int, Outcome]]:
        """By reward model: see RewardModel.share. *Collective.*"""
        with self._memory_told("score"):
            return [model.share(samples) for model in self._models]
