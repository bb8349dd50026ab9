"""One rank of the reward model function as a Ray actor, and the settings of the ranks and their front."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlhfless.functions.base import DeviceBinding
from rlhfless.functions.lease import LeaseTerms
from rlhfless.functions.out_of_memory import Planned
from rlhfless.functions.ranks.actor import RankActor
from rlhfless.rewards import Outcome, RewardSample
from rlhfless.spec import OnFailure, RewardModelSpec

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class RewardModelSettings:
    """The settings of a reward model replica."""

    run_id: str
    lease: LeaseTerms
    rewards: tuple[RewardModelSpec, ...]
    on_failure: OnFailure
    rank_bindings: tuple[DeviceBinding, ...]
    call_timeout_s: float
    planned: Planned = field(default_factory=dict)
    """What the memory plan counts for one rank."""


class RewardModelActor(RankActor[RewardModelSettings]):
    """Rank `rank` of all reward models of the run."""

    named = "reward model"

    def _load(self, address: str) -> None:
        from rlhfless.functions.ranks.process_group import join_frozen
        from rlhfless.functions.reward_model.model import RewardModel

        settings = self._settings
        mesh = join_frozen(address, self._number, len(settings.rank_bindings), settings.call_timeout_s)
        with self._at_work("score"):
            self._models = [RewardModel(spec, threads=self._threads, mesh=mesh) for spec in settings.rewards]

    def kept_on_device(self) -> Iterator[torch.Tensor]:
        for model in self._models:
            yield from model.kept_on_device()

    def score(self, samples: Sequence[RewardSample]) -> list[Mapping[int, Outcome]]:
        """By reward model: see RewardModel.share. *Collective.*"""
        with self._at_work("score"):
            return [model.share(samples) for model in self._models]
