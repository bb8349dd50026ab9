"""Several rewards as one: each part scored on its own, all at once, and added up with its weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlhfless.records import Prompt, Score
from rlhfless.rewards.builtin import ExactMatch, LengthPenalty, Regex
from rlhfless.rewards.protocol import Reward, RewardError, Sample
from rlhfless.rewards.python import PythonReward, all_of
from rlhfless.spec import ExactMatchSpec, LengthPenaltySpec, RegexSpec, RewardSpec


@dataclass(frozen=True, slots=True)
class Part:
    """A reward under its name, with its weight."""

    name: str
    weight: float
    reward: Reward


@dataclass(frozen=True, slots=True)
class Rewards:
    """The weighted sum of the parts."""

    parts: tuple[Part, ...]

    async def score(self, samples: Sequence[Sample]) -> list[Score]:
        """One Score per sample, in their order; its parts are not weighted. Raises RewardError."""
        columns = await all_of([_values(part, samples) for part in self.parts])
        names = [part.name for part in self.parts]
        weights = [part.weight for part in self.parts]
        return [
            Score(
                total=sum(weight * value for weight, value in zip(weights, values, strict=True)),
                parts=dict(zip(names, values, strict=True)),
            )
            for values in zip(*columns, strict=True)
        ]

    def problems(self, prompts: Sequence[Prompt]) -> list[str]:
        """Why samples of these prompts could not be scored. Nothing is called."""
        return [f"reward {part.name!r}: {problem}" for part in self.parts for problem in part.reward.problems(prompts)]


def make(spec: RewardSpec) -> Part:
    """One reward of a spec. Raises RewardError, such as for a target that cannot be imported."""
    return Part(spec.label, spec.weight, _reward(spec))


def build(specs: Sequence[RewardSpec]) -> Rewards:
    """All rewards of a spec. Raises RewardError."""
    return Rewards(tuple(make(spec) for spec in specs))


def _reward(spec: RewardSpec) -> Reward:
    if isinstance(spec, ExactMatchSpec):
        return ExactMatch(spec)
    if isinstance(spec, RegexSpec):
        return Regex(spec)
    if isinstance(spec, LengthPenaltySpec):
        return LengthPenalty(spec)
    return PythonReward(spec)


async def _values(part: Part, samples: Sequence[Sample]) -> list[float]:
    values = await part.reward(samples)
    if len(values) != len(samples):
        raise RewardError(part.name, f"gave {len(values)} numbers for {len(samples)} samples")
    return values
