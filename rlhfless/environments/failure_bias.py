"""Find out whether failures of an environment pick out some episodes, which would bias what is learned. Pure.

A failed episode has no reward and is dropped. That changes nothing in the mean if failures hit calls at random. It does
if one tool fails, or calls late in an episode, or those of good episodes: the model then learns from a selection.

Every episode counts up to its first failure, so a session that fails again and again counts once. If calls fail at
random, then given the numbers of calls and failures, the failures among one kind of calls follow a hypergeometric
distribution. `exact_p` is Fisher's exact test on such tables, and with several strata its extension by Birch
(J. R. Stat. Soc. B 27, 1965). The kinds are

    tool      the calls of each tool, against all others
    turns     calls in the later half of the turns, against the earlier half
    siblings  calls of episodes whose siblings have a reward above the mean, against the others
    outcome   episodes with a reward above the mean, against the others; strata by number of calls, because longer
              episodes fail more often
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median_low

import numpy as np

from rlhfless.records.episodes import Episode

FALSE_ALARMS = 0.001
"""Probability that a step raises an alarm though failures are random, over all kinds together (Bonferroni)."""

KINDS = {
    "tool": "the tool",
    "turns": "how late in the episode the call is",
    "siblings": "the rewards of the other samples of the prompt",
    "outcome": "the reward of the episode",
}
"""What failures may depend on, by kind."""

ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Counts:
    """A stratum's calls, or episodes: of the kind in question and of the others, each with its failures."""

    failed: int
    total: int
    others_failed: int
    others_total: int


def exact_p(strata: Iterable[Counts]) -> float:
    """Return the probability of failures at least as unlikely as these, if they do not depend on the kind.

    Given the margins of each stratum, the kind's failures are hypergeometric; their sum over the strata is the
    statistic. Two-sided: the sum of the probabilities that are not above that of the observed value.
    """
    strata = list(strata)
    most = max((counts.total + counts.others_total for counts in strata), default=0)
    factorials = np.append(0.0, np.cumsum(np.log(np.arange(1, most + 1))))  # [most + 1]: log n!
    distribution, observed = np.ones(1), 0
    for counts in strata:
        failed, total = counts.failed + counts.others_failed, counts.total + counts.others_total
        least = max(failed - counts.others_total, 0)
        of_kind = np.arange(least, min(failed, counts.total) + 1)
        others = failed - of_kind
        logs = (
            factorials[counts.total] - factorials[of_kind] - factorials[counts.total - of_kind]
            + factorials[counts.others_total] - factorials[others] - factorials[counts.others_total - others]
            - factorials[total] + factorials[failed] + factorials[total - failed]
        )  # fmt: skip
        distribution = np.convolve(distribution, np.exp(logs))
        observed += counts.failed - least
    return float(min(distribution[distribution <= distribution[observed] * (1 + ROUNDING)].sum(), 1.0))


def failure_p_values(groups: Sequence[Sequence[tuple[Episode, float | None]]]) -> dict[str, float]:
    """Return the probability by chance of each kind's failures, by kind; empty without a failure or a call.

    `groups`: the episodes of each prompt, with their rewards; None for failed ones. Of the tools, the probability is
    that of the least likely one times their number.
    """
    episodes = [pair for group in groups for pair in group]
    calls = [call for episode, _ in episodes for call in _calls_of(episode)]
    failures = sum(call.failed for call in calls)
    if not 0 < failures < len(calls):
        return {}
    middle = median_low(call.turn for call in calls)
    tools = sorted({call.tool for call in calls})
    by_tool = [_p_of((call, call.tool == tool) for call in calls) for tool in tools]
    p_values = {
        "tool": min(len(tools) * min(by_tool), 1.0),
        "turns": _p_of((call, call.turn > middle) for call in calls),
    }
    scored = [reward for _, reward in episodes if reward is not None]
    if scored:
        mean = fmean(scored)
        p_values["siblings"] = _p_of(_by_siblings(groups, mean))
        p_values["outcome"] = exact_p(_by_outcome(episodes, mean))
    return p_values


def biased(p_values: Mapping[str, float]) -> list[str]:
    """Return the kinds whose failures are not random, least likely first; FALSE_ALARMS of random steps have one."""
    limit = FALSE_ALARMS / max(len(p_values), 1)
    return sorted((kind for kind, p in p_values.items() if p < limit), key=lambda kind: p_values[kind])


@dataclass(frozen=True, slots=True)
class _Call:
    turn: int
    tool: str
    failed: bool


def _calls_of(episode: Episode) -> list[_Call]:
    """Return the calls up to the first failure, which is the last one."""
    if episode.until_failure:
        last = len(episode.until_failure) - 1
        return [_Call(turn, tool, index == last) for index, (turn, tool) in enumerate(episode.until_failure)]
    return [_Call(call.turn, call.tool, False) for call in episode.calls]


def _p_of(calls: Iterable[tuple[_Call, bool]]) -> float:
    """Return the probability by chance of the failures of calls that are of a kind, and of those that are not."""
    counts = {True: [0, 0], False: [0, 0]}
    for call, is_of_kind in calls:
        counts[is_of_kind][0] += call.failed
        counts[is_of_kind][1] += 1
    return exact_p([Counts(*counts[True], *counts[False])])


def _by_siblings(groups: Sequence[Sequence[tuple[Episode, float | None]]], mean: float) -> Iterable[tuple[_Call, bool]]:
    """Yield each call, and whether the siblings of its episode have a reward above the mean. An episode's own failure
    does not change that."""
    for group in groups:
        for number, (episode, _) in enumerate(group):
            rewards = [reward for other, (_, reward) in enumerate(group) if other != number and reward is not None]
            if rewards:
                yield from ((call, fmean(rewards) > mean) for call in _calls_of(episode))


def _by_outcome(episodes: Sequence[tuple[Episode, float | None]], mean: float) -> Iterable[Counts]:
    """Yield the scored episodes with a reward above the mean, and the others, by their number of calls."""
    strata: dict[int, dict[bool, list[int]]] = defaultdict(lambda: {True: [0, 0], False: [0, 0]})
    for episode, reward in episodes:
        if reward is not None:
            counts = strata[len(episode.calls)][reward > mean]
            counts[0] += bool(episode.until_failure)
            counts[1] += 1
    return (Counts(*counts[True], *counts[False]) for counts in strata.values())
