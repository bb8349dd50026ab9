"""Select the samples to learn from: drop failed samples, redraw groups without a signal, and compute token staleness.

*Dynamic sampling* (DAPO, arXiv 2503.14476, section 3.2). If all samples of a prompt have the same reward, every
advantage is 0. With `max_redraws`, a step generates other prompts in place of such groups, and learns only from groups
with a signal. Each redraw has the number of missing prompts divided by the share of groups with a signal so far:
replacing the last few prompts one at a time would leave the engines idle. The prompts depend only on the seed, the step
and the groups so far, so a repeated step generates the same ones and finds them in the journal.

*Failed samples* (`scoring.on_failure`, `scoring.max_failed`). A sample fails if a reward raises on it, or if the engine
returned a logprob that is not finite; the latter is always dropped. Samples are dropped before the batch is packed, so
they affect no mean, standard deviation, loss or denominator. They stay in the ledger, with the cause."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np

from rlhfless.algorithms.batch import in_batch_order
from rlhfless.environments.failure_bias import KINDS, biased, failure_p_values
from rlhfless.orchestrator.group_pipeline import ScoredGroups
from rlhfless.orchestrator.rollout_request import RolloutRequest
from rlhfless.prepare.prompt_order import PromptOrder
from rlhfless.records import Experience, Group, IntArray, Rollout, Sample, Score, VersionSpan, WeightVersion
from rlhfless.records.rollouts import ENVIRONMENT
from rlhfless.rewards import RewardError
from rlhfless.spec import ScoringSpec

log = logging.getLogger(__name__)

ROUNDING = 1e-12
"""Relative tolerance of equal rewards: the order in which parts are summed causes rounding differences."""


def differ(rewards: Sequence[float]) -> bool:
    """Return whether the rewards of a prompt's samples differ; False for fewer than two rewards."""
    low, high = min(rewards, default=0.0), max(rewards, default=0.0)
    return high - low > ROUNDING * max(abs(low), abs(high))


def has_signal(group: Group) -> bool:
    """Return whether the samples of a group differ in reward. Drop failed samples first (`usable_of`)."""
    return differ([sample.scored.total for sample in group.samples])


def with_signal(experience: Experience) -> Experience:
    """Keep the groups with a signal, or all groups if none has a signal, because a step needs a batch."""
    groups = tuple(filter(has_signal, experience.groups))
    return Experience(groups) if groups else experience


async def with_redraws(
    experience: Experience,
    request: RolloutRequest,
    order: PromptOrder,
    redraws: int,
    draw: Callable[[RolloutRequest], Awaitable[Experience]],
    scoring: ScoringSpec,
) -> Experience:
    """Generate other prompts in place of groups without a signal, at most `redraws` times.

    Returns all groups, sorted by prompt id. Stops early if enough samples failed to stop the run.
    """
    groups = {group.prompt.prompt_id: group for group in experience.groups}
    wanted = len(request.prompts)

    def signals() -> int:
        return sum(map(has_signal, usable_of(Experience(tuple(groups.values())), scoring).groups))

    def lacking() -> int:
        return max(wanted - signals(), 0)

    for _ in range(redraws):
        if too_many_failed(Experience(tuple(groups.values())), scoring):
            break
        count = min(math.ceil(lacking() / (max(signals(), 1) / len(groups))), wanted)
        prompts = order.others(request.call.step - 1, count, groups.keys())
        if not prompts:
            break
        further = await draw(replace(request, prompts=tuple(prompts)))
        groups |= {group.prompt.prompt_id: group for group in further.groups}
    if redraws and lacking():
        what = "step %d learns from %d of %d prompts: %d redraws gave no more groups with a signal"
        log.warning(what, request.call.step, wanted - lacking(), wanted, redraws)
    return Experience(tuple(groups[prompt_id] for prompt_id in sorted(groups)))


LOGPROBS = "rollout_logprobs"
"""Name of the failure of samples whose logprobs are not finite."""


def added_up(groups: Sequence[Group], scored: Sequence[ScoredGroups], scoring: ScoringSpec) -> ScoredGroups:
    """Add up the scores of several functions per sample, and mark samples whose logprobs are not finite as failed.

    Raises RewardError at the first failure if `scoring.on_failure` is `fail`.
    """
    scores = [
        [_marked(sample, _total(sample, parts)) for sample, *parts in zip(group.samples, *of_group, strict=True)]
        for group, *of_group in zip(groups, *scored, strict=True)
    ]
    if scoring.on_failure == "fail":
        scored_groups = (group.adding(score=of_group) for group, of_group in zip(groups, scores, strict=True))
        for sample in Experience(tuple(scored_groups)).failed():
            reward, cause = next(iter(sample.scored.failures.items()))
            raise RewardError(reward, f"{sample}: {cause} (scoring.on_failure is `fail`)")
    return scores


