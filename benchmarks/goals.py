"""The goals of the policies, and how far each is reached in a comparison: for `benchmarks/policies.py`.

a  against static co-located, later epochs: at least 1.5 times as fast at no more cost; at least 55 % cheaper in no
   more time
b  at least 80 % of the gap between the best static fleet in hindsight and the clairvoyant
c  at least 15 % cheaper than RLHFless as published, at the same deadline
d  at most 5 % regret against the oracle that knows each prompt's distribution of lengths
e  deadlines of 1.1, 1.25 and 1.5 times the clairvoyant's best time kept in at least 70, 95 and 99 % of the steps

b and d are judged by cost under the contract that is at hand for whoever has a static fleet: no slower than it, over
the run. All policies of a scenario work under it, but for those whose goal is about another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlhfless.sim.experiment.compare import Comparison, quoted_part
from rlhfless.sim.experiment.rows import Part, Totals
from rlhfless.sim.experiment.statistics import Interval, mean_interval, ratio_interval
from rlhfless.sim.scenarios.scenario import (
    CheapestContract,
    FastestContract,
    MultipleOf,
    PolicyEntry,
    Scenario,
    WeightedContract,
)

OURS, PUBLISHED, STATIC = "cost_aware", "rlhfless_published", "static_colocated"
BEST_STATIC, ORACLE, CLAIRVOYANT = "best_static", "distribution_oracle", "clairvoyant"

FASTER, AS_FAST = "ours, static's budget", "ours, RLHFless's time"
AS_FAST_BOUND = "clairvoyant, RLHFless's time"
FASTEST = "clairvoyant, fastest"
DEADLINES = {1.1: 0.70, 1.25: 0.95, 1.5: 0.99}
"""Times the clairvoyant's best time, and the share of steps that must keep it."""

FACTOR, SAVING, CAPTURED, CHEAPER_THAN_PUBLISHED, REGRET = 1.5, 0.55, 0.80, 0.15, 0.05


def with_goals(scenario: Scenario) -> Scenario:
    """The scenario with an entry for each contract that a goal is about."""

    def by(policy: str, times: float = 1.0) -> MultipleOf:
        return MultipleOf(times=times, policy=policy)

    def ours(label: str, contract: CheapestContract | FastestContract) -> PolicyEntry:
        return PolicyEntry(name=OURS, label=label, contract=contract)

    entries = [
        *scenario.policies,
        ours(FASTER, FastestContract(budget=by(STATIC), per="run")),
        ours(AS_FAST, CheapestContract(deadline=by(PUBLISHED), per="run")),
        PolicyEntry(
            name=CLAIRVOYANT,
            label=AS_FAST_BOUND,
            contract=CheapestContract(deadline=by(PUBLISHED), per="run"),
        ),
        PolicyEntry(name=CLAIRVOYANT, label=FASTEST, contract=WeightedContract(time_weight=1.0)),
        *(ours(kept_label(times), CheapestContract(deadline=by(FASTEST, times))) for times in DEADLINES),
    ]
    no_slower = CheapestContract(deadline=by(STATIC), per="run")
    return scenario.model_copy(update={"policies": tuple(entries), "contract": no_slower})


def kept_label(times: float) -> str:
    """Of the entry with this deadline."""
    return f"ours, {times:g} x the best time"


@dataclass(frozen=True, slots=True)
class Goals:
    """One scenario, by later epochs."""

    scenario: str
    generation_share: float
    """Of the static fleet's step. Nothing that only changes generation can be faster than 1 / (1 - share) times, or
    save more than the share."""
    faster: Interval
    faster_cost: Interval
    """By the static fleet's."""
    fastest: Interval
    """How much faster the clairvoyant is than the static fleet, whatever it costs: what forbids more."""
    saving: Interval
    saving_time: Interval
    most_saved: Interval
    """What the clairvoyant saves."""
    captured: Interval | None
    """None where the clairvoyant is no better than the best static fleet."""
    most_captured: Interval | None
    """What the oracle captures that knows each prompt's distribution: what chance alone leaves of the gap."""
    cheaper_than_published: Interval
    cheaper_time: Interval
    cheapest_in_its_time: Interval
    """How much cheaper than it the clairvoyant is in its time: what forbids more."""
    regret: Interval
    regret_time: Interval
    """By the oracle's."""
    captured_run: float | None
    """`captured` over the whole run, which the contract is about: who learns lengths in the first epoch has less of the
    time left for later ones than those who know them."""
    regret_run: float
    kept: dict[float, Interval]
    published_speed_up: Interval
    """RLHFless as published, against the static fleet."""
    published_saving: Interval


