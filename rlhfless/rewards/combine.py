"""Score samples by several rewards concurrently, and add up their weighted scores."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rlhfless.records import Score
from rlhfless.rewards.builtin import ExactMatch, Format, JsonSchemaReward, LengthPenalty, Regex
from rlhfless.rewards.code import CodeReward
from rlhfless.rewards.mathematics import MathReward
from rlhfless.rewards.protocol import (
    Checked,
    Failed,
    Outcome,
    Reward,
    RewardSample,
    SampleReward,
    Verifier,
    VerifierSpec,
    within_range,
)
from rlhfless.rewards.python import PythonReward
from rlhfless.rewards.workers import Workers
from rlhfless.spec import (
    CodeSpec,
    ExactMatchSpec,
    FormatSpec,
    HttpSpec,
    JsonSchemaSpec,
    JudgeSpec,
    LengthPenaltySpec,
    MathSpec,
    OnFailure,
    PythonRewardSpec,
    RegexSpec,
    RewardModelSpec,
    RewardSpec,
    ScoringSpec,
)
from rlhfless.util.tasks import gather_or_cancel

if TYPE_CHECKING:
    from rlhfless.rewards.http import HttpReward
    from rlhfless.rewards.judge import Ask, Judge

NO_ENGINES: Mapping[str, Ask] = MappingProxyType({})

LocalSpec = ExactMatchSpec | RegexSpec | FormatSpec | LengthPenaltySpec | HttpSpec | JudgeSpec


class Rewards:
    """All rewards of a run except those with a replica of their own: reward models, and judges with a path.

    Call `start` before the first samples and `close` after the last: they manage the worker processes.
    """

    def __init__(
        self, specs: Sequence[RewardSpec], scoring: ScoringSpec, engines: Mapping[str, Ask] = NO_ENGINES
    ) -> None:
        """`engines`: those of judges with a path, by label, in the process that has them."""
        own = [spec for spec in specs if not _is_apart(spec) or spec.label in engines]
        isolated = [spec for spec in own if isinstance(spec, VerifierSpec)]
        self._scoring = scoring
        self._workers = Workers(isolated, scoring.workers) if isolated else None
        self._weights = {spec.label: spec.weight for spec in own}
        self._rewards: list[tuple[RewardSpec, Reward]] = []
        for spec in own:
            if self._workers is not None and isinstance(spec, VerifierSpec):
                self._rewards.append((spec, partial(self._workers.score, isolated.index(spec))))
            elif not isinstance(spec, VerifierSpec | RewardModelSpec):
                self._rewards.append((spec, _local(spec, scoring.http_hosts, engines.get(spec.label))))

    @property
    def pids(self) -> tuple[int, ...]:
        return self._workers.pids if self._workers else ()

    async def start(self) -> None:
        """Start the workers. Raises RewardError if a reward cannot be created."""
        if self._workers:
            await self._workers.start()

    def close(self) -> None:
        if self._workers:
            self._workers.close()

    async def score(self, samples: Sequence[RewardSample]) -> list[Score]:
        """Return one Score per sample, in order, within `scoring.timeout_s`."""
        outcomes = await gather_or_cancel(*(self._outcomes(*each, samples) for each in self._rewards))
        return combined(self._weights, outcomes, len(samples), self._scoring.on_failure)

    async def _outcomes(
        self, spec: RewardSpec, reward: Reward, samples: Sequence[RewardSample]
    ) -> list[Outcome | None]:
        """Return the outcome of each sample; None where the reward does not apply."""
        outcomes: dict[int, Outcome] = {}
        own = [index for index, sample in enumerate(samples) if spec.scores(sample.source)]
        limit_s = self._scoring.timeout_s
        late = None
        try:
            async with asyncio.timeout(limit_s):
                await reward([samples[index] for index in own], outcomes.__setitem__)
        except TimeoutError:
            late = Failed(f"not scored within scoring.timeout_s ({limit_s:g} s)")
        all_outcomes: list[Outcome | None] = [None] * len(samples)
        for place, index in enumerate(own):
            all_outcomes[index] = outcomes.get(place, late) if late else outcomes[place]
        return all_outcomes


def combined(
    weights: Mapping[str, float], by_part: Sequence[Sequence[Outcome | None]], samples: int, on_failure: OnFailure
) -> list[Score]:
    """Combine outcomes per part into one Score per sample; None where a part does not apply. `weights` is in the order
    of `by_part`."""
    scores = []
    for index in range(samples):
        own = dict(zip(weights, (part[index] for part in by_part), strict=True))
        asked = {name: outcome for name, outcome in own.items() if outcome is not None}
        outcomes = {name: within_range(name, weights[name], outcome) for name, outcome in asked.items()}
        failures = {name: outcome.cause for name, outcome in outcomes.items() if isinstance(outcome, Failed)}
        parts = {name: outcome for name, outcome in outcomes.items() if not isinstance(outcome, Failed)}
        total = sum(weights[name] * value for name, value in parts.items())
        if on_failure == "zero":
            parts |= dict.fromkeys(failures, 0.0)
        scores.append(Score(total, parts, failures))
    return scores


def checker(spec: LocalSpec | VerifierSpec, hosts: tuple[str, ...] | None) -> Checked:
    """Return the object that checks a reward before a run; `hosts` as in ScoringSpec.http_hosts. Raises RewardError."""
    return verifier(spec) if isinstance(spec, VerifierSpec) else _local(spec, hosts)


_LOCAL: Mapping[type, Callable[[Any], SampleReward]] = {
    ExactMatchSpec: ExactMatch,
    RegexSpec: Regex,
    FormatSpec: Format,
    LengthPenaltySpec: LengthPenalty,
}
_VERIFIERS: Mapping[type, Callable[[Any], Verifier]] = {
    CodeSpec: CodeReward,
    JsonSchemaSpec: JsonSchemaReward,
    MathSpec: MathReward,
    PythonRewardSpec: PythonReward,
}


def _is_apart(spec: RewardSpec) -> bool:
    return isinstance(spec, RewardModelSpec) or (isinstance(spec, JudgeSpec) and spec.path is not None)


def _local(
    spec: LocalSpec, hosts: tuple[str, ...] | None, engine: Ask | None = None
) -> SampleReward | HttpReward | Judge:
    if not isinstance(spec, HttpSpec | JudgeSpec):
        return _LOCAL[type(spec)](spec)
    # Imported here, because httpx takes a quarter of a second to import.
    from rlhfless.rewards.http import HttpReward
    from rlhfless.rewards.judge import Judge

    return HttpReward(spec, hosts) if isinstance(spec, HttpSpec) else Judge(spec, hosts, engine)


def verifier(spec: VerifierSpec) -> Verifier:
    """Create the verifier of a spec. Raises RewardError."""
    return _VERIFIERS[type(spec)](spec)
