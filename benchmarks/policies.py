"""All policies over the published set of scenarios, and the goals that they are judged by (`goals.py`).

    python benchmarks/policies.py [--quick] [--smoke] [--seeds 4] [--jobs 2] [--keep FOLDER] \
        [--markdown docs/simulations.md] [SCENARIO ...]

Every result is printed, good and bad, with 95 % confidence intervals over the seeds; `--markdown` writes the same for
the documentation. `--quick` takes four of the scenarios, two seeds and two epochs. `--keep` writes the figures of each
scenario to a folder, and reads those that are there: a run that was interrupted goes on. They are of the code that
wrote them, so give a new folder after a change.
"""

from __future__ import annotations

import argparse
import pickle
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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

from rlhfless.sim.experiment.compare import compare, quoted_part
from rlhfless.sim.experiment.rows import ResultRow
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
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--markdown", type=Path)
    arguments = parsed(parser, scenarios=[SMALLEST], seeds=1)
    names = arguments.scenarios or (QUICK if arguments.quick else [path.stem for path in sorted(FOLDER.glob("*.yaml"))])
    seeds = 2 if arguments.quick else arguments.seeds
    found = [kept(arguments.keep, name, seeds, arguments.jobs, arguments.quick, arguments.smoke) for name in names]
    goals = [each.goals for each in found]
    ways = {each.scenario.name: each.ways for each in found}
    short = "\n".join([*head(found), *paid_text(ways), *goals_text(goals), *published_text(goals)])
    full = "\n".join([*tables(found), *reasons_table(goals), *published_table(goals)])
    print(short, full, sep="\n")
    if arguments.markdown:
        arguments.markdown.write_text(short.rstrip() + "\n", "utf-8")
        arguments.markdown.with_stem(f"{arguments.markdown.stem}-full").write_text(full.rstrip() + "\n", "utf-8")
    beaten = [text for each in goals for text in each.beaten]
    if beaten := [*beaten, *(text for each in ways.values() for one in each.values() for text in one.beaten)]:
        print("below the lower bound, so the bound or the simulator is wrong:", *beaten, sep="\n", file=sys.stderr)
        sys.exit(1)


@dataclass(frozen=True)
class Found:
    """The figures of one scenario."""

    scenario: Scenario
    rows: list[ResultRow]
    goals: Goals
    ways: dict[str, Paid]
    spent_s: float
    """Seconds of processor, if one process did it."""


def kept(folder: Path | None, name: str, seeds: int, jobs: int, quick: bool, smoke: bool) -> Found:
    """What `run` finds, or found before."""
    if folder is None:
        return run(name, seeds, jobs, quick, smoke)
    path = folder / f"{name}-{seeds}.pickle"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_bytes(pickle.dumps(run(name, seeds, jobs, quick, smoke)))
        part.rename(path)
    found: Found = pickle.loads(path.read_bytes())
    return found


def run(name: str, seeds: int, jobs: int, quick: bool, smoke: bool) -> Found:
    """One scenario, with the entries of all goals, and under all ways to pay."""
    scenario = load_scenario(FOLDER / f"{name}.yaml")
    if smoke:
        few = scenario.workload.model_copy(update={"prompts": SMALLEST_PROMPTS})
        scenario = scenario.model_copy(update={"workload": few, "prompts_per_step": SMALLEST_PROMPTS, "steps": 2})
    steps = min(scenario.steps, 2 * scenario.epoch_steps) if quick else scenario.steps
    begun_s, worked_s = time.monotonic(), time.process_time()
    found = compare(with_goals(scenario.model_copy(update={"seeds": seeds, "steps": steps})), jobs=jobs)
    ways = paid(found.scenario)
    spent_s = time.process_time() - worked_s
    print(f"{name}: {time.monotonic() - begun_s:.0f} s, {spent_s:.0f} s of processor", file=sys.stderr, flush=True)
    return Found(found.scenario, found.rows(quoted_part(found.scenario)), goals_of(found), ways, spent_s)


