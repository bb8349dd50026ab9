"""What failed rewards mean for a step (`scoring.on_failure`, `scoring.max_failed`).

Group statistics stay right because a dropped sample is gone before the batch is packed: it is in no mean, no standard
deviation, no loss and no denominator. It stays in the ledger, with its cause.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import reduce

from rlhfless.loop.experience import Experience, ScoredGroups
from rlhfless.records import FloatArray, Group, Rollout, Score
from rlhfless.rewards import RewardError
from rlhfless.spec import ScoringSpec

log = logging.getLogger(__name__)

LOGGED_PER_STEP = 10
"""Failures of a step that are logged one by one; a broken reward fails on all samples, and the trace has them all."""


def added_up(groups: Sequence[Group], scored: Sequence[ScoredGroups], scoring: ScoringSpec) -> ScoredGroups:
    """The scores of several functions as one per rollout.

    Raises RewardError at the first failure if the spec says so.
    """
    scores = [
        [reduce(Score.plus, parts) for parts in zip(*of_group, strict=True)] for of_group in zip(*scored, strict=True)
    ]
    if scoring.on_failure == "fail":
        for rollout, score in _failed(groups, scores):
            reward, cause = next(iter(score.failures.items()))
            raise RewardError(reward, f"{_where(rollout)}: {cause} (scoring.on_failure is `fail`)")
    return scores


def without_failures(experience: Experience, scoring: ScoringSpec, step: int) -> Experience:
    """What of a step is trained on: all of it, or all but the samples with a failed reward.

    Logs failures. Raises RewardError if too many samples failed.
    """
    log_failures(experience, step)
    failed = list(_failed(experience.groups, experience.scores))
    samples = sum(len(group.rollouts) for group in experience.groups)
    dropping = scoring.on_failure == "drop"
    if len(failed) > scoring.max_failed * samples or (dropping and len(failed) == samples):
        rollout, score = failed[0]
        reward, cause = next(iter(score.failures.items()))
        share = (
            f"{len(failed)} of {samples} samples of step {step} failed (scoring.max_failed is {scoring.max_failed:g})"
        )
        raise RewardError(reward, f"{share}; the first: {_where(rollout)}: {cause}")
    return _dropped(experience) if failed and dropping else experience


def log_failures(experience: Experience, step: int) -> None:
    """One warning per failed sample, up to LOGGED_PER_STEP."""
    failed = list(_failed(experience.groups, experience.scores))
    for rollout, score in failed[:LOGGED_PER_STEP]:
        for reward, cause in score.failures.items():
            log.warning("step %d: reward %r failed on %s: %s", step, reward, _where(rollout), cause)
    if len(failed) > LOGGED_PER_STEP:
        log.warning("step %d: rewards failed on %d more samples", step, len(failed) - LOGGED_PER_STEP)


def _failed(groups: Sequence[Group], scores: ScoredGroups) -> Iterator[tuple[Rollout, Score]]:
    for group, of_group in zip(groups, scores, strict=True):
        for rollout, score in zip(group.rollouts, of_group, strict=True):
            if score.failures:
                yield rollout, score


def _dropped(experience: Experience) -> Experience:
    """Without the failed samples, and without groups that lose all of theirs."""
    groups: list[Group] = []
    scores: list[tuple[Score, ...]] = []
    logprobs: list[tuple[FloatArray, ...]] = []
    for index, (group, of_group) in enumerate(zip(experience.groups, experience.scores, strict=True)):
        kept = [i for i, score in enumerate(of_group) if not score.failures]
        if not kept:
            continue
        groups.append(Group(group.prompt, tuple(group.rollouts[i] for i in kept)))
        scores.append(tuple(of_group[i] for i in kept))
        if experience.reference_logprobs is not None:
            logprobs.append(tuple(experience.reference_logprobs[index][i] for i in kept))
    return Experience(tuple(groups), tuple(scores), None if experience.reference_logprobs is None else tuple(logprobs))


def _where(rollout: Rollout) -> str:
    return f"sample {rollout.sample_index} of prompt {rollout.prompt_id!r}"
