"""`rlhfless simulate --replay` and `--calibrate`: recorded runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from rlhfless.cli.trace import inner_folder
from rlhfless.records.traces import read_trace
from rlhfless.scaling.policies import POLICIES
from rlhfless.sim.replay.calibrate import calibrate as fit
from rlhfless.sim.replay.latency_file import load_latency, write_latency
from rlhfless.sim.replay.replay import Replay
from rlhfless.sim.replay.replay import replay as simulate_again
from rlhfless.sim.workloads.runtime import read_runtime
from rlhfless.spec.explain import nearest
from rlhfless.telemetry.numbers import decimal, money


def calibrate(folders: Sequence[Path], out: Path) -> None:
    """Fits the latency model to all steps of the traces and writes it."""
    latency = fit([read_trace(inner_folder(folder)) for folder in folders])
    write_latency(latency, out)
    typer.echo(f"{out}: fitted to {latency.steps} steps of {', '.join(latency.traces)}")


def replay(folder: Path, policy: str | None, latency: Path | None) -> None:
    """Prints predicted beside measured seconds; with a policy, what it would have taken."""
    folder = inner_folder(folder)
    trace = read_trace(folder)
    chosen = None
    if policy is not None:
        if policy not in POLICIES:
            raise typer.BadParameter(
                f"--policy is {policy!r}; {nearest(policy, POLICIES)}There are {', '.join(POLICIES)}"
            )
        kind = POLICIES[policy]
        chosen = (policy, kind.make(kind.settings(steps=len(trace.steps))))
    again = simulate_again(trace, read_runtime(folder), load_latency(latency) if latency else None, chosen)
    Console(highlight=False).print(replay_table(again))


def replay_table(again: Replay) -> RenderableType:
    """Seconds by stage, predicted and measured, of every step and over all."""
    stages = [error.stage for error in again.errors]
    steps = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    steps.add_column("step", justify="right")
    for stage in stages:
        steps.add_column(f"{stage}\npredicted / s", justify="right")
        steps.add_column("\nmeasured / s", justify="right")
    for step in again.steps:
        cells = [cell for stage in stages for cell in (step.predicted_s[stage], step.measured_s[stage])]
        steps.add_row(str(step.step), *map(decimal, cells))
    over_all = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    over_all.add_column("seconds per step", no_wrap=True)
    for heading in ("predicted", "measured", "median error %", "of the mean %"):
        over_all.add_column(heading, justify="right")
    for error in again.errors:
        known = None if error.error_of_mean == float("inf") else 100 * error.error_of_mean
        row = (decimal(error.predicted_s), decimal(error.measured_s), decimal(100 * error.error, 1), decimal(known, 1))
        over_all.add_row(error.stage, *row)
    cost = f"{money(again.predicted_usd)} predicted, {money(again.measured_usd)} measured"
    legend = "of the mean: the median error of always saying the mean of the steps that were fitted to."
    title = Text.assemble((again.run_id, "bold"), f"  {again.policy}; fitted to {again.fitted_to}")
    return Group(title, "", steps, "", over_all, "", f"cost of these steps  {cost}", Text(legend, style="dim"))
