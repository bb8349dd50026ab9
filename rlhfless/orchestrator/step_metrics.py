"""Compute the metrics of a step and of an evaluation, under the names that telemetry declares."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from rlhfless.orchestrator.batches import StepBatch
from rlhfless.orchestrator.experience import failure_chances, has_signal, usable
from rlhfless.orchestrator.generation import GenerationStage
from rlhfless.orchestrator.run import RLRun, StepContext
from rlhfless.prefixes.trie import shared_prefixes
from rlhfless.records import Episode, Experience, FinishReason, Group, Invocation, Score, Work
from rlhfless.records.ledger import PREFIX_TOKENS_EVICTED, PROMPT_TOKENS_COMPUTED, PROMPT_TOKENS_UNIQUE, added
from rlhfless.scaling.accounting import Phase, StepTimes, length, union
from rlhfless.spec import EvaluationSpec, RunSpec, ScoringSpec
from rlhfless.util.clock import unix_s

OF_REWARDS = frozenset({"reward_mean", "reward_std", "groups_without_signal"})
"""Metrics that a run without rewards does not have."""


def rollout_metrics(experience: Experience, kept: Experience, prompts: int) -> dict[str, float]:
    """Return the metrics of a step's rollouts. `kept`: the usable samples. `prompts`: the number of groups wanted."""
    samples = experience.samples
    lengths = np.array([sample.model_tokens for sample in samples])
    prompt_tokens = np.array([len(group.prompt.token_ids) for group in experience.groups for _ in group.samples])
    signal = sum(map(has_signal, kept.groups))
    cached = sum(sample.rollout.cached_tokens for sample in samples)
    return {
        **reward_metrics(kept.scores),
        "failed_rewards": float(len(list(experience.failed()))),
        "redrawn_groups": float(max(len(experience.groups) - prompts, 0)),
        "groups_without_signal": 1 - signal / len(experience.groups),
        "prompt_tokens_mean": float(prompt_tokens.mean()),
        "response_tokens_mean": float(lengths.mean()),
        "response_tokens_max": float(lengths.max()),
        "truncated": float(np.mean([sample.finish_reason == FinishReason.LENGTH for sample in samples])),
        "cached_prompt_tokens": cached / float(prompt_tokens.sum()),
        **episode_metrics([episode for sample in samples if (episode := sample.episode) is not None]),
        **{f"failure_chance/{kind}": p for kind, p in failure_chances(experience).items()},
    }


def episode_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return the metrics of a step's episodes; none in a run without an environment."""
    if not episodes:
        return {}
    calls = [call for episode in episodes for call in episode.calls]
    ended = Counter(episode.status for episode in episodes)
    return {
        "turns_mean": fmean(len(episode.turns) for episode in episodes),
        "calls_mean": len(calls) / len(episodes),
        "invalid_calls": sum(call.outcome == "invalid" for call in calls) / max(len(calls), 1),
        "environment_wait_mean_s": fmean(episode.wait_s for episode in episodes),
        "environment_failures": float(sum(len(episode.failures) for episode in episodes)),
        "conversations_mean": fmean(episode.conversations for episode in episodes),
        **{f"episodes/{status}": count / len(episodes) for status, count in sorted(ended.items())},
    }


def step_metrics(
    run: RLRun,
    context: StepContext,
    batch: StepBatch,
    drawn: Mapping[str, float],
    learned: Mapping[str, float],
) -> dict[str, float]:
    """Return all metrics of a step that ends now. `drawn`: those of its rollouts. `learned`: those of the trained
    functions."""
    begun, stage = context.begun, context.stage
    times = run.ledger.step_times(begun, unix_s())
    seconds = times.phases_s
    calls = run.ledger.done_in_step(begun.step)[0]
    return {
        **drawn,
        "step_s": times.wall_s,
        "generation_s": seconds[Phase.GENERATION],
        "scoring_s": seconds[Phase.SCORING],
        "reference_s": seconds[Phase.REFERENCE],
        **own_seconds(times),
        "learn_s": seconds[Phase.LEARN],
        "sync_s": seconds[Phase.SYNC],
        "overhead_s": times.overhead_s,
        "recovery_s": times.recovery_s,
        "generation_tokens_per_s": tokens_per_s(calls),
        **(stage_metrics(stage) if stage else {}),
        **batch.prompt_metrics(calls),
        **draft_metrics(calls),
        "actors": float(len(run.generation.serving())),
        **run.scaler.runner.figures(begun.step),
        "cost_usd": run.ledger.cost_usd(run.pools.values()),
        **learned,
    }


