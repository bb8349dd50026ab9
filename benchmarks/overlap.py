"""What schedules bring over the published scenarios, simulated: overlap at staleness 1, and partial rollouts.

    python benchmarks/overlap.py [--smoke] [--seeds 2] [--markdown FILE] [SCENARIO ...]

The base is a static fleet that shares all devices, with `sync`. It is compared, on the same devices, with the better of
`one_step_off` and `async` at staleness 1, with `cost_aware` and the best of some shares of the devices for the learner.
The share of a mechanism is what is lost without it, the others as they were: the overlap (`sync` on the same devices),
the choice of the learner's share (half), and the policy (a static fleet). `decided` shares the devices where that is
faster. Responses of a step are learned in one update.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policies import FOLDER, SMALLEST, SMALLEST_PROMPTS, row
from smoke import parsed
from where import machine

from rlhfless.sim.experiment.compare import compare
from rlhfless.sim.experiment.figures import Totals
from rlhfless.sim.scenarios import Scenario, load_scenario, timing
from rlhfless.sim.scenarios.scenario import PolicyEntry, WeightedContract
from rlhfless.sim.scenarios.work import ScenarioPlacementSpec
from rlhfless.spec import AsyncSpec, OneStepOffSpec, PartialSpec, ScheduleSpec, SyncSpec

SHARES = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75)
"""Of the devices for the learner's side that are tried."""

HALF = 0.5
BASE, OURS, STATIC = "static_colocated", "cost_aware", "static"
AHEAD: Mapping[str, ScheduleSpec] = {
    "one_step_off": OneStepOffSpec(),
    "async": AsyncSpec(max_staleness=1),
}
BESIDE: Mapping[str, ScheduleSpec] = {
    "sync": SyncSpec(),
    "partial": PartialSpec(max_staleness=1),
}
"""On shared devices, with `cost_aware`."""

WANTED = 1.4
"""Speed-up that is asked for at staleness 1."""


@dataclass(frozen=True)
class Gain:
    """By the base, geometric means over seeds."""

    speed_up: float
    cost: float
    """As a multiple of the base's."""


@dataclass(frozen=True)
class Overlapped:
    """The best of a schedule, and what is lost without each mechanism."""

    schedule: str
    learner: int
    full: Gain
    without: Mapping[str, Gain]


@dataclass(frozen=True)
class Measured:
    """The figures of one scenario."""

    scenario: Scenario
    shared: Mapping[str, Gain]
    """By schedule, on shared devices."""
    overlapped: Overlapped | None
    """None where the model fits in no split."""


class Bench:
    """One scenario, and the runs of its base."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self._base = self._totals(BASE, SyncSpec(), None)

    def _totals(self, policy: str, schedule: ScheduleSpec, learner: int | None) -> list[Totals]:
        """By seed, without the first step, which has the starts. `learner`: its devices; None for shared devices."""
        mode: dict[str, Any] = {"mode": "colocated" if learner is None else "disaggregated", "learner_devices": learner}
        entry = PolicyEntry(name=policy, placement=ScenarioPlacementSpec(**mode))
        asked = self.scenario.model_copy(update={"schedule": schedule, "policies": (entry,)})
        return [Totals.of(run.steps[1:]) for run in compare(asked).results[policy]]

    def gain(self, policy: str, schedule: ScheduleSpec, learner: int | None) -> Gain:
        pairs = list(zip(self._base, self._totals(policy, schedule, learner), strict=True))
        mean = statistics.geometric_mean
        speed_up = mean([base.time_s / base.steps * one.steps / one.time_s for base, one in pairs])
        return Gain(speed_up, mean([one.usd / one.steps * base.steps / base.usd for base, one in pairs]))

    def splits(self) -> dict[float, int]:
        """Devices of the learner's side by share, where it and at least one actor fit."""
        machines, each = self.scenario.cluster.machines[0], self.scenario.engine.devices
        needed = timing.learner_devices_needed(self.scenario, machines.kind)
        found = {share: max(round(machines.devices * share / each), 1) * each for share in SHARES}
        return {share: count for share, count in found.items() if needed <= count <= machines.devices - each}

    def overlapped(self) -> Overlapped | None:
        """The best of AHEAD over the splits; None where the model fits in none."""
        splits = self.splits()
        tried = {
            (name, learner): self.gain(OURS, schedule, learner)
            for name, schedule in AHEAD.items()
            for learner in sorted(set(splits.values()))
        }
        if not tried:
            return None
        name, learner = max(tried, key=lambda key: tried[key].speed_up)
        half = splits.get(HALF, max(splits.values()))
        without = {
            "overlap": self.gain(OURS, SyncSpec(), learner),
            "share": tried[name, half],
            "policy": self.gain(STATIC, AHEAD[name], learner),
        }
        return Overlapped(name, learner, tried[name, learner], without)


