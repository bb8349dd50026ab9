"""The goals of the policies, and how far each is reached in a comparison: for `benchmarks/policies.py`.

a  faster: the share of the time between static co-located and the lower bound that is saved for no more money, >= 80 %
b  cheaper: the share of the cost between them that is saved in no more time, >= 80 %
c  at least 15 % cheaper than RLHFless as published, step by step in its time, for every lambda; and no point of its
   front (over lambda) that no run of ours is left below and beside
d  at most 5 % regret against the oracle that knows each prompt's distribution of lengths
e  deadlines of 1.1, 1.25 and 1.5 times the clairvoyant's best time kept in at least 70, 95 and 99 % of the steps

The lower bound (`step_bound`) is of the same fleet under the same contract, and no policy is
below it. All figures are of later epochs. a is about time under static's cost in the same epoch, b and d about cost
under the contract that is at hand with a static fleet: no slower than it in the same epoch. Where a run took longer, or
cost more, than the static one, the bound is given as much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum

from against_bound import RunBounds
from step_bound import TradeOff

from rlhfless.sim.experiment.compare import PolicyComparison, quoted_part
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
ORACLE, CLAIRVOYANT = "distribution_oracle", "clairvoyant"

FASTER, FASTEST = "ours, static's budget", "clairvoyant, fastest"
DEADLINES = {1.1: 0.70, 1.25: 0.95, 1.5: 0.99}
"""Times the clairvoyant's best time, and the share of steps that must keep it."""

LAMBDAS = (0.2, 0.5, 0.65, 0.8, 0.9, 1.0)
"""RLHFless's weight of time against cost, which its paper does not give."""

FRONT_WEIGHTS = (0.9, 0.75, 0.5)
"""Weights of ours, for its own front."""

NO_SLOWER = 1.005
"""Times this close are equal."""

NO_GAP = 1.01
"""Static is as good as the bound below this ratio: the share of so little would be noise."""

SHARE, CHEAPER_THAN_PUBLISHED, REGRET = 0.80, 0.15, 0.05


def with_goals(scenario: Scenario) -> Scenario:
    """The scenario with an entry for each contract that a goal is about."""

    def by(policy: str, times: float = 1.0) -> MultipleOf:
        return MultipleOf(times=times, policy=policy)

    def ours(label: str, contract: CheapestContract | FastestContract) -> PolicyEntry:
        return PolicyEntry(name=OURS, label=label, contract=contract)

    entries = [
        *scenario.policies,
        ours(FASTER, FastestContract(budget=by(STATIC), per="epoch")),
        PolicyEntry(name=CLAIRVOYANT, label=FASTEST, contract=WeightedContract(time_weight=1.0)),
        *(ours(kept_label(times), CheapestContract(deadline=by(FASTEST, times))) for times in DEADLINES),
    ]
    for weight in LAMBDAS:
        entries += [
            PolicyEntry(name=PUBLISHED, label=published_label(weight), settings={"time_weight": weight}),
            ours(as_fast_label(weight), CheapestContract(deadline=by(published_label(weight)))),
            ours(
                f"{as_fast_label(weight)}, per epoch",
                CheapestContract(deadline=by(published_label(weight)), per="epoch"),
            ),
        ]
    for weight in FRONT_WEIGHTS:
        entries.append(ours(f"ours, time_weight {weight:g}", WeightedContract(time_weight=weight)))
    no_slower = CheapestContract(deadline=by(STATIC), per="epoch")
    return scenario.model_copy(update={"policies": tuple(entries), "contract": no_slower})


def kept_label(times: float) -> str:
    """Of the entry with this deadline."""
    return f"ours, {times:g} x the best time"


def published_label(weight: float) -> str:
    """Of RLHFless as published with this lambda."""
    return f"{PUBLISHED}, lambda {weight:g}"


def as_fast_label(weight: float) -> str:
    """Of ours in its time."""
    return f"ours, in its time at lambda {weight:g}"