def own_seconds(times: StepTimes) -> dict[str, float]:
    """Return the seconds of optional functions: teachers, a critic, and a user's own per-token outputs."""
    seconds = times.phases_s
    optional = (Phase.TEACHER, Phase.CRITIC, Phase.COLUMNS)
    return {f"{phase}_s": seconds[phase] for phase in optional if seconds[phase]}


def stage_metrics(stage: GenerationStage) -> dict[str, float]:
    """Return the metrics of the driver's machine, and of resumed samples and deferred groups, as far as there are
    any."""
    metrics = {} if stage.host_busy_cores is None else {"host_busy_cores": stage.host_busy_cores}
    selection = stage.request.selection
    if selection is None:
        return metrics
    samples, tokens = stage.samples.resumed
    left = len(stage.request.prompts) - selection.groups
    deferred = {"deferred_groups": float(left), "resumed_samples": float(samples), "resumed_tokens": float(tokens)}
    return metrics | deferred


def draft_metrics(calls: Iterable[Invocation]) -> dict[str, float]:
    """Return the metrics of drafts, including those of evaluations; empty without speculation."""
    calls = list(calls)
    drafted, accepted = (added(*(getattr(call, name) for call in calls)) for name in ("drafted", "accepted"))
    if not sum(drafted):
        return {}
    places = enumerate(zip(drafted, accepted, strict=True), 1)
    return {
        "drafted_tokens": float(sum(drafted)),
        "accepted_tokens": float(sum(accepted)),
        "draft_s": sum(call.draft_s for call in calls),
        "verify_s": sum(call.verify_s for call in calls),
        **{f"draft_acceptance/{place}": taken / asked for place, (asked, taken) in places if asked},
    }


def tokens_per_s(calls: Iterable[Invocation]) -> float:
    """Return the response tokens per second during which a call generated; 0 if none did."""
    drawing = [call for call in calls if call.work is Work.GENERATE]
    drawing_s = length(union((call.start_s, call.end_s) for call in drawing))
    return sum(call.output_tokens for call in drawing) / drawing_s if drawing_s else 0.0


def reward_metrics(scores: Sequence[Score]) -> dict[str, float]:
    """Return the mean and standard deviation of the reward, and the mean of each reward part."""
    totals = np.array([score.total for score in scores])
    return {
        "reward_mean": float(totals.mean()),
        "reward_std": float(totals.std()),
        **{f"reward/{part}": value for part, value in mean_parts(scores).items()},
    }


def mean_parts(scores: Sequence[Score]) -> dict[str, float]:
    """Return the mean of each reward part over the samples that have it."""
    values: dict[str, list[float]] = {}
    for score in scores:
        for part, value in score.parts.items():
            values.setdefault(part, []).append(value)
    return {part: float(np.mean(numbers)) for part, numbers in values.items()}


ENGINES = frozenset({Work.GENERATE, Work.PRECOMPUTE})
"""Calls of engines, which compute prompts and generate responses."""

COUNTED = frozenset({*ENGINES, Work.LOGPROBS, Work.LEARN})
"""Calls that compute the prompts of a step and report cached tokens."""


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """The tokens of some samples."""

    unique_prompts: int
    """Prompt tokens, with each shared prefix counted once."""
    responses: int

    @classmethod
    def of(cls, experience: Experience) -> TokenCounts:
        prompts = [group.prompt.token_ids for group in experience.groups]
        counts = [len(group.samples) for group in experience.groups]
        unique = shared_prefixes(prompts, counts, last_alone=False).unique_tokens
        return cls(unique, sum(sample.model_tokens for sample in experience.samples))


