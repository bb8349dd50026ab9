"""The goals of the policies, and how far each is reached in a comparison: for `benchmarks/policies.py`.

    python benchmarks/goals.py [docs/simulations.md] [--without code-7b-mixed]

prints the means over the scenarios of what `policies.py` has written there, without some of them. Nothing is simulated.

a  against static co-located, later epochs: at least 1.5 times as fast at no more cost; at least 55 % cheaper in no
   more time
b  at least 80 % of the gap between the best static fleet in hindsight and the clairvoyant
c  at least 15 % cheaper than RLHFless as published, at the same deadline
d  at most 5 % regret against the oracle that knows each prompt's distribution of lengths
e  deadlines of 1.1, 1.25 and 1.5 times the clairvoyant's best time kept in at least 70, 95 and 99 % of the steps

b and d are judged by cost under the contract that is at hand with a static fleet: no slower than it, over
the run. All policies of a scenario work under it, but for those whose goal is about another one.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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

WEAK_STATIC = "code-7b-mixed"
"""A static fleet uses its two kinds of devices alike, so what is gained over that one says little of other fleets."""

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
    """`captured` over the whole run, which the contract is about: a policy that learns lengths in the first epoch has
    less of the time left for later ones than one that knows them."""
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


@dataclass(frozen=True, slots=True)
class Recorded:
    """A row of the table of goals that `policies.py` writes, as rounded there."""

    scenario: str
    figures: tuple[float | None, ...]
    """The first number of each column; None where there is none."""

    def ratio(self, column: int, *, saved: bool) -> float:
        """A factor; of a share that is saved, what is left."""
        figure = self.figures[column]
        assert figure is not None  # only shares of a gap may be missing
        return 1 - figure / 100 if saved else figure


def recorded(text: str) -> list[Recorded]:
    """The rows of the table under "Goals". Raises ValueError if there is none."""
    table = [line for line in text.partition("## Goals")[2].partition("\n## ")[0].splitlines() if line.startswith("| ")]
    if len(table) < 3:
        raise ValueError("no table of goals; give a file that `benchmarks/policies.py --markdown` has written")
    rows = []
    for line in table[2:]:
        scenario, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        numbers = (re.match(r"-?[0-9.]+", cell) for cell in cells)
        rows.append(Recorded(scenario, tuple(float(number[0]) if number else None for number in numbers)))
    return rows


def recorded_means(rows: Sequence[Recorded]) -> str:
    """What `policies.py` says of them, from rounded figures."""

    def times(column: int) -> float:
        return geometric_mean([row.ratio(column, saved=False) for row in rows]).mean

    def saved(column: int) -> float:
        return 100 * (1 - geometric_mean([row.ratio(column, saved=True) for row in rows]).mean)

    def mean(column: int) -> float:
        figures = [figure for row in rows if (figure := row.figures[column]) is not None]
        return sum(figures) / max(len(figures), 1)

    kept = ", ".join(f"{mean(10 + at):.0f}% at {factor:g}x" for at, factor in enumerate(DEADLINES))
    return (
        f"Over {len(rows)} scenarios: a, {times(1):.2f}x as fast at no more cost (the clairvoyant, at any cost, "
        f"{times(2):.2f}x), and {saved(3):.0f}% cheaper in no more time (the clairvoyant {saved(4):.0f}%); b, "
        f"{mean(5):.0f}% of the gap captured where there is one (with each prompt's distribution known: "
        f"{mean(6):.0f}%); c, {saved(7):.0f}% cheaper than RLHFless as published (the clairvoyant {saved(8):.0f}%); d, "
        f"{mean(9):.1f}% regret; e, deadlines kept in {kept}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, default=Path(__file__).parents[1] / "docs" / "simulations.md")
    parser.add_argument("--without", nargs="*", default=[], help="names of scenarios")
    arguments = parser.parse_args()
    rows = recorded(arguments.file.read_text("utf-8"))
    unknown = set(arguments.without) - {row.scenario for row in rows}
    if unknown:
        parser.error(f"--without: {', '.join(sorted(unknown))}: not in {arguments.file}")
    print(recorded_means([row for row in rows if row.scenario not in arguments.without]))


if __name__ == "__main__":
    main()
