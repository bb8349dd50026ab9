"""The policies over the published set of scenarios, simulated: one run on a cluster, and several runs on one cluster.

    python benchmarks/policies.py [--quick] [--smoke] [--seeds 4] [--jobs 2] [--markdown docs/simulations.md] \
        [SCENARIO ...]
    python benchmarks/policies.py --drafts [--seeds 4] [--jobs 2] [SCENARIO ...]

Every result is printed, good and bad; `--markdown` writes the same for the documentation. `--quick` takes four of the
scenarios, two seeds and two epochs. `--drafts` prints
what the choice of actors, drafts and both bring (docs/speculation.md), and nothing else.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from smoke import parsed
from where import machine

from rlhfless.sim.experiment.compare import PolicyComparison, compare
from rlhfless.sim.experiment.figures import Totals
from rlhfless.sim.experiment.shared import ONE_BY_ONE, Arrangement, arrangements
from rlhfless.sim.scenarios import Scenario, load_scenario
from rlhfless.sim.scenarios.scenario import CheapestContract, MultipleOf, PolicyEntry, WeightedContract
from rlhfless.sim.scenarios.work import ScenarioPlacementSpec
from rlhfless.sim.statistics import Interval

FOLDER = Path(__file__).parents[1] / "examples" / "scenarios"
QUICK = ("paper-3b-l40s", "gsm8k-7b-h100-owned", "code-70b-h200", "reasoning-7b-a100")
SMALLEST = "gsm8k-3b-h100"
SMALLEST_PROMPTS = 8
RUNS = (2, 4, 8)
BACK_S = 30.0
"""Until a single device that was given back is there again: an assumption."""

STATIC, OURS, EVERY_LENGTH = "static_colocated", "cost_aware", "clairvoyant"
BESIDE = ("rlhfuse_tail", "queue_reactive_ray_serve", "queue_reactive_knative", "rlhfless_published")
SETTINGS = {"rlhfless_published": {"time_weight": 1.0}}
"""Its lambda, which its paper does not give: here only time counts, for all of them."""

DRAFTS = "reasoning-7b-h100-drafts"
"""The scenario whose drafts all others get."""

DRAFT_STEPS = 3
"""Of which the first, in which no prompt is known, is not counted."""

APART = "learner apart, devices given back"
APART_STATIC = "learner apart, static"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="*", help="names; all of examples/scenarios when left out")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--drafts", action="store_true", help="what actors, drafts and both bring")
    arguments = parsed(parser, scenarios=[SMALLEST], seeds=1)
    names = arguments.scenarios or (QUICK if arguments.quick else [path.stem for path in sorted(FOLDER.glob("*.yaml"))])
    seeds = 2 if arguments.quick else arguments.seeds
    if arguments.drafts:
        print(machine(), *drafts([name for name in names if name != DRAFTS], seeds, arguments.jobs), sep="\n")
        return
    begun_s = processor_s()
    measured = [run(name, seeds, arguments.jobs, arguments.quick, arguments.smoke) for name in names]
    spent_s = processor_s() - begun_s
    text = "\n".join([*head(measured, spent_s), *one_run(measured), *apart(measured), *several_runs(measured)]) + "\n"
    print(text)
    if arguments.markdown:
        arguments.markdown.write_text(text, "utf-8")


def processor_s() -> float:
    """Return the processor time of this process and of workers that have ended, in seconds."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@dataclass(frozen=True)
class Measured:
    """The figures of one scenario."""

    scenario: Scenario
    one: PolicyComparison
    """Nodes are rented whole, or owned."""
    single: PolicyComparison
    """Single devices are rented, and given back."""
    several: dict[int, list[Arrangement]]
    """By number of runs; empty for a cluster of several kinds."""

    def speed_up(self, label: str) -> Interval:
        return next(row.speed_up for row in self.one.rows("all") if row.label == label)