def goals_of(found: Comparison) -> Goals:
    """All goals of a comparison `with_goals`."""
    part = quoted_part(found.scenario)

    def totals(label: str, part: Part = part) -> list[Totals]:
        return found.totals(label, part)

    def times(label: str, other: str) -> Interval:
        return ratio_interval([run.time_s for run in totals(label)], [run.time_s for run in totals(other)])

    def costs(label: str, other: str) -> Interval:
        return ratio_interval([run.usd for run in totals(label)], [run.usd for run in totals(other)])

    def kept(label: str) -> Interval:
        return mean_interval([run.kept for run in totals(label) if run.kept is not None])

    steps = [step for run in found.results[STATIC] for step in run.steps[found.scenario.epoch_steps :]]
    in_run = _captured(totals(BEST_STATIC, "all"), totals(OURS, "all"), totals(CLAIRVOYANT, "all"))
    return Goals(
        scenario=found.scenario.name,
        generation_share=sum(step.generation_s for step in steps) / sum(step.time_s for step in steps),
        faster=times(STATIC, FASTER),
        faster_cost=costs(FASTER, STATIC),
        fastest=times(STATIC, FASTEST),
        saving=less(costs(OURS, STATIC)),
        saving_time=times(OURS, STATIC),
        most_saved=less(costs(CLAIRVOYANT, STATIC)),
        captured=_captured(totals(BEST_STATIC), totals(OURS), totals(CLAIRVOYANT)),
        most_captured=_captured(totals(BEST_STATIC), totals(ORACLE), totals(CLAIRVOYANT)),
        cheaper_than_published=less(costs(AS_FAST, PUBLISHED)),
        cheaper_time=times(AS_FAST, PUBLISHED),
        cheapest_in_its_time=less(costs(AS_FAST_BOUND, PUBLISHED)),
        regret=mean_interval(_regrets(totals(OURS), totals(ORACLE))),
        regret_time=times(OURS, ORACLE),
        captured_run=None if in_run is None else in_run.mean,
        regret_run=mean_interval(_regrets(totals(OURS, "all"), totals(ORACLE, "all"))).mean,
        kept={factor: kept(kept_label(factor)) for factor in DEADLINES},
        published_speed_up=times(STATIC, PUBLISHED),
        published_saving=less(costs(PUBLISHED, STATIC)),
    )


def less(ratio: Interval) -> Interval:
    """A ratio of costs as the share that is saved."""
    return Interval(1 - ratio.mean, 1 - ratio.high, 1 - ratio.low)


def geometric_mean(ratios: Sequence[float]) -> Interval:
    """Over scenarios, with the interval of such a mean."""
    return ratio_interval(ratios, [1.0] * len(ratios))


def _regrets(ours: Sequence[Totals], best: Sequence[Totals]) -> list[float]:
    return [mine.usd / other.usd - 1 for mine, other in zip(ours, best, strict=True)]


def _captured(static: Sequence[Totals], ours: Sequence[Totals], bound: Sequence[Totals]) -> Interval | None:
    gaps = [run.usd - best.usd for run, best in zip(static, bound, strict=True)]
    left = [run.usd - best.usd for run, best in zip(ours, bound, strict=True)]
    if min(gaps) <= 0:
        return None
    return mean_interval([1 - mine / gap for mine, gap in zip(left, gaps, strict=True)])
