"""The critic function: its controller and rank actors (rlhfless.functions.training)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlhfless.algorithms.batch import PackedBatch
from rlhfless.functions.base import Call, CallResult, admitted
from rlhfless.functions.launching import Launch
from rlhfless.functions.training.controller import TrainedFunction, TrainedSettings, TrainingActor
from rlhfless.records import FloatArray
from rlhfless.scaling.function_specs import FunctionSpec
from rlhfless.scaling.placement import Allocation
from rlhfless.spec import CriticSpec

if TYPE_CHECKING:
    from rlhfless.functions.critic.rank import CriticRank


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticSettings(TrainedSettings):
    """Settings of a critic replica. `model` is its initial model."""

    training: CriticSpec


class CriticActor(TrainingActor[CriticSettings]):
    """Rank `rank` of the critic."""

    named = "critic"
    _rank: CriticRank

    def _load(self, address: str) -> None:
        from rlhfless.functions.critic.rank import CriticRank

        self._rank = self._joined(address, CriticRank, self._settings.algorithm)

    def compute(self, batch: PackedBatch) -> tuple[FloatArray | None, int]:
        """Return the batch's values (on rank 0, else None) and this rank's shared prompt tokens. *Collective.*"""
        with self._at_work("values"):
            values, shared_tokens = self._rank.values(batch)
        return None if self._number else values, shared_tokens


class CriticFunction(TrainedFunction):
    """The controller of the critic. A checkpoint of the run includes the state of critic and learner."""

    named = "critic"
    actor = CriticActor

    @staticmethod
    def settings_of(launch: Launch, kind: FunctionSpec, allocation: Allocation) -> CriticSettings:
        """Return a replica's settings for an allocation with bound devices."""
        spec = launch.spec
        assert spec.critic is not None, "the kind is wanted with it alone"
        return CriticSettings(
            run_id=launch.run_id,
            lease=launch.lease,
            model=launch.within_context(spec.critic_source),
            training=spec.critic,
            optimizer=spec.critic.optimizer,
            algorithm=spec.algorithm,
            rank_bindings=launch.rank_bindings(kind, allocation),
            call_timeout_s=spec.timeouts.call_s,
            planned=launch.planned(kind, allocation),
        )

    @admitted
    async def compute(self, _: Call, batch: PackedBatch) -> CallResult[FloatArray]:
        """Return values `[tokens]` of a packed batch of complete groups; 0 on tokens that were not generated."""
        return await self._per_token(batch)
