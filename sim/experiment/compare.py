"""Run all policies of a scenario over all its seeds: the Python API behind `rlhfless simulate`.

    scenario = load_scenario("examples/scenarios/gsm8k-3b-h100.yaml")
    comparison = compare(scenario)
    for row in comparison.rows("later"):
        print(row.label, row.step_s, row.step_usd)

Policies share their seeds, so that each pair of them has the same lengths. The result does not depend on the number of
processes or the order of their work.
"""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing import active_children, get_context
from types import TracebackType
from typing import Any

from rlhfless.scaling.policies.contract import best_of
from rlhfless.sim.experiment.contracts import (
    contract_of,
    in_order,
    judged,
    measured_by,
    measures_itself,
    resolved,
    span_of,
)
from rlhfless.sim.experiment.figures import Part, ResultRow, Totals, objective, row_of, steps_of
from rlhfless.sim.experiment.run import ExperimentTask, FleetShape, RunResult, fleet_of, run, settings_of
from rlhfless.sim.scenarios import timing
from rlhfless.sim.scenarios.scenario import BEST_STATIC, CLAIRVOYANT, PolicyEntry, Scenario
from rlhfless.sim.scenarios.work import ScenarioPlacementSpec
from rlhfless.spec import ContractSpec, WeightedSpec
from rlhfless.spec.errors import InputError, Problem
from rlhfless.spec.explain import nearest

NO_HEARTBEATS_S = 3600.0
"""Interval between heartbeats for static fleets, longer than their steps: a static policy does nothing at a heartbeat,
and without heartbeats its simulation takes a third of the time."""

Results = dict[str, tuple[RunResult, ...]]
"""By label; one result per seed."""


@dataclass(frozen=True)
class PolicyComparison:
    """The results of a scenario."""

    scenario: Scenario
    results: Results
    contracts: dict[str, tuple[ContractSpec, ...]]
    """By label: the contract of its run with the first seed; one for the run, or one per step."""

    def totals(self, label: str, part: Part) -> list[Totals]:
        """Return the totals by seed."""
        return [Totals.of(steps_of(run.steps, part, self.scenario.epoch_steps)) for run in self.results[label]]

    def rows(self, part: Part) -> list[ResultRow]:
        first = self.totals(next(iter(self.results)), part)
        return [row_of(label, self.totals(label, part), first, self.regrets(label, part)) for label in self.results]

    def regrets(self, label: str, part: Part) -> list[float] | None:
        """Return the regret by seed; None if the clairvoyant did not run, or ran under another contract."""
        same = self.contracts.get(CLAIRVOYANT) == self.contracts[label]
        if CLAIRVOYANT not in self.results or not same:
            return None
        pairs = zip(self.totals(label, part), self.totals(CLAIRVOYANT, part), strict=True)
        return [objective(self.contracts[label][0], run, bound) - 1 for run, bound in pairs]


def compare(
    scenario: Scenario, policies: Sequence[str] | None = None, jobs: int = 1, on_progress: OnProgress | None = None
) -> PolicyComparison:
    """Run the scenario's policies, or only these labels, and the policies that their contracts are measured by.

    Raises InputError, ContractError or WorkloadError for a scenario that cannot be run.
    """
    rounds = in_order(scenario, _wanted(scenario, policies))
    by_label: Results = {}
    contracts: dict[str, tuple[ContractSpec, ...]] = {}
    with ExperimentWorkers(jobs, on_progress) as workers:
        for index, entries in enumerate(rounds):
            tasks = {entry.shown: _tasks(scenario, entry, by_label) for entry in entries}
            later = sum(len(tried(scenario, each)) for after in rounds[index + 1 :] for each in after)
            later_steps = scenario.steps * scenario.seeds * later
            results = iter(workers.run([task for each in tasks.values() for task in each], later_steps))
            for entry in entries:
                fleets = len(tried(scenario, entry))
                by_seed = [[next(results) for _ in range(fleets)] for _ in range(scenario.seeds)]
                chosen = [_judged(scenario, entry, by_label, runs) for runs in by_seed]
                by_label[entry.shown] = tuple(run for run, _ in chosen)
                contracts[entry.shown] = chosen[0][1]
    labels = [entry.shown for entry in scenario.policies if entry.shown in by_label]
    return PolicyComparison(scenario, {label: by_label[label] for label in labels}, contracts)


def quoted_part(scenario: Scenario) -> Part:
    """Return the part whose figures are quoted: later epochs, or all steps if there is only one epoch."""
    return "later" if scenario.epoch_steps < scenario.steps else "all"


def _wanted(scenario: Scenario, labels: Sequence[str] | None) -> list[PolicyEntry]:
    entries = {entry.shown: entry for entry in scenario.policies}
    for label in labels or ():
        if label not in entries:
            what, hint = f"{label!r} is not one of them", f"{nearest(label, entries)}There are {', '.join(entries)}"
            raise InputError(scenario.name, [Problem("policies", what, hint)])
    for entry in scenario.policies:
        if entry.name != BEST_STATIC:
            settings_of(scenario, entry)
    return [entry for entry in scenario.policies if labels is None or entry.shown in labels]


def _tasks(scenario: Scenario, entry: PolicyEntry, results: Results) -> list[ExperimentTask]:
    """Return the tasks by seed, with every fleet that is tried for each seed."""
    tasks = []
    for seed in range(scenario.seeds):
        contracts = _contracts(scenario, entry, results, seed)
        if entry.name == BEST_STATIC:
            plain = entry.model_copy(update={"name": "static", "label": entry.shown})
            unwatched = scenario.model_copy(update={"heartbeat_s": NO_HEARTBEATS_S})
            tasks += [ExperimentTask(unwatched, plain, fleet, contracts, seed) for fleet in tried(scenario, entry)]
        else:
            tasks += [
                ExperimentTask(scenario, entry, fleet, contracts, seed, seed == 0) for fleet in tried(scenario, entry)
            ]
    return tasks


