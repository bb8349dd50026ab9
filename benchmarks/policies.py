"""All policies over the published set of scenarios, and the goals that they are judged by (`goals.py`).

    python benchmarks/policies.py [--quick] [--smoke] [--seeds 4] [--jobs 2] [--markdown docs/simulations.md] \
        [SCENARIO ...]

Every result is printed, good and bad, with 95 % confidence intervals over the seeds; `--markdown` writes the same for
the documentation. `--quick` takes four of the scenarios, two seeds and two epochs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from billings import NAMES, Paid, paid
from goals import (
    CHEAPER_THAN_PUBLISHED,
    DEADLINES,
    LAMBDAS,
    REGRET,
    SHARE,
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
    ways = {each.scenario.name: paid(each.scenario) for each in found}
    short = "\n".join([*head(found, time.monotonic() - begun_s), *paid_text(ways), *goals_text(goals)])
    full = "\n".join(tables(found))
    print(short, full, sep="\n")
    if arguments.markdown:
        arguments.markdown.write_text(short + "\n", "utf-8")
        arguments.markdown.with_stem(f"{arguments.markdown.stem}-full").write_text(full + "\n", "utf-8")
    beaten = [text for each in goals for text in each.beaten]
    if beaten := [*beaten, *(text for each in ways.values() for one in each.values() for text in one.beaten)]:
        print("below the lower bound, so the bound or the simulator is wrong:", *beaten, sep="\n", file=sys.stderr)
        sys.exit(1)


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
        "what the simulator models, `simulations-full.md` has every policy of every scenario; the scenarios are in "
        "`examples/scenarios/`. All policies work under one contract: as cheap as can be, in each epoch no slower than "
        "static co-located. But for the first tables, billing is "
        f"per second, without a minimum. {spent_s / 60:.0f} minutes on {machine()}.",
        "",
    ]


def paid_text(ways: Mapping[str, Mapping[str, Paid]]) -> list[str]:
    """What scaling alone gives over whole runs by the way to pay: medians, and each scenario."""
    titles = ["scenario", *(f"{name}: cheaper, no slower; faster, no dearer" for name in NAMES)]
    lines = [
        "## What scaling alone gives",
        "",
        "| devices are paid for | cheaper in static's time | faster for its cost |",
    ]
    lines.append(row(["---"] * 3))
    for name in NAMES:
        found = [each[name] for each in ways.values()]
        saved = [100 * (1 - each.saving_ratio.mean) for each in found]
        faster = [each.fastest.mean for each in found]
        saved_text = f"{statistics.median(saved):.0f} % ({min(saved):.0f} to {max(saved):.0f})"
        lines.append(
            row([name, saved_text, f"{statistics.median(faster):.2f}x ({min(faster):.2f} to {max(faster):.2f})"])
        )
    worse = [f"`{scenario}` ({name})" for scenario, each in ways.items() for name in NAMES if each[name].worse]
    told = (
        f"Worse than static by more than 0.5 %: {', '.join(worse)}." if worse else "Never worse than static by 0.5 %."
    )
    lines += [
        "",
        f"Medians of {len(ways)} scenarios against static co-located with the same engine, learner and devices, whole "
        "runs with the first epoch; in brackets the worst and the best. `benchmarks/billings.py` says what the ways "
        f"are. {told}",
        "",
        row(titles),
        row(["---"] * len(titles)),
    ]
    for scenario, each in ways.items():
        cells = [
            f"{1 - one.saving_ratio.mean:.1%}, time {1 / one.saving_speed_up.mean:.3f}x; {one.fastest.mean:.3f}x, cost "
            f"{one.fastest_ratio.mean:.3f}x"
            for one in each.values()
        ]
        lines.append(row([scenario, *cells]))
    return [*lines, ""]


def goals_text(goals: Sequence[Goals]) -> list[str]:
    """A table with a row per scenario, and what it comes to; the comparison with RLHFless as published; the reasons of
    goals that were missed."""
    titles = [
        "scenario",
        "generation's share of the static step",
        "a: faster, for static's cost",
        "the bound",
        f"share, >= {SHARE:.0%}",
        "b: cheaper, in static's time",
        "the bound",
        f"share, >= {SHARE:.0%}",
        "the clairvoyant's share",
        f"d: regret, <= {REGRET:.0%}",
        *(f"e: {times:g}x kept, >= {share:.0%}" for times, share in DEADLINES.items()),
    ]
    lines = ["## Goals", "", row(titles), row(["---"] * len(titles))]
    for each in goals:
        cells = [
            f"{each.scenario}{' (owned)' if each.owned else ''}",
            f"{each.generation_share:.0%}",
            f"{factor(each.faster)}; cost {each.faster_cost.mean:.2f}x",
            f"{each.fastest.mean:.2f}x",
            percent(each.faster_share),
            f"{percent(each.saving)}; time {each.saving_time.mean:.2f}x",
            f"{each.most_saved.mean:.0%}",
            percent(each.saving_share),
            f"{each.foresight_share.mean:.0%}",
            f"{percent(each.regret)}; time {each.regret_time.mean:.2f}x",
            *(percent(each.kept[times]) for times in DEADLINES),
        ]
        lines.append(row(cells))
    lines += ["", *summed("Rented and spot devices", [each for each in goals if not each.owned])]
    lines += summed("Owned devices", [each for each in goals if each.owned])
    return [*lines, *missed(goals), *published(goals), ""]


def summed(title: str, goals: Sequence[Goals]) -> list[str]:
    """Medians and means over scenarios; means of ratios are geometric."""
    if not goals:
        return []

    def both(values: Sequence[float]) -> tuple[float, float]:
        return statistics.median(values), geometric_mean(values).mean

    faster, fastest = both([each.faster.mean for each in goals]), both([each.fastest.mean for each in goals])
    left, least = both([1 - each.saving.mean for each in goals]), both([1 - each.most_saved.mean for each in goals])
    shares = [
        statistics.median([getattr(each, name).mean for each in goals]) for name in ("faster_share", "saving_share")
    ]
    kept = [sum(each.kept[times].mean for each in goals) / len(goals) for times in DEADLINES]
    kept_text = ", ".join(f"{share:.0%} at {times:g}x" for times, share in zip(DEADLINES, kept, strict=True))
    return [
        f"{title}, median (mean) of {len(goals)} scenarios: a, {faster[0]:.2f}x ({faster[1]:.2f}x) as fast for "
        f"static's cost, where the bound is {fastest[0]:.2f}x ({fastest[1]:.2f}x), a share of {shares[0]:.0%}; b, "
        f"{1 - left[0]:.0%} ({1 - left[1]:.0%}) cheaper in static's time, where the bound is {1 - least[0]:.0%} "
        f"({1 - least[1]:.0%}), a share of {shares[1]:.0%}; d, regret "
        f"{statistics.median([each.regret.mean for each in goals]):.1%}; e, deadlines kept in {kept_text}.",
        "",
    ]


def missed(goals: Sequence[Goals]) -> list[str]:
    """Why the share of saved cost is below the goal, scenario by scenario."""
    lines = [f"- `{each.scenario}`, {each.saving_share.mean:.0%}: {each.why}." for each in goals if each.why]
    return [f"Shares of saved cost below {SHARE:.0%}, and where the rest is:", "", *lines, ""] if lines else []


def published(goals: Sequence[Goals]) -> list[str]:
    """RLHFless as published, by lambda: its point against static, and ours step by step in its time."""
    titles = ["scenario"]
    for weight in LAMBDAS:
        titles += [
            f"RLHFless, lambda {weight:g}: speed-up; cheaper than static",
            f"ours in its time: cheaper than it, >= {CHEAPER_THAN_PUBLISHED:.0%}",
        ]
    lines = ["### c: RLHFless as published", "", row(titles), row(["---"] * len(titles))]
    for each in goals:
        cells = [each.scenario]
        for beside in each.published.values():
            cells += [
                f"{beside.speed_up.mean:.2f}x; {beside.saving.mean:.0%}",
                f"{percent(beside.cheaper)}; time {beside.ours_time.mean:.2f}x",
            ]
        lines.append(row(cells))
    found = [
        f"{statistics.median([each.published[weight].cheaper.mean for each in goals]):.0%} at lambda {weight:g}"
        for weight in LAMBDAS
    ]
    return [*lines, "", f"Median: {', '.join(found)}. Its paper: {PUBLISHED}.", ""]


def tables(found: Sequence[Comparison]) -> list[str]:
    """Every policy of every scenario."""
    lines = ["# All results of the simulated policies", "", "Written by `python benchmarks/policies.py`.", ""]
    for comparison in found:
        lines += [f"## {comparison.scenario.name}", "", described(comparison.scenario), ""]
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
