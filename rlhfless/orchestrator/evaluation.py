"""One evaluation on held-out prompts: the mean reward, and for each set the mean of every reward part, and pass@k."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rlhfless.orchestrator.failures import log_failures, usable
from rlhfless.orchestrator.run import Run
from rlhfless.orchestrator.step import drawn
from rlhfless.orchestrator.summary import mean_parts
from rlhfless.records import Experience, Group
from rlhfless.spec import EvaluationSpec, ScoringSpec


async def evaluate_held_out(run: Run, step: int) -> Mapping[str, float]:
    """The figures of the held-out prompts, of which there is at least one: `reward_mean` over all of them, and of each
    set, with its name `<set>/` before them, those of `figures_of`.

    All evaluations of a run draw with the same seeds, so two of them differ by the weights alone.
    """
    run.clock.interrupt()
    requests = [run.held_out_request(step, greedy=greedy) for greedy in (False, True)]
    # Both at once: more sequences per iteration of the engine.
    apart, oldest = await run.average(), run.published.version.step
    sampled, greedy = await drawn(run, {run.generate(request): {} for request in requests}, oldest, apart=apart)
    for experience in (sampled, greedy):
        log_failures(experience, step)
    run.evaluated_samples(step, sampled, greedy)
    sets = dict.fromkeys(group.prompt.source for group in sampled.groups)
    return mean_reward(sampled, run.spec.scoring) | {
        f"{name}/{figure}" if name else figure: value
        for name in sets
        for figure, value in figures_of(_of(sampled, name), _of(greedy, name), run.spec.evaluation).items()
    }


def mean_reward(sampled: Experience, scoring: ScoringSpec) -> dict[str, float]:
    """`reward_mean`: the mean weighted reward over the samples of all sets. One whose reward failed counts if samples
    like it are learned from (`scoring.on_failure`)."""
    scores = [sample.scored for sample in sampled.samples]
    totals = [score.total for score in scores if usable(score.failures, scoring)]
    return {"reward_mean": math.fsum(totals) / len(totals)} if totals else {}


def figures_of(sampled: Experience, greedy: Experience, spec: EvaluationSpec) -> dict[str, float]:
    """Of every reward part: `<part>`, its mean over the samples, which is mean@k for any k; `<part>_greedy`, its mean
    over the greedy responses; and `<part>_pass@<k>` for each k that the spec asks for."""
    greedy_means = {f"{part}_greedy": value for part, value in mean_parts(greedy.scores).items()}
    passed: dict[str, float] = {}
    for part in mean_parts(sampled.scores):
        counts = [_counts(group, part, spec.pass_from) for group in sampled.groups]
        for k in spec.pass_at:
            # A prompt with fewer than k samples whose reward did not fail is left out.
            if enough := [(n, c) for n, c in counts if n >= k]:
                passed[f"{part}_pass@{k}"] = pass_at(k, enough)
    return mean_parts(sampled.scores) | passed | greedy_means


def pass_at(k: int, counts: Sequence[tuple[int, int]]) -> float:
    """The chance that at least one of k samples of a prompt passes, mean over prompts of which (n samples, c that
    passed) are known, n >= k: 1 - C(n - c, k) / C(n, k), which is unbiased (Chen et al., arXiv 2107.03374, eq. 1)."""
    return math.fsum(1 - math.comb(n - c, k) / math.comb(n, k) for n, c in counts) / len(counts)


def _counts(group: Group, part: str, pass_from: float) -> tuple[int, int]:
    """Samples of a prompt that have a reward part, and those of them with a high enough one. A failed part is missing:
    it says nothing about the response."""
    values = [sample.scored.parts[part] for sample in group.samples if part in sample.scored.parts]
    return len(values), sum(value >= pass_from for value in values)


def _of(experience: Experience, source: str) -> Experience:
    """The groups whose prompts are of a set."""
    return Experience(tuple(group for group in experience.groups if group.prompt.source == source))