def run(name: str, seeds: int, jobs: int, quick: bool, smoke: bool) -> Measured:
    scenario = load_scenario(FOLDER / f"{name}.yaml")
    if smoke:
        few = scenario.workload.model_copy(update={"prompts": SMALLEST_PROMPTS})
        scenario = scenario.model_copy(update={"workload": few, "prompts_per_step": SMALLEST_PROMPTS, "steps": 2})
    steps = min(scenario.steps, 2 * scenario.epoch_steps) if quick else scenario.steps
    scenario = scenario.model_copy(
        update={"seeds": seeds, "steps": steps, "contract": WeightedContract(time_weight=1.0)}
    )
    begun_s = time.monotonic()
    entries = tuple(
        PolicyEntry(name=each, settings=SETTINGS.get(each, {})) for each in (STATIC, *BESIDE, OURS, EVERY_LENGTH)
    )
    one = compare(scenario.model_copy(update={"policies": entries}), jobs=jobs)
    alone = len(scenario.cluster.machines) == 1
    several = arrangements(scenario, RUNS) if alone else {}
    made = Measured(scenario, one, single_devices(scenario, jobs), several)
    print(f"{name}: {time.monotonic() - begun_s:.0f} s", file=sys.stderr, flush=True)
    return made


def single_devices(scenario: Scenario, jobs: int) -> PolicyComparison:
    """Static co-located beside a learner on devices of its own, whose actors are given back when they are idle."""
    machines = tuple(
        each.model_copy(update={"tenure": "rented", "released_value": None, "rented_by": "device"})
        for each in scenario.cluster.machines
    )
    cluster = scenario.cluster.model_copy(update={"machines": machines, "reacquire_s": BACK_S})
    placed = ScenarioPlacementSpec(mode="disaggregated")
    within = CheapestContract(deadline=MultipleOf(times=1.0, policy=APART_STATIC), per="run")
    entries = (
        PolicyEntry(name=STATIC),
        PolicyEntry(name="static", label=APART_STATIC, placement=placed),
        PolicyEntry(name=OURS, label=APART, placement=placed, contract=within),
    )
    return compare(scenario.model_copy(update={"policies": entries, "cluster": cluster}), jobs=jobs)


def drafts(names: Sequence[str], seeds: int, jobs: int) -> list[str]:
    """Time and cost of the choice of actors, of drafts and of both, by those of neither."""
    ratios = {name: drafts_bring(name, seeds, jobs) for name in names}
    labels = [f"{label}: {what}" for label in (f"`{OURS}`", "drafts", "both") for what in ("time", "cost")]
    lines = {name: list(values) for name, values in ratios.items()}
    columns = list(zip(*ratios.values(), strict=True))
    lines |= {
        what: list(map(pick, columns)) for what, pick in (("median", statistics.median), ("least", min), ("most", max))
    }
    table = [row([name, *(f"{value:.3f}" for value in values)]) for name, values in lines.items()]
    return [row(["scenario", *labels]), row(["---"] * (1 + len(labels))), *table]


def drafts_bring(name: str, seeds: int, jobs: int) -> list[float]:
    """The ratios of one scenario, means over the seeds."""
    scenario, source = (load_scenario(FOLDER / f"{each}.yaml") for each in (name, DRAFTS))
    entries = tuple(PolicyEntry(name=each) for each in (STATIC, OURS))
    update = {"seeds": seeds, "steps": DRAFT_STEPS, "contract": WeightedContract(), "policies": entries}
    plain = scenario.model_copy(update=update)
    engine = plain.engine.model_copy(update={"speculation": source.engine.speculation})
    sides = [compare(each, jobs=jobs) for each in (plain, plain.model_copy(update={"engine": engine}))]
    neither, *others = (
        [Totals.of(run.steps[1:]) for run in side.results[label]] for side in sides for label in (STATIC, OURS)
    )
    print(f"{name}: done", file=sys.stderr, flush=True)
    return [
        statistics.geometric_mean(
            getattr(one, what) / getattr(base, what) for one, base in zip(runs, neither, strict=True)
        )
        for runs in others
        for what in ("time_s", "usd")
    ]


def head(measured: Sequence[Measured], spent_s: float) -> list[str]:
    return [
        "# Policies, simulated",
        "",
        "Written by `python benchmarks/policies.py`; nothing here was measured on devices. Whole runs with their first "
        f"epoch, means over {measured[0].scenario.seeds} seeds. [simulate.md](simulate.md) says what the simulator "
        "models: what the live fleet can do, and nothing else. The scenarios are in `examples/scenarios/`. "
        f"{spent_s / 60:.0f} minutes of processor on {machine()}.",
        "",
    ]


