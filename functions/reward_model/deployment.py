"""The reward model function: the part of scoring that runs a network, on a device of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rlhfless.functions.base import Call, DeviceBinding, Function, Reply, Usage
from rlhfless.functions.lease import LeaseTerms
from rlhfless.functions.scoring.scorer import by_group, samples_of
from rlhfless.records import Group, Score
from rlhfless.rewards import combined
from rlhfless.spec import OnFailure, RewardModelSpec


@dataclass(frozen=True, slots=True)
class RewardModelSettings:
    """The settings of a reward model replica."""

    run_id: str
    lease: LeaseTerms
    rewards: tuple[RewardModelSpec, ...]
    on_failure: OnFailure
    binding: DeviceBinding


class RewardModelFunction(Function):
    """One replica with all reward models of the run. Its calls raise RewardError if one cannot be used."""

    def __init__(self, settings: RewardModelSettings) -> None:
        super().__init__(settings)
        settings.binding.bind()
        from rlhfless.functions.reward_model.model import RewardModel

        threads = len(settings.binding.ids)
        self._weights = {spec.label: spec.weight for spec in settings.rewards}
        with self.starting():
            self._models = [RewardModel(spec, threads=threads) for spec in settings.rewards]
        self._on_failure = settings.on_failure

    async def score(self, call: Call, groups: Sequence[Group]) -> Reply[list[list[Score]]]:
        """The reward models' part of every sample's score, in their order."""
        self.admit(call)
        start_s = time.time()
        samples = samples_of(groups)
        columns = [await asyncio.to_thread(model.score, samples) for model in self._models]
        scores = combined(self._weights, columns, len(samples), self._on_failure)
        tokens = sum(sample.tokens for group in groups for sample in group.samples)
        usage = Usage(sequences=len(samples), input_tokens=tokens * len(self._models))
        return self.reply(by_group(scores, groups), start_s, usage)