def _contracts(scenario: Scenario, entry: PolicyEntry, results: Results, seed: int) -> tuple[ContractSpec, ...]:
    """Return the contract of a run, in numbers."""
    if measures_itself(scenario, entry):
        return (WeightedSpec(),)
    label = measured_by(scenario, entry)
    contract = contract_of(scenario, entry)
    measured = None if label is None else results[label][seed].steps
    return tuple(resolved(contract, measured, span_of(contract, scenario)))


def _judged(
    scenario: Scenario, entry: PolicyEntry, results: Results, runs: Sequence[RunResult]
) -> tuple[RunResult, tuple[ContractSpec, ...]]:
    """Return the run of a seed, or the best of several, with its contract judged for each step."""
    contracts, part = _contracts(scenario, entry, results, runs[0].seed), quoted_part(scenario)
    span = span_of(contract_of(scenario, entry), scenario)
    steps = [judged(run.steps, contracts, span) for run in runs]
    limits = [step.limit for step in steps_of(steps[0], part, scenario.epoch_steps) if step.limit is not None]
    totals = [Totals.of(steps_of(each, part, scenario.epoch_steps)) for each in steps]
    index = best_of([(each.time_s, each.usd) for each in totals], contracts[0], sum(limits) if limits else None)
    if measures_itself(scenario, entry):
        contracts = tuple(resolved(scenario.contract, runs[index].steps, span))
    kept = tuple(judged(runs[index].steps, contracts, span))
    return dataclasses.replace(runs[index], steps=kept), contracts


def tried(scenario: Scenario, entry: PolicyEntry) -> list[FleetShape]:
    """Return the fleets to choose the best from: a single one for a policy that chooses its devices itself."""
    if entry.name == BEST_STATIC:
        return fleets(scenario)
    return [fleet_of(scenario, entry)]


def fleets(scenario: Scenario) -> list[FleetShape]:
    """Return every fleet that the model fits on.

    Co-located fleets have the devices of 1, 2, 3, ... actors. Disaggregated fleets have every number of actors, and a
    learner of 1, 2, 4, ... times the devices it needs, or of all devices of its kind.
    """
    machines, each = scenario.cluster.machines[-1], scenario.engine.devices
    if machines is not scenario.cluster.machines[0]:
        placement = ScenarioPlacementSpec(mode="disaggregated")
        return [FleetShape(placement, size) for size in range(each, machines.devices + 1, each)]
    needed = timing.learner_devices_needed(scenario, machines.kind)
    shapes: list[FleetShape] = []
    if not scenario.steps_ahead:
        sizes = range(each, machines.devices + 1, each)
        shapes += [FleetShape(ScenarioPlacementSpec(mode="colocated"), size) for size in sizes if size >= needed]
    learner = needed
    while learner <= machines.devices - each:
        placement = ScenarioPlacementSpec(mode="disaggregated", learner_devices=learner)
        shapes += [FleetShape(placement, learner + size) for size in range(each, machines.devices - learner + 1, each)]
        learner *= 2
    return shapes


OnProgress = Callable[[int, int], None]
"""Called with the number of steps done, over all runs, and the number of steps known to be needed."""

LOOK_S = 0.5
"""Seconds between two updates of the progress of other processes."""

_done: Any = None
"""Steps that the processes have done together; set in each of them."""


def _begin(done: Any) -> None:
    """Prepare a worker process to ignore Ctrl-C.

    A terminal sends it to all processes; the parent handles it, and ends its workers.
    """
    global _done
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _done = done


def _run(task: ExperimentTask) -> RunResult:
    return run(task, _count)


def _count() -> None:
    with _done.get_lock():
        _done.value += 1


class ExperimentWorkers:
    """Runs tasks in `jobs` processes; with one job, in this process."""

    def __init__(self, jobs: int, on_progress: OnProgress | None) -> None:
        self._pool: ProcessPoolExecutor | None = None
        if jobs > 1:
            context = get_context("spawn")  # new interpreters: a fork would copy this process without its threads
            self._shared = context.Value("q", 0)
            self._pool = ProcessPoolExecutor(jobs, context, _begin, (self._shared,))
        self._on_progress = on_progress or (lambda *_: None)
        self._done = 0
        self._total = 0

    def __enter__(self) -> ExperimentWorkers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._pool is None:
            return
        if kind is not None and not issubclass(kind, Exception):  # interrupted: do not wait for running tasks
            for process in active_children():
                process.kill()
        self._pool.shutdown(cancel_futures=True)

    def run(self, tasks: Sequence[ExperimentTask], later: int) -> list[RunResult]:
        """Return the results of all tasks; `later` counts the steps of later tasks. Raises the error of a run."""
        self._total = self._done + sum(task.scenario.steps for task in tasks) + later
        self._on_progress(self._done, self._total)
        if self._pool is None:
            return [run(task, self._step) for task in tasks]
        futures = [self._pool.submit(_run, task) for task in tasks]
        pending = set(futures)
        while pending:
            ended, pending = wait(pending, LOOK_S)
            for future in ended:
                future.result()
            self._done = self._shared.value
            self._on_progress(self._done, self._total)
        return [future.result() for future in futures]

    def _step(self) -> None:
        self._done += 1
        self._on_progress(self._done, self._total)