@dataclass(frozen=True, slots=True)
class BesidePublished:
    """Ours and RLHFless as published with one lambda."""

    speed_up: Interval
    """Of RLHFless, against static."""
    saving: Interval
    """Of RLHFless, against static."""
    ours_time: Interval
    """Of ours in its time, by its time."""
    cheaper: Interval
    """Ours, than it."""
    on_front: bool
    """Whether no other lambda is both faster and cheaper."""
    front_cheaper: Interval
    """Of all runs of ours under any contract that take no longer: the cheapest, than it."""

    @property
    def beaten(self) -> bool:
        """Whether a run of ours is no slower and cheaper."""
        return max(self.front_cheaper.mean, self.cheaper.mean * (self.ours_time.mean <= NO_SLOWER)) > 0


@dataclass(frozen=True, slots=True)
class Goals:
    """One scenario, by later epochs."""

    scenario: str
    owned: bool
    """Whether its devices are owned, so that time costs even if nothing is held."""
    generation_share: float
    """Of the static fleet's step. Nothing that only changes generation can be faster than 1 / (1 - share) times, or
    save more than the share."""
    faster: Interval
    faster_cost: Interval
    """By the static fleet's."""
    fastest: Interval
    """How much faster than static the lower bound is for static's cost."""
    faster_share: Interval
    saving: Interval
    saving_time: Interval
    most_saved: Interval
    """What the lower bound saves."""
    saving_share: Interval
    forecast_share: Interval
    """The same of the oracle, which plans by the same rules and knows each prompt's distribution of lengths."""
    foresight_share: Interval
    """The same of the clairvoyant, which knows each length."""
    starts_share: float
    """Of what lies between static and the bound: what the clairvoyant pays for starts and loads."""
    idle_share: float
    """And for replicas that hold devices and do nothing."""
    published: dict[float, BesidePublished]
    """By lambda."""
    regret: Interval
    regret_time: Interval
    """By the oracle's."""
    kept: dict[float, Interval]
    beaten: tuple[str, ...]
    """Runs that are below their lower bound."""

    @property
    def why(self) -> str:
        """Where the rest of a share of saved cost below the goal is, the largest part first."""
        if self.saving_share.mean >= SHARE:
            return ""
        known = self.foresight_share.mean
        parts = {
            "forecasts of each prompt's lengths": self.forecast_share.mean - self.saving_share.mean,
            "chance within a prompt": known - self.forecast_share.mean,
            "starts and loads": self.starts_share,
            "idle devices": self.idle_share,
            "rules, whole actors, or a bound too low": 1 - known - self.starts_share - self.idle_share,
        }
        told = sorted(parts.items(), key=lambda part: -part[1])
        return "; ".join(f"{name} {percent_of(share)}" for name, share in told)


def percent_of(share: float) -> str:
    return f"{100 * share:.0f} %"


def goals_of(found: PolicyComparison) -> Goals:
    """All goals of a comparison `with_goals`."""
    part, bounds = quoted_part(found.scenario), RunBounds(found.scenario)

    def totals(label: str) -> list[Totals]:
        return found.totals(label, part)

    def times(label: str, other: str) -> Interval:
        return ratio_interval([run.time_s for run in totals(label)], [run.time_s for run in totals(other)])

    def costs(label: str, other: str) -> Interval:
        return ratio_interval([run.usd for run in totals(label)], [run.usd for run in totals(other)])

    def kept(label: str) -> Interval:
        return mean_interval([run.kept for run in totals(label) if run.kept is not None])

    steps = [step for run in found.results[STATIC] for step in run.steps[found.scenario.epoch_steps :]]
    static, cheap, fast = totals(STATIC), totals(OURS), totals(FASTER)
    below = [bounds.trade_off(run.fleet, run.seed, part) for run in found.results[OURS]]
    least_usd, least_s = _least_usd(below, static, cheap), _least_s(below, static, fast)
    foreseen, known = totals(CLAIRVOYANT), totals(ORACLE)
    gap_usd = fsum(max(a.usd - b, 0.0) for a, b in zip(static, _least_usd(below, static, foreseen), strict=True))
    return Goals(
        scenario=found.scenario.name,
        owned=any(machines.tenure == "owned" for machines in found.scenario.cluster.machines),
        generation_share=sum(step.generation_s for step in steps) / sum(step.time_s for step in steps),
        faster=times(STATIC, FASTER),
        faster_cost=costs(FASTER, STATIC),
        fastest=ratio_interval([run.time_s for run in static], least_s),
        faster_share=_share([run.time_s for run in static], [run.time_s for run in fast], least_s),
        saving=less(costs(OURS, STATIC)),
        saving_time=times(OURS, STATIC),
        most_saved=less(ratio_interval(least_usd, [run.usd for run in static])),
        saving_share=_share([run.usd for run in static], [run.usd for run in cheap], least_usd),
        foresight_share=_share(
            [run.usd for run in static], [run.usd for run in foreseen], _least_usd(below, static, foreseen)
        ),
        forecast_share=_share(
            [run.usd for run in static], [run.usd for run in known], _least_usd(below, static, known)
        ),
        starts_share=fsum(run.usd * run.cold_device_s / run.held_device_s for run in foreseen) / max(gap_usd, 1e-9),
        idle_share=fsum(run.usd * run.idle_device_s / run.held_device_s for run in foreseen) / max(gap_usd, 1e-9),
        published=_published(found, part),
        regret=mean_interval([a.usd / b.usd - 1 for a, b in zip(cheap, totals(ORACLE), strict=True)]),
        regret_time=times(OURS, ORACLE),
        kept={factor: kept(kept_label(factor)) for factor in DEADLINES},
        beaten=tuple(text for runs in found.results.values() for text in bounds.beaten(runs)),
    )


