"""The scoring function: rewards of complete groups, on CPU cores.

All groups of a call are scored together, so a batch reward sees them in one list.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from rlhfless.functions.base import Call, CallUsage, DeviceBinding, Function, FunctionSettings, ReplicaInfo, Reply
from rlhfless.functions.launching import Launch, binding
from rlhfless.records import Group, Prompt, Sample, Score
from rlhfless.rewards import Rewards, RewardSample
from rlhfless.scaling.function_specs import FunctionSpec
from rlhfless.scaling.placement import Allocation
from rlhfless.spec import RewardSpec, ScoringSpec
from rlhfless.spec.imports import add_import_paths, import_paths


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

    async def describe(self, call: Call) -> Reply[ReplicaInfo]:
        """Describe this replica. The first call starts its workers; raises RewardError if a reward cannot be built."""
        self.admit(call)
        start_s = time.time()
        await self._rewards.start()
        return self.reply(self.info(self._rewards.pids), start_s)

    async def stop(self, call: Call) -> Reply[None]:
        """Stop the workers."""
        self.admit(call)
        start_s = time.time()
        self._rewards.close()
        return self.reply(None, start_s)

    async def score(self, call: Call, groups: Sequence[Group]) -> Reply[list[list[Score]]]:
        """Return the score of every sample of every group, in order. A failed reward marks its sample."""
        self.admit(call)
        start_s = time.time()
        scores = await score_groups(self._rewards, groups)
        samples = [sample for group in groups for sample in group.samples]
        usage = CallUsage(sequences=len(samples), input_tokens=sum(sample.model_tokens for sample in samples))
        return self.reply(scores, start_s, usage)


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
        source=prompt.source,
    )
