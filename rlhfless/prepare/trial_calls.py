"""A trial call of the user's own rewards on made responses, before any device is asked for.

It runs where a run's rewards run: in worker processes. A reward must give a number for whatever a policy writes, so the
responses are made up; the rule by which failures stop a run (`scoring.on_failure`, `scoring.max_failed`) decides here,
too. HTTP rewards are not called: a check of a spec asks nothing of other machines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import numpy as np

from rlhfless.records import FinishReason, Prompt
from rlhfless.rewards import Failed, Outcome, RewardError, RewardSample
from rlhfless.rewards.protocol import within_range
from rlhfless.rewards.workers import Workers
from rlhfless.spec import PythonRewardSpec, RunSpec, ScoringSpec
from rlhfless.spec.errors import Problem

MOST_PROMPTS = 16
"""Prompts that are tried, evenly spread over the data set."""

MOST_SIBLINGS = 16
"""Samples per prompt for a reward that gets lists and may compare siblings; others get one."""

TRIAL_S = 30.0
"""Longest trial of a reward, beside the start of its worker; what is not scored by then is not judged."""


def trial_calls(spec: RunSpec, prompts: Sequence[Prompt]) -> tuple[list[Problem], list[str]]:
    """Problems that would stop the run at its first step, and warnings."""
    problems, warnings = [], []
    for index, reward in enumerate(spec.rewards):
        if not isinstance(reward, PythonRewardSpec) or not prompts:
            continue
        where, name = f"rewards.{index}", f"reward {reward.label!r}"
        samples = _samples(prompts, min(spec.samples_per_prompt, MOST_SIBLINGS) if reward.batch else 1)
        try:
            outcomes = asyncio.run(_outcomes(reward, samples))
        except RewardError as error:
            problems.append(Problem(where, f"{name}: {error.what}"))
            continue
        if what := _failures(samples, outcomes):
            if _stops(spec.scoring, outcomes):
                problems.append(Problem(where, f"{name}: {what}", _mend(spec.scoring)))
            else:
                warnings.append(f"{where}: {name}: {what}")
        if len(outcomes) < len(samples):
            late = f"{len(samples) - len(outcomes)} of {len(samples)} trial calls did not end within {TRIAL_S:g} s"
            warnings.append(f"{where}: {name}: {late}")
    return problems, warnings


def _samples(prompts: Sequence[Prompt], siblings: int) -> list[RewardSample]:
    chosen = np.unique(np.linspace(0, len(prompts) - 1, min(len(prompts), MOST_PROMPTS)).astype(int))
    return [
        RewardSample(prompt.text, text, len(text.split()), FinishReason.STOP, prompt.columns, prompt.prompt_id, number)
        for prompt in (prompts[index] for index in chosen)
        for number in range(siblings)
        if (text := f"The answer is {number}.")
    ]


async def _outcomes(reward: PythonRewardSpec, samples: Sequence[RewardSample]) -> Mapping[int, Outcome]:
    """By sample, as far as they are known in time. Raises RewardError if the reward cannot be made."""
    outcomes: dict[int, Outcome] = {}
    workers = Workers([reward], 1)
    try:
        await workers.start()
        async with asyncio.timeout(TRIAL_S):
            await workers.score(0, samples, outcomes.__setitem__)
    except TimeoutError:
        pass
    finally:
        workers.close()
    return {index: within_range(reward.label, reward.weight, outcome) for index, outcome in outcomes.items()}


def _failures(samples: Sequence[RewardSample], outcomes: Mapping[int, Outcome]) -> str:
    failed = {index: outcome for index, outcome in sorted(outcomes.items()) if isinstance(outcome, Failed)}
    if not failed:
        return ""
    first = next(iter(failed))
    return (
        f"{len(failed)} of {len(outcomes)} trial calls on made responses failed; the first: {samples[first]}: "
        f"{failed[first].cause}"
    )


def _stops(scoring: ScoringSpec, outcomes: Mapping[int, Outcome]) -> bool:
    """Whether a step with these failures would stop the run."""
    failed = sum(isinstance(outcome, Failed) for outcome in outcomes.values())
    return scoring.on_failure == "fail" or failed > scoring.max_failed * len(outcomes)


def _mend(scoring: ScoringSpec) -> str:
    number = "return a finite number for every response, also for one that it cannot read"
    if scoring.on_failure == "fail":
        return number
    return f"{number}; or set scoring.max_failed to 1, and failures are only warned of here"