def _published(found: PolicyComparison, part: Part) -> dict[float, BesidePublished]:
    """By lambda."""
    runs = {label: found.totals(label, part) for label in found.results}

    def times(label: str, other: str) -> Interval:
        return ratio_interval([run.time_s for run in runs[label]], [run.time_s for run in runs[other]])

    def costs(label: str, other: str) -> Interval:
        return ratio_interval([run.usd for run in runs[label]], [run.usd for run in runs[other]])

    ours = [entry.shown for entry in found.scenario.policies if entry.name == OURS]
    its = {weight: published_label(weight) for weight in LAMBDAS}
    beside = {}
    for weight, label in its.items():
        others = [other for other in its.values() if other != label]
        no_slower = [mine for mine in ours if times(mine, label).mean <= NO_SLOWER]
        cheapest = min(no_slower, key=lambda mine: costs(mine, label).mean) if no_slower else as_fast_label(weight)
        beside[weight] = BesidePublished(
            speed_up=times(STATIC, label),
            saving=less(costs(label, STATIC)),
            ours_time=times(as_fast_label(weight), label),
            cheaper=less(costs(as_fast_label(weight), label)),
            on_front=not any(times(other, label).mean < 1 and costs(other, label).mean < 1 for other in others),
            front_cheaper=less(costs(cheapest, label)),
        )
    return beside


def less(ratio: Interval) -> Interval:
    """A ratio of costs as the share that is saved."""
    return Interval(1 - ratio.mean, 1 - ratio.high, 1 - ratio.low)


def geometric_mean(ratios: Sequence[float]) -> Interval:
    """Over scenarios, with the interval of such a mean."""
    return ratio_interval(ratios, [1.0] * len(ratios))


def _least_usd(below: Sequence[TradeOff], static: Sequence[Totals], ours: Sequence[Totals]) -> list[float]:
    """By seed: the least cost in static's time, or in that of ours if it took longer."""
    runs = zip(below, static, ours, strict=True)
    return [bound.least_usd(max(other.time_s, mine.time_s)) for bound, other, mine in runs]


def _least_s(below: Sequence[TradeOff], static: Sequence[Totals], ours: Sequence[Totals]) -> list[float]:
    """By seed: the least time for static's cost, or for that of ours if it cost more."""
    return [bound.least_s(max(other.usd, mine.usd)) for bound, other, mine in zip(below, static, ours, strict=True)]


def _share(static: Sequence[float], ours: Sequence[float], bound: Sequence[float]) -> Interval:
    """Of what lies between static and the bound: 1 where that is next to nothing."""
    runs = zip(static, ours, bound, strict=True)
    return mean_interval(
        [(other - mine) / (other - least) if other > least * NO_GAP else 1.0 for other, mine, least in runs]
    )