def prompt_token_metrics(
    calls: Iterable[Invocation], drawn: TokenCounts, kept: TokenCounts, epochs_of: Callable[[str], int]
) -> dict[str, float]:
    """Return `prompt_tokens_computed` and `prompt_tokens_unique` of each function with a call, and
    `prefix_tokens_evicted`. `drawn`: all generated samples. `kept`: those trained on. `epochs_of` returns a function's
    passes over them."""
    computed: defaultdict[tuple[str, Work], int] = defaultdict(int)
    evicted = 0
    for call in calls:
        evicted += call.evicted_tokens
        if call.work in COUNTED:
            # Several kinds of calls compute prompts for generation; count them together.
            work = Work.GENERATE if call.work in ENGINES else call.work
            computed[call.function, work] += call.input_tokens - call.cached_tokens
    draws = any(work is Work.GENERATE for _, work in computed)
    metrics: defaultdict[str, float] = defaultdict(float, {PREFIX_TOKENS_EVICTED: float(evicted)} if draws else {})
    for (function, work), tokens in computed.items():
        fed, passes = (kept, epochs_of(function)) if work is Work.LEARN else (drawn, 1)
        # Functions other than engines also get the responses, and compute all of their tokens.
        responses = 0 if work in ENGINES else fed.responses
        metrics[f"{PROMPT_TOKENS_COMPUTED}/{function}"] += float(tokens - passes * responses)
        metrics[f"{PROMPT_TOKENS_UNIQUE}/{function}"] += float(passes * fed.unique_prompts)
    return dict(metrics)


def evaluation_metrics(sampled: Experience, greedy: Experience, spec: RunSpec) -> dict[str, float]:
    """Return `reward_mean` over all held-out prompts, and `figures_of` each set, with names prefixed by `<set>/`."""
    sets = dict.fromkeys(group.prompt.source for group in sampled.groups)
    return (mean_reward(sampled, spec.scoring) if spec.scores_samples else {}) | {
        f"{name}/{figure}" if name else figure: value
        for name in sets
        for figure, value in figures_of(_of(sampled, name), _of(greedy, name), spec.evaluation).items()
    }


def mean_reward(sampled: Experience, scoring: ScoringSpec) -> dict[str, float]:
    """Return `reward_mean`, the mean weighted reward over the samples of all sets. Samples with a failed reward count
    if training uses them (`scoring.on_failure`)."""
    scores = [sample.scored for sample in sampled.samples]
    totals = [score.total for score in scores if usable(score.failures, scoring)]
    return {"reward_mean": math.fsum(totals) / len(totals)} if totals else {}


def figures_of(sampled: Experience, greedy: Experience, spec: EvaluationSpec) -> dict[str, float]:
    """Return the metrics of each reward part: `<part>`, its mean over the samples (mean@k for any k);
    `<part>_greedy`, its mean over the greedy responses; and `<part>_pass@<k>` for each k of the spec."""
    greedy_means = {f"{part}_greedy": value for part, value in mean_parts(greedy.scores).items()}
    passed: dict[str, float] = {}
    for part in mean_parts(sampled.scores):
        counts = [_counts(group, part, spec.pass_from) for group in sampled.groups]
        for k in spec.pass_at:
            # Skip prompts with fewer than k samples whose reward did not fail.
            if enough := [(n, c) for n, c in counts if n >= k]:
                passed[f"{part}_pass@{k}"] = pass_at(k, enough)
    return mean_parts(sampled.scores) | passed | greedy_means


def pass_at(k: int, counts: Sequence[tuple[int, int]]) -> float:
    """Return the probability that at least one of k samples of a prompt passes, as a mean over prompts.

    `counts`: for each prompt, its number of samples n >= k, and the number c that passed. Uses the unbiased estimator
    1 - C(n - c, k) / C(n, k) (Chen et al., arXiv 2107.03374, eq. 1).
    """
    return math.fsum(1 - math.comb(n - c, k) / math.comb(n, k) for n, c in counts) / len(counts)


def _counts(group: Group, part: str, pass_from: float) -> tuple[int, int]:
    """Return the number of a prompt's samples with this reward part, and the number of those that pass. A failed part
    is missing, because it says nothing about the response."""
    values = [sample.scored.parts[part] for sample in group.samples if part in sample.scored.parts]
    return len(values), sum(value >= pass_from for value in values)


def _of(experience: Experience, source: str) -> Experience:
    """Return the groups whose prompts come from a data set."""
    return Experience(tuple(group for group in experience.groups if group.prompt.source == source))