def without_failures(experience: Experience, scoring: ScoringSpec, step: int) -> Experience:
    """Log the failed samples of a step, and drop them unless `scoring.on_failure` keeps them.

    Raises RewardError if too many samples failed.
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
    """Keep the samples that the step can learn from; drop groups without any."""
    unusable = {sample.key for sample in experience.failed() if not usable(sample.scored.failures, scoring)}
    return _without(experience, unusable) if unusable else experience


def usable(failures: Collection[str], scoring: ScoringSpec) -> bool:
    """Return whether a step can learn from a sample with these failures, by name."""
    return not failures or (scoring.on_failure != "drop" and LOGPROBS not in failures)


def too_many_failed(experience: Experience, scoring: ScoringSpec) -> bool:
    """Return whether the run must stop: more than `scoring.max_failed` of the samples failed, or none is usable."""
    failed, samples = len(list(experience.failed())), len(experience.samples)
    return failed > scoring.max_failed * samples or not usable_of(experience, scoring).groups


def log_failures(experience: Experience, step: int) -> None:
    """Log a warning for each reward that failed, with the number of samples and the first cause."""
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
    chances = failure_chances(experience)
    for kind in biased(chances):
        log.warning(
            "step %d: failures of the environment depend on %s (p = %.2g), so the samples that are left are a "
            "selection, and what is learned from them is biased",
            step, KINDS[kind], chances[kind],
        )  # fmt: skip


def failure_chances(experience: Experience) -> dict[str, float]:
    """Return the probability by chance of which calls have failed: see rlhfless.environments.failure_bias."""
    return failure_p_values(
        [
            [
                (sample.episode, None if sample.score is None or sample.score.failures else sample.score.total)
                for sample in group.samples
                if sample.episode is not None
            ]
            for group in experience.groups
        ]
    )


def readable(groups: Sequence[Group]) -> list[Group]:
    """Replace non-finite rollout logprobs with 0, for stages that run before failed samples are dropped."""
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


def _total(sample: Sample, parts: Sequence[Score]) -> Score:
    """Add up an environment's reward and those of `rewards`."""
    if sample.episode is not None and sample.score is not None:
        return reduce(Score.plus, parts, sample.score)
    if parts:
        return reduce(Score.plus, parts)
    if sample.episode is None:  # the algorithm needs no rewards, and the run has none
        return Score(0.0, {})
    status = f" (the episode ended by: {sample.episode.status})"
    return Score(0.0, {}, {ENVIRONMENT: f"it gave no reward{status}"})


def _marked(sample: Sample, score: Score) -> Score:
    for rollout in sample.rollouts:
        odd = np.flatnonzero(~np.isfinite(rollout.logprobs))
        if len(odd):
            cause = f"the engine gave {rollout.logprobs[odd[0]]} as the logprob of response token {odd[0]}"
            return replace(score, failures={**score.failures, LOGPROBS: cause})
    return score


def _without(experience: Experience, keys: Collection[tuple[str, int]]) -> Experience:
    """Drop samples, and groups that then have none."""
    kept = (
        Group(group.prompt, tuple(sample for sample in group.samples if sample.key not in keys))
        for group in experience.groups
    )
    return Experience(tuple(group for group in kept if group.samples))


@dataclass(frozen=True, slots=True)
class Staleness:
    """Staleness of a step's tokens: the number of versions that their weights are behind the learner's."""

    oldest: WeightVersion
    mean: float
    """Mean over tokens, in versions."""
    most: int
    differs: bool
    """Whether the staleness varies between tokens."""

    @property
    def metrics(self) -> dict[str, float]:
        return {"staleness_mean": self.mean, "staleness_max": float(self.most)}


def staleness_of(experience: Experience, learner: WeightVersion) -> Staleness | None:
    """Compute the staleness of samples relative to the version `learner`; return None if the engine reports no
    versions."""
    tokens = _tokens_by_version(
        span for sample in experience.samples for r in sample.rollouts for span in r.version_spans
    )
    if not tokens:
        return None
    # A version's number is its training step, across all attempts of a run.
    behind = {version: learner.step - version.step for version in tokens}
    mean = sum(behind[version] * count for version, count in tokens.items()) / sum(tokens.values())
    oldest = max(behind, key=lambda version: behind[version])
    return Staleness(oldest, mean, behind[oldest], len({*behind.values()}) > 1)


def by_token(groups: Sequence[Group], learner: WeightVersion) -> IntArray:
    """Compute the staleness of each token relative to `learner`, `[tokens]` in the order of `pack`; 0 for tokens that
    the policy did not generate."""
    values = []
    for segment in (each for group in in_batch_order(groups) for sample in group.samples for each in sample.segments):
        values.append(np.zeros(len(segment.token_ids), dtype=np.int64))
        for span in segment.version_spans if isinstance(segment, Rollout) else ():
            values[-1][span.start : span.end] = max(learner.step - WeightVersion.parse(span.version).step, 0)
    return np.concatenate(values)


def _tokens_by_version(spans: Iterable[VersionSpan]) -> Mapping[WeightVersion, int]:
    labels: Counter[str] = Counter()
    for span in spans:
        labels[span.version] += span.end - span.start
    return {WeightVersion.parse(label): count for label, count in labels.items() if count}