def head(found: Sequence[Found]) -> list[str]:
    spent_s = sum(each.spent_s for each in found)
    return [
        "# Policies, simulated",
        "",
        "Written by `python benchmarks/policies.py`; nothing here was measured on devices. Means over "
        f"{found[0].scenario.seeds} seeds. [simulate.md](simulate.md) says what the simulator models; the scenarios "
        "are in `examples/scenarios/`; the command also writes `simulations-full.md`, which is not kept here, with "
        f"every policy of each and 95 % confidence intervals. {spent_s / 60:.0f} minutes of processor on {machine()}.",
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
    told = f"Worse than static by more than 0.5 %: {', '.join(worse)}." if worse else "Never worse by 0.5 %."
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
    """A table with a row per scenario, and what it comes to; the reasons of goals that were missed."""
    titles = [
        "scenario",
        "faster, for static's cost",
        "the bound",
        f"share, >= {SHARE:.0%}",
        "cheaper, in static's time",
        "the bound",
        f"share, >= {SHARE:.0%}",
        "every length known",
        f"regret, <= {REGRET:.0%}",
        *(f"{times:g}x kept, >= {share:.0%}" for times, share in DEADLINES.items()),
    ]
    lines = [
        "## Beside the lower bound",
        "",
        "Epochs after the first, billed per second. The bound is of the same fleet under the same contract: no policy "
        "can be below it, whatever it knows. A share is of what lies between static and the bound. `every length "
        "known`: the share of the same rules with perfect forecasts. Regret: cost above that of the same rules with "
        "each prompt's distribution of lengths. Deadlines are multiples of the least time with every length known.",
        "",
        row(titles),
        row(["---"] * len(titles)),
    ]
    for each in goals:
        cells = [
            f"{each.scenario}{' (owned)' if each.owned else ''}",
            f"{each.faster.mean:.2f}x; cost {each.faster_cost.mean:.2f}x",
            f"{each.fastest.mean:.2f}x",
            f"{each.faster_share.mean:.0%}",
            f"{each.saving.mean:.0%}; time {each.saving_time.mean:.3f}x",
            f"{each.most_saved.mean:.0%}",
            f"{each.saving_share.mean:.0%}",
            f"{each.foresight_share.mean:.0%}",
            f"{each.regret.mean:.0%}; time {each.regret_time.mean:.2f}x",
            *(f"{each.kept[times].mean:.0%}" for times in DEADLINES),
        ]
        lines.append(row(cells))
    lines += ["", *summed("Rented and spot devices", [each for each in goals if not each.owned])]
    lines += summed("Owned devices", [each for each in goals if each.owned])
    return [*lines, *missed(goals)]


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
    """Why the share of saved cost is below the goal, over the scenarios that miss it."""
    short = [each for each in goals if each.why]
    if not short:
        return []
    parts = [
        ("chance within a prompt", [each.foresight_share.mean - each.forecast_share.mean for each in short]),
        ("forecasts of a prompt's lengths", [each.forecast_share.mean - each.saving_share.mean for each in short]),
        ("starts and loads", [each.starts_share for each in short]),
        ("idle devices", [each.idle_share for each in short]),
        (
            "what perfect forecasts leave: rules, whole actors, or a bound too low",
            [1 - each.foresight_share.mean - each.starts_share - each.idle_share for each in short],
        ),
    ]
    told = "; ".join(f"{name} {statistics.median(shares):.0%}" for name, shares in parts)
    return [
        f"{len(short)} of {len(goals)} scenarios save less than {SHARE:.0%} of what the bound would. Where the rest "
        f"is, medians of the shares: {told}.",
        "",
    ]


def reasons_table(goals: Sequence[Goals]) -> list[str]:
    """Where the saving is that the bound allows, by scenario."""
    titles = [
        "scenario",
        "generation, of static's step",
        "saved by ours",
        "forecasts",
        "chance within a prompt",
        "starts and loads",
        "idle devices",
        "rules, whole actors, or a bound too low",
    ]
    lines = [
        "## Where the saving is that the lower bound allows",
        "",
        "Shares of the cost between static and the lower bound. Forecasts: what the distribution of each prompt's "
        "lengths would save in addition (below 0 where ours, lucky or slower, saved more); chance: what each single "
        "length would; then what that clairvoyant still pays for starts, loads and idle devices. The last column is "
        "what is left.",
        "",
        row(titles),
        row(["---"] * len(titles)),
    ]
    for each in goals:
        saved, known, foreseen = each.saving_share, each.forecast_share, each.foresight_share
        cells = [
            f"{each.generation_share:.0%}",
            percent(saved),
            f"{known.mean - saved.mean:.0%}",
            f"{foreseen.mean - known.mean:.0%}",
            f"{each.starts_share:.1%}",
            f"{each.idle_share:.1%}",
            f"{1 - foreseen.mean - each.starts_share - each.idle_share:.0%}",
        ]
        lines.append(row([each.scenario, *cells]))
    return [*lines, ""]


def published_text(goals: Sequence[Goals]) -> list[str]:
    """RLHFless as published: its front over lambda, and ours beside and below it."""
    titles = ["scenario", "lambdas on its front", "of those, ours is no slower and cheaper", "cheaper by"]
    lines = [
        "## RLHFless as published",
        "",
        f"Its weight lambda is not given, so {', '.join(map('{:g}'.format, LAMBDAS))} were run. Ours: the cheapest of "
        "its runs, under any contract, that take no longer (0.5 %) than the point.",
        "",
        row(titles),
        row(["---"] * len(titles)),
    ]
    for each in goals:
        front = {weight: beside for weight, beside in each.published.items() if beside.on_front}
        cheaper = [beside.front_cheaper.mean for beside in front.values()]
        beaten = sum(beside.beaten for beside in front.values())
        spread = f"{min(cheaper):.0%} to {max(cheaper):.0%}"
        lines.append(row([each.scenario, ", ".join(map("{:g}".format, front)), f"{beaten} of {len(front)}", spread]))
    found = [
        f"{statistics.median([each.published[weight].cheaper.mean for each in goals]):.0%} at {weight:g}"
        for weight in LAMBDAS
    ]
    return [
        *lines,
        "",
        f"With its time of the same step as deadline of each step, ours is cheaper by a median of {', '.join(found)} "
        f"(asked: {CHEAPER_THAN_PUBLISHED:.0%}). Its paper: {PUBLISHED}.",
    ]


def published_table(goals: Sequence[Goals]) -> list[str]:
    """The same by lambda, with ours step by step in its time."""
    titles = ["scenario", "lambda", "speed-up", "cheaper than static", "on its front"]
    titles += ["ours, step by step in its time: cheaper", "its time", "the cheapest of ours that is no slower: cheaper"]
    lines = ["## RLHFless as published, by lambda", "", row(titles), row(["---"] * len(titles))]
    for each in goals:
        for weight, beside in each.published.items():
            cells = [
                f"{weight:g}",
                f"{beside.speed_up.mean:.2f}x",
                f"{beside.saving.mean:.0%}",
                "yes" if beside.on_front else "no",
                percent(beside.cheaper),
                f"{beside.ours_time.mean:.2f}x",
                percent(beside.front_cheaper),
            ]
            lines.append(row([each.scenario, *cells]))
    return [*lines, ""]


def tables(found: Sequence[Found]) -> list[str]:
    """Every policy of every scenario."""
    lines = ["# All results of the simulated policies", "", "Written by `python benchmarks/policies.py`.", ""]
    for each in found:
        lines += [f"## {each.scenario.name}", "", described(each.scenario), ""]
        lines += [
            row(["policy", *(f"{column.title}, {column.unit}" for column in COLUMNS)]),
            row(["---"] * (len(COLUMNS) + 1)),
        ]
        for line in each.rows:
            lines.append(row([line.label, *(f"{column.text(line)} {column.half(line)}".strip() for column in COLUMNS)]))
        lines.append("")
    return lines


def described(scenario: Scenario) -> str:
    per_step = f"{scenario.prompts_per_step} x {scenario.samples_per_prompt} responses a step"
    return f"{scenario.description.strip()} {per_step}; {PARTS[quoted_part(scenario)]} of {scenario.steps} steps."


def row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def percent(interval: Interval) -> str:
    return f"{100 * interval.mean:.0f} % ({100 * interval.low:.0f} to {100 * interval.high:.0f})"


if __name__ == "__main__":
    main()
