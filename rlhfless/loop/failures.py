"""The effect of failed rewards on a step (`scoring.on_failure`, `scoring.max_failed`).

Group statistics stay right because a sample is dropped before the batch is packed: it is in no mean, no standard
deviation, no loss and no denominator. It stays in the ledger, with the cause of the failure.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import reduce

from rlhfless.loop.stages import ScoredGroups
from rlhfless.records import Experience, Group, Score
from rlhfless.rewards import RewardError
from rlhfless.spec import ScoringSpec

log = logging.getLogger(__name__)

LOGGED_PER_STEP = 10
"""At most this many failures of a step are logged one by one: a broken reward fails on all samples. The trace has all
failures."""


def added_up(groups: Sequence[Group], scored: Sequence[ScoredGroups], scoring: ScoringSpec) -> ScoredGroups:
    """The scores of several functions, added up to one score per sample.

    Raises RewardError at the first failure if the spec says so.
    """
    scores = [
        [reduce(Score.plus, parts) for parts in zip(*of_group, strict=True)] for of_group in zip(*scored, strict=True)
    ]
    if scoring.on_failure == "fail":
        scored_groups = (group.adding(score=of_group) for group, of_group in zip(groups, scores, strict=True))
        for sample in Experience(tuple(scored_groups)).failed():
            reward, cause = next(iter(sample.scored.failures.items()))
            raise RewardError(reward, f"{sample}: {cause} (scoring.on_failure is `fail`)")
    return scores


def without_failures(experience: Experience, scoring: ScoringSpec, step: int) -> Experience:
    """The part of a step that is trained on: all samples, or all except those with a failed reward.

    Logs failures. Raises RewardError if too many samples failed.
    """
    log_failures(experience, step)
    failed, samples = list(experience.failed()), len(experience.samples)
    dropping = scoring.on_failure == "drop"
    if len(failed) > scoring.max_failed * samples or (dropping and len(failed) == samples):
        reward, cause = next(iter(failed[0].scored.failures.items()))
        share = (
            f"{len(failed)} of {samples} samples of step {step} failed (scoring.max_failed is {scoring.max_failed:g})"
        )
        raise RewardError(reward, f"{share}; the first: {failed[0]}: {cause}")
    return _dropped(experience) if failed and dropping else experience


def log_failures(experience: Experience, step: int) -> None:
    """One warning per failed sample, up to LOGGED_PER_STEP."""
    failed = list(experience.failed())
    for sample in failed[:LOGGED_PER_STEP]:
        for reward, cause in sample.scored.failures.items():
            log.warning("step %d: reward %r failed on %s: %s", step, reward, sample, cause)
    if len(failed) > LOGGED_PER_STEP:
        log.warning("step %d: rewards failed on %d more samples", step, len(failed) - LOGGED_PER_STEP)


def _dropped(experience: Experience) -> Experience:
    """The experience without failed samples, and without groups in which all samples failed."""
    kept = (
        Group(group.prompt, tuple(sample for sample in group.samples if not sample.scored.failures))
        for group in experience.groups
    )
    return Experience(tuple(group for group in kept if group.samples))
