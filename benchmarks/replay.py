"""Seconds of recorded steps, predicted by a fit to runs with one actor: with two actors, another batch, other lengths.

    python benchmarks/replay.py MODEL_FOLDER [--rounds 3] [--steps 12] [--kinds ...] [--keep FOLDER] [--smoke]

MODEL_FOLDER is what `rlhfless models tiny` wrote; the runs are examples/demo.yaml. The four kinds of run are
recorded in turn, round by round, because a shared machine does not keep its pace from one minute to the next. The
latency model is fitted to all runs with one actor (as `rlhfless simulate --calibrate` does) and predicts every step of
the others. "One actor" is predicted by a fit to the one-actor runs of the other rounds: nothing but the machine
differs there, so no model can be expected to be closer. Each error is printed with the error of always predicting the
mean of the fitted steps.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from demo_run import run_demo
from smoke import parsed
from where import machine

from rlhfless.records.traces import read_trace
from rlhfless.sim.replay.calibrate import calibrate
from rlhfless.sim.replay.measured import WALL
from rlhfless.sim.replay.replay import Replay, replay
from rlhfless.sim.workloads.runtime import read_runtime

ONE = "one actor"
ACTORS = "scaling.generation={{min_actors: {0}, max_actors: {0}}}"
KINDS = {
    ONE: [ACTORS.format(1)],
    "two actors": [ACTORS.format(2)],
    "another batch": [ACTORS.format(1), "prompts_per_step=12"],
    "shorter responses": [ACTORS.format(1), "generation.max_tokens=48"],
}


def record(model: Path, output: Path, steps: int, changes: Sequence[str], smoke: bool) -> Path:
    """One run; returns its trace."""
    settings = [f"steps={steps}", "evaluation.every_steps=null", *changes]
    return run_demo(model, output, settings, smoke) / "trace"


def again(trace: Path, fitted_to: Sequence[Path]) -> Replay:
    return replay(read_trace(trace), read_runtime(trace), calibrate([read_trace(other) for other in fitted_to]))


def report(kind: str, replays: Sequence[Replay]) -> None:
    """The median error over the steps of all runs of a kind."""
    stages = [error.stage for error in replays[0].errors]
    texts = []
    for stage in (WALL, *(stage for stage in stages if stage != WALL)):
        rows = [
            (step.predicted_s[stage], one.mean_s[stage], step.measured_s[stage])
            for one in replays
            for step in one.steps
            if step.measured_s[stage] > 0
        ]
        ours, mean = (statistics.median(abs(row[at] - row[2]) / row[2] for row in rows) for at in (0, 1))
        texts.append(f"{stage} {100 * ours:.1f} % (mean's {100 * mean:.1f} %)")
    measured = [f"{statistics.mean(step.measured_s[WALL] for step in one.steps):.2f}" for one in replays]
    print(f"{kind:18} {', '.join(texts)}; measured {', '.join(measured)} s a step", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=lambda text: Path(text).absolute())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--keep", type=Path, help="folder to keep the runs in; those that are there are not run again")
    arguments = parsed(parser, rounds=1, steps=2, kinds=[ONE])
    kinds = [ONE, *(kind for kind in arguments.kinds if kind != ONE)]  # all are fitted to runs with one actor
    print(machine())
    with tempfile.TemporaryDirectory() as name:
        folder = (arguments.keep or Path(name)).absolute()
        traces: dict[str, list[Path]] = {kind: [] for kind in kinds}
        for number in range(arguments.rounds):
            for kind in kinds:
                output = folder / f"{kind.replace(' ', '-')}-{number + 1}"
                there = sorted(output.glob("*/trace"))
                if not there:
                    there = [record(arguments.model, output, arguments.steps, KINDS[kind], arguments.smoke)]
                traces[kind].append(there[0])
        ones = traces[ONE]
        for kind, recorded in traces.items():
            others = [[other for other in ones if other != trace] or ones for trace in recorded]
            report(kind, [again(trace, fitted_to) for trace, fitted_to in zip(recorded, others, strict=True)])


if __name__ == "__main__":
    main()