def run(name: str, seeds: int, smoke: bool) -> Measured:
    begun_s = time.process_time()
    scenario = load_scenario(FOLDER / f"{name}.yaml")
    if smoke:
        few = scenario.workload.model_copy(update={"prompts": 4 * SMALLEST_PROMPTS})
        scenario = scenario.model_copy(update={"workload": few, "prompts_per_step": SMALLEST_PROMPTS, "steps": 3})
    learner = scenario.learner.model_copy(update={"mini_batches": 1})
    fastest = {"seeds": seeds, "learner": learner, "contract": WeightedContract(time_weight=1.0)}
    bench = Bench(scenario.model_copy(update=fastest))
    shared = {name: bench.gain(OURS, schedule, None) for name, schedule in BESIDE.items()}
    found = bench.overlapped()
    print(f"{name}: {time.process_time() - begun_s:.0f} s of processor", file=sys.stderr, flush=True)
    return Measured(bench.scenario, shared, found)


def decided(one: Measured) -> Gain:
    """The faster of the overlap and of shared devices, where the order of the data stays as it is."""
    own = one.overlapped
    return max([one.shared["sync"], *([own.full] if own else [])], key=lambda gain: gain.speed_up)


def lines(measured: Sequence[Measured]) -> list[str]:
    gains = {one.scenario.name: decided(one) for one in measured}
    speeds = [gain.speed_up for gain in gains.values()]
    kept = sum(gain.speed_up >= WANTED and gain.cost <= 1 for gain in gains.values())
    lost = sum(one.overlapped.full.speed_up < 1 for one in measured if one.overlapped)
    made = [
        "# Schedules, simulated",
        "",
        "Written by `python benchmarks/overlap.py`, which says what the columns mean; nothing here was measured on "
        f"devices. Means over {measured[0].scenario.seeds} seeds, relative to `{BASE}` with `sync`.",
        "",
        f"Staleness 1: where the plan decides {statistics.median(speeds):.2f}x at the median "
        f"({min(speeds):.2f} to {max(speeds):.2f}), {WANTED:.2f}x at no more cost in {kept} of {len(measured)} "
        f"scenarios. In {lost} the overlap loses to a static fleet that shares the devices.",
        "",
        row(["scenario", "schedule", "learner", "speed-up", "cost", "without it", "half", "static", "decided"]),
        row(["---"] * 9),
        *(_row_of(one, gains[one.scenario.name]) for one in measured),
        "",
    ]
    made += ["On shared devices, `cost_aware`:", "", row(["scenario", *BESIDE]), row(["---"] * (1 + len(BESIDE)))]
    made += [row([one.scenario.name, *(_of(one.shared[name]) for name in BESIDE)]) for one in measured]
    medians = (statistics.median(one.shared[name].speed_up for one in measured) for name in BESIDE)
    return [*made, row(["median", *(f"{each:.2f}x" for each in medians)]), ""]


def _row_of(one: Measured, chosen: Gain) -> str:
    found = one.overlapped
    if found is None:
        return row([one.scenario.name, "the model fits in no split", *[""] * 6, f"{chosen.speed_up:.2f}x"])
    devices = f"{found.learner} of {one.scenario.cluster.machines[0].devices}"
    lost = [f"{found.without[name].speed_up:.2f}x" for name in ("overlap", "share", "policy")]
    full = [f"{found.full.speed_up:.2f}x", f"{found.full.cost:.2f}x"]
    return row([one.scenario.name, found.schedule, devices, *full, *lost, f"{chosen.speed_up:.2f}x"])


def _of(gain: Gain) -> str:
    return f"{gain.speed_up:.2f}x"


def of_set() -> list[str]:
    """The names of the published set, but for those that are about shared prefixes."""
    return [path.stem for path in sorted(FOLDER.glob("*.yaml")) if load_scenario(path).prefixes is None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="*", help="names; those of examples/scenarios without prefixes if left out")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--markdown", type=Path, help="write the tables to this file")
    arguments = parsed(parser, scenarios=[SMALLEST], seeds=1)
    measured = [run(name, arguments.seeds, arguments.smoke) for name in arguments.scenarios or of_set()]
    text = "\n".join(lines(measured))
    print(f"{machine()}, {arguments.seeds} seeds\n\n{text}")
    if arguments.markdown:
        arguments.markdown.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
