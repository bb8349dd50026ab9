"""All policies over the published set of scenarios, and the goals that they are judged by (`goals.py`).

    python benchmarks/policies.py [--quick] [--smoke] [--seeds 4] [--jobs 2] [--markdown docs/simulations.md] \
        [SCENARIO ...]

Every result is printed, good and bad, with 95 % confidence intervals over the seeds; `--markdown` writes the same for
the documentation. `--quick` takes four of the scenarios, two seeds and two epochs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from goals import (
    CAPTURED,
    CHEAPER_THAN_PUBLISHED,
    DEADLINES,
    FACTOR,
    REGRET,
    SAVING,
    WEAK_STATIC,
    Goals,
    geometric_mean,
    goals_of,
    with_goals,
)
from smoke import parsed
from where import machine

from rlhfless.sim.experiment.compare import Comparison, compare, quoted_part
from rlhfless.sim.experiment.statistics import Interval
from rlhfless.sim.report.columns import COLUMNS
from rlhfless.sim.report.words import PARTS
from rlhfless.sim.scenarios import Scenario, load_scenario

FOLDER = Path(__file__).parents[1] / "examples" / "scenarios"
QUICK = ("paper-3b-l40s", "gsm8k-7b-h100-owned", "code-70b-h200", "reasoning-7b-a100")
SMALLEST = "gsm8k-3b-h100"
SMALLEST_PROMPTS = 8
PUBLISHED = "1.35 times as fast and 44.8 % cheaper than verl (arXiv 2602.22718, up to; of both, which run is not said)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="*", help="names; all of examples/scenarios when left out")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--markdown", type=Path)
    arguments = parsed(parser, scenarios=[SMALLEST], seeds=1)
    names = arguments.scenarios or (QUICK if arguments.quick else [path.stem for path in sorted(FOLDER.glob("*.yaml"))])
    seeds = 2 if arguments.quick else arguments.seeds
    begun_s = time.monotonic()
    found = [run(name, seeds, arguments.jobs, arguments.quick, arguments.smoke) for name in names]
    goals = [goals_of(each) for each in found]
    text = "\n".join([*head(found, time.monotonic() - begun_s), *goals_text(goals), *tables(found)])
    print(text)
    if arguments.markdown:
        arguments.markdown.write_text(text + "\n", "utf-8")


def run(name: str, seeds: int, jobs: int, quick: bool, smoke: bool) -> Comparison:
    """One scenario, with the entries of all goals."""
    scenario = load_scenario(FOLDER / f"{name}.yaml")
    if smoke:
        few = scenario.workload.model_copy(update={"prompts": SMALLEST_PROMPTS})
        scenario = scenario.model_copy(update={"workload": few, "prompts_per_step": SMALLEST_PROMPTS, "steps": 2})
    steps = min(scenario.steps, 2 * scenario.epoch_steps) if quick else scenario.steps
    begun_s = time.monotonic()
    found = compare(with_goals(scenario.model_copy(update={"seeds": seeds, "steps": steps})), jobs=jobs)
    print(f"{name}: {time.monotonic() - begun_s:.0f} s", file=sys.stderr)
    return found


def head(found: Sequence[Comparison], spent_s: float) -> list[str]:
    first = found[0].scenario
    return [
        "# Policies, simulated",
        "",
        "Written by `python benchmarks/policies.py`; nothing here was measured on devices. Means over "
        f"{first.seeds} seeds with 95 % confidence intervals, of the epochs after the first. `docs/simulate.md` says "
        f"what the simulator models; the scenarios are in `examples/scenarios/`. All policies work under one contract: "
        f"as cheap as can be, no slower than static co-located. Billing is "
        f"per second, without a minimum. {spent_s / 60:.0f} minutes on {machine()}.",
        "",
    ]


def goals_text(goals: Sequence[Goals]) -> list[str]:
    """One table: a row per scenario, a column per goal; then the means over all."""
    titles = [
        "scenario",
        "generation's share of the static step",
        f"a: faster, >= {FACTOR:g}x",
        "its bound: the clairvoyant, at any cost",
        f"a: cheaper, >= {SAVING:.0%}",
        "its bound: the clairvoyant",
        f"b: gap captured, >= {CAPTURED:.0%}",
        "its bound: each prompt's distribution is known",
        f"c: cheaper than RLHFless, >= {CHEAPER_THAN_PUBLISHED:.0%}",
        "its bound: the clairvoyant",
        f"d: regret, <= {REGRET:.0%}",
        *(f"e: {times:g}x kept, >= {share:.0%}" for times, share in DEADLINES.items()),
    ]
    lines = ["## Goals", "", row(titles), row(["---"] * len(titles))]
    for each in goals:
        cells = [
            each.scenario,
            f"{each.generation_share:.0%}",
            f"{factor(each.faster)}; cost {each.faster_cost.mean:.2f}x",
            f"{each.fastest.mean:.2f}x",
            f"{percent(each.saving)}; time {each.saving_time.mean:.2f}x",
            f"{each.most_saved.mean:.0%}",
            "no gap" if each.captured is None else percent(each.captured),
            "-" if each.most_captured is None else f"{each.most_captured.mean:.0%}",
            f"{percent(each.cheaper_than_published)}; time {each.cheaper_time.mean:.2f}x",
            f"{each.cheapest_in_its_time.mean:.0%}",
            f"{percent(each.regret)}; time {each.regret_time.mean:.2f}x",
            *(percent(each.kept[times]) for times in DEADLINES),
        ]
        lines.append(row(cells))
    return [*lines, "", *means(goals), "", *means_without_weak(goals), *paper(goals), ""]


def means(goals: Sequence[Goals]) -> list[str]:
    """Over the scenarios; of costs and times geometric ones."""

    faster = geometric_mean([each.faster.mean for each in goals])
    saving = geometric_mean([1 - each.saving.mean for each in goals])
    published = geometric_mean([1 - each.cheaper_than_published.mean for each in goals])
    possible = geometric_mean([1 - each.cheapest_in_its_time.mean for each in goals])
    gaps = [each.captured.mean for each in goals if each.captured is not None]
    chances = [each.most_captured.mean for each in goals if each.most_captured is not None]
    fastest = geometric_mean([each.fastest.mean for each in goals])
    most = geometric_mean([1 - each.most_saved.mean for each in goals])
    kept = [sum(each.kept[times].mean for each in goals) / len(goals) for times in DEADLINES]
    shares = ", ".join(f"{share:.0%} at {times:g}x" for times, share in zip(DEADLINES, kept, strict=True))
    regret = sum(each.regret.mean for each in goals) / len(goals)
    regret_run = sum(each.regret_run for each in goals) / len(goals)
    gaps_run = [each.captured_run for each in goals if each.captured_run is not None]
    return [
        f"Over {len(goals)} scenarios: a, {factor(faster)} as fast at no more cost (the clairvoyant, at any cost, "
        f"{fastest.mean:.2f}x), and {1 - saving.mean:.0%} cheaper in no more time (the clairvoyant "
        f"{1 - most.mean:.0%}); b, "
        f"{sum(gaps) / max(len(gaps), 1):.0%} of the gap captured where there is one (with each prompt's "
        f"distribution: {sum(chances) / max(len(chances), 1):.0%}); c, {1 - published.mean:.0%} "
        f"cheaper than RLHFless as published (the clairvoyant {1 - possible.mean:.0%}); d, {regret:.1%} "
        f"regret; e, deadlines kept in {shares}.",
        "",
        f"Over whole runs, first epochs included, which the contract is about: b, "
        f"{sum(gaps_run) / max(len(gaps_run), 1):.0%}; d, {regret_run:.1%}.",
    ]


def means_without_weak(goals: Sequence[Goals]) -> list[str]:
    """The first of the means, without the scenario whose static fleet is weak."""
    rest = [each for each in goals if each.scenario != WEAK_STATIC]
    return (
        [f"Without `{WEAK_STATIC}`, whose static fleet is weak:", "", means(rest)[0], ""]
        if 0 < len(rest) < len(goals)
        else []
    )


def paper(goals: Sequence[Goals]) -> list[str]:
    """The scenario of the paper beside what it has published."""
    lines = []
    for each in goals:
        if each.scenario.startswith("paper-"):
            lines.append(
                f"`{each.scenario}`: RLHFless as published is {factor(each.published_speed_up)} as fast as static "
                f"co-located and {percent(each.published_saving)} cheaper here; published: {PUBLISHED}."
            )
    return lines


def tables(found: Sequence[Comparison]) -> list[str]:
    """Every policy of every scenario."""
    lines = ["## All results", ""]
    for comparison in found:
        lines += [f"### {comparison.scenario.name}", "", described(comparison.scenario), ""]
        lines += [
            row(["policy", *(f"{each.title}, {each.unit}" for each in COLUMNS)]),
            row(["---"] * (len(COLUMNS) + 1)),
        ]
        for each in comparison.rows(quoted_part(comparison.scenario)):
            lines.append(row([each.label, *(f"{column.text(each)} {column.half(each)}".strip() for column in COLUMNS)]))
        lines.append("")
    return lines


def described(scenario: Scenario) -> str:
    per_step = f"{scenario.prompts_per_step} x {scenario.samples_per_prompt} responses a step"
    return f"{scenario.description.strip()} {per_step}; {PARTS[quoted_part(scenario)]} of {scenario.steps} steps."


def row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def factor(interval: Interval) -> str:
    return f"{interval.mean:.2f}x ({interval.low:.2f} to {interval.high:.2f})"


def percent(interval: Interval) -> str:
    return f"{100 * interval.mean:.0f} % ({100 * interval.low:.0f} to {100 * interval.high:.0f})"


if __name__ == "__main__":
    main()
