"""Shared prefixes, simulated: each engine's own cache alone, with the plan, and with reference and learner.

    python benchmarks/prefix_ablation.py [SCENARIO ...] [--policy cost_aware] [--seeds 2] [--steps 8] [--jobs 2]
        [--markdown docs/prefixes.md]

Without SCENARIO: those of examples/scenarios with `prefixes`. One policy runs the same steps with `prefixes.sharing` at
`engine`, `plan` and `plan_and_learner`. Per step: seconds and US dollars, beside `engine`; prompt tokens computed, by
prompt tokens when each shared prefix is counted once, in generation and in the learner; evicted prompt tokens that had
to be computed again. `--markdown` writes the table into a page, where scripts/ write generated parts.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import get_args

from smoke import parsed
from where import machine

from rlhfless.records import FunctionName, StepRecord
from rlhfless.records.ledger import PREFIX_TOKENS_EVICTED, PROMPT_TOKENS_COMPUTED, PROMPT_TOKENS_UNIQUE
from rlhfless.sim.experiment.run import ExperimentTask, RunResult, fleet_of
from rlhfless.sim.experiment.workers import ExperimentWorkers
from rlhfless.sim.scenarios import load_scenario
from rlhfless.sim.scenarios.scenario import PolicyEntry, Scenario
from rlhfless.sim.scenarios.work import PrefixSharing
from rlhfless.spec import WeightedSpec

EXAMPLES = Path(__file__).parents[1] / "examples" / "scenarios"
WAYS: tuple[PrefixSharing, ...] = get_args(PrefixSharing)
HEADINGS = (
    "scenario", "shared prefixes", "s/step", "faster", "$/step", "cheaper", "generation: computed / unique",
    "learner: computed / unique", "evicted / step",
)  # fmt: skip
BEGIN, END = "<!-- prefix ablation -->", "<!-- end of the prefix ablation -->"


@dataclass(frozen=True, slots=True)
class Line:
    """One way of a scenario, means over steps and seeds."""

    step_s: float
    step_usd: float
    generation: float
    learner: float
    evicted_tokens: float

    @classmethod
    def of(cls, runs: Sequence[RunResult]) -> Line:
        records = [record for run in runs if run.trace is not None for record in run.trace.steps]
        figures = [step for run in runs for step in run.steps]
        return cls(
            fmean(step.time_s for step in figures),
            fmean(step.usd for step in figures),
            _ratio(records, FunctionName.GENERATION),
            _ratio(records, FunctionName.LEARNER),
            fmean(record.metrics[PREFIX_TOKENS_EVICTED] for record in records),
        )

    def cells(self, beside: Line) -> tuple[str, ...]:
        return (
            f"{self.step_s:.1f}",
            f"{beside.step_s / self.step_s:.2f}x",
            f"{self.step_usd:.3f}",
            f"{100 * (1 - self.step_usd / beside.step_usd):.0f}%",
            f"{self.generation:.2f}",
            f"{self.learner:.2f}",
            f"{self.evicted_tokens:,.0f}",
        )


def _ratio(records: Sequence[StepRecord], function: FunctionName) -> float:
    computed = math.fsum(record.metrics[f"{PROMPT_TOKENS_COMPUTED}/{function}"] for record in records)
    return computed / math.fsum(record.metrics[f"{PROMPT_TOKENS_UNIQUE}/{function}"] for record in records)


def ablation(scenario: Scenario, policy: str, jobs: int) -> Mapping[PrefixSharing, Line]:
    """Each way of a scenario with prefixes, with the same policy and the same lengths."""
    entry = PolicyEntry(name=policy)
    tasks = []
    for way in WAYS:
        assert scenario.prefixes is not None
        prefixes = scenario.prefixes.model_copy(update={"sharing": way})
        with_way = scenario.model_copy(update={"prefixes": prefixes})
        task = partial(ExperimentTask, with_way, entry, fleet_of(with_way, entry), (WeightedSpec(),), traced=True)
        tasks += [task(seed=seed) for seed in range(scenario.seeds)]
    with ExperimentWorkers(jobs, None) as workers:
        results = workers.run(tasks, 0)
    return {way: Line.of(results[i * scenario.seeds :][: scenario.seeds]) for i, way in enumerate(WAYS)}


def rows_of(scenario: Scenario, lines: Mapping[PrefixSharing, Line]) -> list[tuple[str, ...]]:
    beside = lines["engine"]
    return [(scenario.name, way.replace("_", " "), *line.cells(beside)) for way, line in lines.items()]


def markdown(rows: Sequence[tuple[str, ...]], about: str) -> str:
    table = [HEADINGS, tuple("---" for _ in HEADINGS), *rows]
    return "\n".join([BEGIN, about, "", *(f"| {' | '.join(row)} |" for row in table), END])


def write(path: Path, part: str) -> None:
    """Puts the part where the one before it stands. Raises ValueError for a page without its marks."""
    text = path.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{path} has no lines {BEGIN!r} and {END!r}; add them where the table is to stand")
    path.write_text(before + part + after)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", type=Path, nargs="*", help="scenario files with `prefixes`")
    parser.add_argument("--policy", default="cost_aware", help="name of the policy, under a contract of equal weights")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, help="instead of the scenario's number")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--markdown", type=Path, help="page into which the table is written")
    arguments = parsed(parser, seeds=1, steps=2, scenarios=[EXAMPLES / "few-shot-7b-h100.yaml"])
    paths = arguments.scenarios or sorted(EXAMPLES.glob("*.yaml"))
    print(machine())
    rows: list[tuple[str, ...]] = []
    for path in paths:
        scenario = load_scenario(path)
        if scenario.prefixes is None:
            if arguments.scenarios:
                parser.error(f"{path} has no `prefixes`; there is nothing to share")
            continue
        changes = {"seeds": arguments.seeds, "steps": arguments.steps or scenario.steps}
        scenario = scenario.model_copy(update=changes)
        found = rows_of(scenario, ablation(scenario, arguments.policy, arguments.jobs))
        for row in found if rows else [HEADINGS, *found]:
            print("  ".join(f"{cell:>{max(len(heading), 8)}}" for heading, cell in zip(HEADINGS, row, strict=True)))
        rows += found
    if arguments.markdown is not None:
        about = (
            f"Simulated, policy `{arguments.policy}`, {arguments.seeds} seeds; nothing here was measured on devices."
        )
        write(arguments.markdown, markdown(rows, about))


if __name__ == "__main__":
    main()
