"""The time of a step under each schedule, where generation and learning have a core each.

    python benchmarks/schedules.py [--rounds N] [--steps N] [--epochs N] [--tokens N] [--only ...] [--smoke]

One fleet, one actor on a core of its own and the learner on the other. The schedules take turns of some steps each, so
that what else the machine does falls on all of them; a turn's time is from the begin of its first draw to the end of
its last update, divided by its steps. `sync` also tells how long generation and learning take: choose `--epochs` and
`--tokens` so that they are about equal, because then there is most to gain. A step that overlaps takes as long as the
longer of the two at least (the last column): nothing that overlaps these two can be faster.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from setting import assets, live_run, median_ratio, spec_of, spread
from smoke import parsed
from where import machine

from rlhfless.orchestrator.run import RLRun
from rlhfless.orchestrator.schedules import Data, schedule_of
from rlhfless.orchestrator.step import rollout, train
from rlhfless.orchestrator.weight_sync import VersionGate
from rlhfless.records import Experience
from rlhfless.spec import AsyncSpec, OneStepOffSpec, ScheduleSpec, SyncSpec

SCHEDULES: dict[str, ScheduleSpec] = {
    "sync": SyncSpec(),
    "one_step_off": OneStepOffSpec(),
    "async": AsyncSpec(max_staleness=2),
    "async between draws": AsyncSpec(max_staleness=2, in_flight=False),
}


class Steps:
    """The steps of a run, without evaluations and checkpoints."""

    def __init__(self, run: RLRun) -> None:
        self._run = run
        self.metrics: list[dict[str, float]] = []

    async def rollout(self, step: int) -> Experience:
        return await rollout(self._run, self._run.begin(step))

    async def train(self, step: int, experience: Data) -> None:
        assert isinstance(experience, Experience)
        record = await train(self._run, self._run.under_way[step], experience)
        self.metrics.append(dict(record.metrics))


def use(run: RLRun, schedule: ScheduleSpec) -> None:
    """Let a run whose steps have all ended go on with another schedule."""
    published = run.published
    run.spec = run.spec.model_copy(update={"schedule": schedule})
    run.versions = VersionGate(in_flight=schedule.in_flight)
    run.published = published


async def turn(run: RLRun, schedule: ScheduleSpec, first: int, count: int) -> tuple[float, Steps]:
    """Seconds of a step, and what the steps measured."""
    use(run, schedule)
    steps, began_s = Steps(run), time.perf_counter()
    await schedule_of(schedule).drive(steps, first, first + count - 1)
    return (time.perf_counter() - began_s) / count, steps


async def measure(
    folder: Path, schedules: Mapping[str, ScheduleSpec], rounds: int, count: int, epochs: int, tokens: int
) -> None:
    spec = spec_of(
        folder,
        schedule={"type": "async", "max_staleness": 2},
        generation={"max_tokens": tokens},
        prompts_per_step=16,
        epochs=epochs,
        placement={"mode": "disaggregated", "devices": 2, "learner_devices": 1},
        scaling={"generation": {"min_actors": 1, "max_actors": 1}},
    )
    seconds: dict[str, list[float]] = defaultdict(list)
    halves: dict[str, list[float]] = defaultdict(list)
    behind: dict[str, list[float]] = defaultdict(list)
    async with live_run(spec, folder) as run:
        _, _ = await turn(run, SyncSpec(), 1, 2)  # what is compiled and allocated once
        step = 3
        for _ in range(rounds):
            for name, schedule in schedules.items():
                step_s, steps = await turn(run, schedule, step, count)
                step += count
                seconds[name].append(step_s)
                behind[name] += [metrics["staleness_mean"] for metrics in steps.metrics]
                if name == "sync":
                    for half in ("generation_s", "learn_s"):
                        halves[half] += [metrics[half] for metrics in steps.metrics]
    show(seconds, halves, behind)


def show(seconds: dict[str, list[float]], halves: dict[str, list[float]], behind: dict[str, list[float]]) -> None:
    generation_s, learn_s = (statistics.median(halves[half]) for half in ("generation_s", "learn_s"))
    print(f"{machine()}\nin a step of sync: generation {generation_s:.2f} s, learning {learn_s:.2f} s")
    longer = max(generation_s, learn_s) / statistics.median(seconds["sync"])
    print(f"{'':20}{'seconds of a step':>28}{'/ sync':>10}{'versions behind':>18}{'longer half / sync':>20}")
    for name, values in seconds.items():
        ratio, mean = median_ratio(values, seconds["sync"]), statistics.fmean(behind[name])
        print(f"{name:20}{spread(values):>28}{ratio:>10.3f}{mean:>18.2f}{longer:>20.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6, help="steps of a turn")
    parser.add_argument("--epochs", type=int, default=1, help="passes of the learner over each step")
    parser.add_argument("--tokens", type=int, default=96, help="tokens of each response")
    parser.add_argument("--only", nargs="+", default=list(SCHEDULES), choices=list(SCHEDULES), help="beside sync")
    asked = parsed(parser, rounds=1, steps=3)
    chosen = {name: schedule for name, schedule in SCHEDULES.items() if name in ("sync", *asked.only)}
    with assets(1024) as folder:
        asyncio.run(measure(folder, chosen, asked.rounds, asked.steps, asked.epochs, asked.tokens))


if __name__ == "__main__":
    main()