def one_run(measured: Sequence[Measured]) -> list[str]:
    """How much faster each policy is than the static fleet on the same devices."""
    labels = (*BESIDE, OURS, EVERY_LENGTH)
    medians = {label: statistics.median(each.speed_up(label).mean for each in measured) for label in labels}
    worst, best = (pick(each.speed_up(OURS).mean for each in measured) for pick in (min, max))
    slower = [each.scenario.name for each in measured if each.speed_up(OURS).mean < 0.995]
    lines = [
        "## One run on its own cluster",
        "",
        "Nodes are rented whole, or owned: a device that a run gives back for part of a step is paid for all the same, "
        "so cost is time, and every policy is judged by it. All functions are on all devices and take turns. "
        f"Speed-up against `{STATIC}`, which deals prompts by the lengths of their last visit, with 95 % confidence "
        "intervals.",
        "",
        f"`{OURS}` is {medians[OURS]:.3f}x as fast at the median ({worst:.3f} to {best:.3f}), with every length known "
        f"{medians[EVERY_LENGTH]:.3f}x. "
        + (
            f"Slower than static by more than 0.5 %: {', '.join(slower)}."
            if slower
            else "It is never slower than static."
        ),
        "",
        row(["scenario", *labels]),
        row(["---"] * (len(labels) + 1)),
    ]
    for each in measured:
        cells = [interval(each.speed_up(label)) for label in labels]
        lines.append(row([each.scenario.name, *cells]))
    return [*lines, row(["median", *(f"{medians[label]:.3f}" for label in labels)]), ""]


def apart(measured: Sequence[Measured]) -> list[str]:
    """The layout in which a device can be given back at all, where single devices are rented."""
    lines = [
        "## Single devices, given back between uses",
        "",
        f"Where single devices are rented, to the second, and are there again after {BACK_S:.0f} s, a learner with "
        "devices of its own lets actors be given back; what was on them is gone, so each start is a cold one. "
        "Its contract is the cheapest run within the time of the static fleet with the same devices. Time and cost by "
        f"`{STATIC}`, which keeps all devices.",
        "",
        row(["scenario", f"{APART_STATIC}: time", "cost", f"{APART}: time", "cost"]),
        row(["---"] * 5),
    ]
    for each in measured:
        rows = {line.label: line for line in each.single.rows("all")}
        cells = [
            f"{value:.2f}x"
            for label in (APART_STATIC, APART)
            for value in (1 / rows[label].speed_up.mean, rows[label].cost_ratio.mean)
        ]
        lines.append(row([each.scenario.name, *cells]))
    return [*lines, ""]


def several_runs(measured: Sequence[Measured]) -> list[str]:
    """Runs of one kind on one owned cluster."""
    lines = [
        "## Several runs on one cluster",
        "",
        "Equal runs that begin together, each `cost_aware`. In parts: each on its share of the devices "
        "(`placement.devices`). In turns: on the same devices, a phase at a time (`placement.tenants`). `rlhfless "
        "simulate SCENARIO --runs N` has every arrangement. Figures are the time of one run after the other, each on "
        "all devices, by the time until all have ended; a dash: the model does not fit on such a part.",
        "",
        row(["scenario", *(f"{runs}, {what}" for runs in RUNS for what in ("parts", "turns", "the best"))]),
        row(["---"] * (1 + 3 * len(RUNS))),
    ]
    best: dict[int, list[float]] = {runs: [] for runs in RUNS}
    for each in measured:
        cells: list[str] = []
        for runs, made in each.several.items():
            times = {one.name: made[0].makespan_s / one.makespan_s for one in made if one.name != ONE_BY_ONE}
            parts = [gain for name, gain in times.items() if "turns" not in name]
            turns = [gain for name, gain in times.items() if "turns" in name]
            best[runs].append(max(times.values()))
            name = max(times, key=lambda name: times[name])
            cells += [f"{max(parts):.2f}x" if parts else "–", f"{max(turns):.2f}x", name]  # noqa: RUF001
        if cells:
            lines.append(row([each.scenario.name, *cells]))
    medians = [f"{runs} runs {statistics.median(gains):.2f}x" for runs, gains in best.items() if gains]
    if medians:
        lines += ["", f"The best arrangement at the median: {', '.join(medians)}.", ""]
    return lines


def row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def interval(value: Interval) -> str:
    return f"{value.mean:.3f} ({value.low:.3f} to {value.high:.3f})"


if __name__ == "__main__":
    main()
