"""The effect of failed samples on a step (`scoring.on_failure`, `scoring.max_failed`).

A sample fails if a reward fails on it, or if the engine gave a logprob of it that is not finite. Without its logprobs
nothing can be learned from a sample, so such a one is dropped where `on_failure` is `zero`, too.

Group statistics stay right because a sample is dropped before the batch is packed: it is in no mean, no standard
deviation, no loss and no denominator. It stays in the ledger, with the cause of the failure.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import reduce

import numpy as np

from rlhfless.orchestrator.stages import ScoredGroups
from rlhfless.records import Experience, Group, Rollout, Sample, Score
from rlhfless.rewards import RewardError
from rlhfless.spec import ScoringSpec

log = logging.getLogger(__name__)

LOGPROBS = "rollout_logprobs"
"""The name of the failure of a sample whose logprobs are not finite."""


def added_up(groups: Sequence[Group], scored: Sequence[ScoredGroups], scoring: ScoringSpec) -> ScoredGroups:
    """The scores of several functions, added up to one score per sample; with a failure where the engine's logprobs are
    not finite.

    Raises RewardError at the first failure if the spec says so.
    """
    scores = [
        [_marked(sample, reduce(Score.plus, parts)) for sample, *parts in zip(group.samples, *of_group, strict=True)]
        for group, *of_group in zip(groups, *scored, strict=True)
    ]
    if scoring.on_failure == "fail":
        scored_groups = (group.adding(score=of_group) for group, of_group in zip(groups, scores, strict=True))
        for sample in Experience(tuple(scored_groups)).failed():
            reward, cause = next(iter(sample.scored.failures.items()))
            raise RewardError(reward, f"{sample}: {cause} (scoring.on_failure is `fail`)")
    return scores


def without_failures(experience: Experience, scoring: ScoringSpec, step: int) -> Experience:
    """The part of a step that is trained on: all samples, or all except those that failed.

    Logs failures. Raises RewardError if too many samples failed.
    """
    log_failures(experience, step)
    if too_many_failed(experience, scoring):
        failed, samples = list(experience.failed()), len(experience.samples)
        reward, cause = next(iter(failed[0].scored.failures.items()))
        share = (
            f"{len(failed)} of {samples} samples of step {step} failed (scoring.max_failed is {scoring.max_failed:g})"
        )
        raise RewardError(reward, f"{share}; the first: {failed[0]}: {cause}")
    return usable_of(experience, scoring)


def usable_of(experience: Experience, scoring: ScoringSpec) -> Experience:
    """The samples that can be learned from, and the groups that have any."""
    unusable = {sample.key for sample in experience.failed() if not usable(sample.scored.failures, scoring)}
    return _without(experience, unusable) if unusable else experience


def usable(failures: Collection[str], scoring: ScoringSpec) -> bool:
    """Whether a sample whose parts `failures` have failed can be learned from."""
    return not failures or (scoring.on_failure != "drop" and LOGPROBS not in failures)


def too_many_failed(experience: Experience, scoring: ScoringSpec) -> bool:
    """Whether a step stops the run because of the samples that failed."""
    failed, samples = len(list(experience.failed())), len(experience.samples)
    return failed > scoring.max_failed * samples or not usable_of(experience, scoring).groups


def log_failures(experience: Experience, step: int) -> None:
    """Log one warning per reward, with the number of samples that it failed on and the first cause."""
    by_reward: dict[str, list[Sample]] = {}
    for sample in experience.failed():
        for reward in sample.scored.failures:
            by_reward.setdefault(reward, []).append(sample)
    for reward, samples in by_reward.items():
        causes = {sample.scored.failures[reward] for sample in samples}
        others = f"; {len(causes)} different causes" if len(causes) > 1 else ""
        all_of_them = f" (all: rlhfless trace samples RUN --step {step} --failed)" if len(samples) > 1 else ""
        log.warning(
            "step %d: reward %r failed on %d of %d samples; %s: %s%s%s",
            step, reward, len(samples), len(experience.samples), samples[0], samples[0].scored.failures[reward],
            others, all_of_them,
        )  # fmt: skip


def readable(groups: Sequence[Group]) -> list[Group]:
    """The groups with 0 for each rollout logprob that is not finite, for stages that run before failed samples are
    dropped."""
    return [replace(group, samples=tuple(map(_readable, group.samples))) for group in groups]


def _readable(sample: Sample) -> Sample:
    if all(np.isfinite(rollout.logprobs).all() for rollout in sample.rollouts):
        return sample
    segments = [
        replace(segment, logprobs=np.nan_to_num(segment.logprobs, nan=0.0, posinf=0.0, neginf=0.0))
        if isinstance(segment, Rollout)
        else segment
        for segment in sample.segments
    ]
    return replace(sample, segments=tuple(segments))


def _marked(sample: Sample, score: Score) -> Score:
    for rollout in sample.rollouts:
        odd = np.flatnonzero(~np.isfinite(rollout.logprobs))
        if len(odd):
            cause = f"the engine gave {rollout.logprobs[odd[0]]} as the logprob of response token {odd[0]}"
            return replace(score, failures={**score.failures, LOGPROBS: cause})
    return score


def _without(experience: Experience, keys: Collection[tuple[str, int]]) -> Experience:
    """The experience without these samples, and without groups that are empty then."""
    kept = (
        Group(group.prompt, tuple(sample for sample in group.samples if sample.key not in keys))
        for group in experience.groups
    )
    return Experience(tuple(group for group in kept if group.samples))
