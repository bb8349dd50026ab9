"""`rlhfless simulate --replay` and `--calibrate`: recorded runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer
from pydantic import TypeAdapter
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from rlhfless.records.traces import Trace, read_trace, trace_folder
from rlhfless.scaling.plan import RunContract
from rlhfless.scaling.policies import make_policy
from rlhfless.scaling.policies.registry import PolicyError, configured
from rlhfless.scaling.policy import Policy
from rlhfless.sim.replay.calibrate import calibrate as fit
from rlhfless.sim.replay.latency_file import load_latency, write_latency
from rlhfless.sim.replay.replay import AS_RECORDED, Replay
from rlhfless.sim.replay.replay import replay as simulate_again
from rlhfless.sim.workloads.runtime import read_runtime
from rlhfless.spec import ContractSpec, WeightedSpec
from rlhfless.telemetry.numbers import decimal, money


def calibrate(folders: Sequence[Path], out: Path) -> None:
    """Fits the latency model to all steps of the traces and writes it."""
    latency = fit([read_trace(trace_folder(folder)) for folder in folders])
    write_latency(latency, out)
    typer.echo(f"{out}: fitted to {latency.steps} steps of {', '.join(latency.traces)}")


def replay(folder: Path, policy: str | None, latency: Path | None) -> None:
    """Prints predicted and measured seconds; with a policy, the seconds that it would have taken."""
    folder = trace_folder(folder)
    trace = read_trace(folder, tokens=False)
    typer.echo(f"replaying {len(trace.steps)} steps of {trace.meta.run_id}", err=True)
    chosen = None if policy is None else (policy, _policy(policy, trace))
    again = simulate_again(trace, read_runtime(folder), load_latency(latency) if latency else None, chosen)
    Console(highlight=False).print(replay_table(again))


def _policy(name: str, trace: Trace) -> Policy:
    """The named policy under the contract of the run, with the run's own keys if the run used this policy. Raises
    BadParameter for an unknown name."""
    scaling = trace.meta.spec.get("scaling") or {}
    contract = TypeAdapter(ContractSpec).validate_python(scaling["contract"]) if "contract" in scaling else None
    run = RunContract(contract or WeightedSpec(), len(trace.steps))
    ran = scaling.get("policy")
    keys = ran if isinstance(ran, dict) and ran.get("type") == name else {}
    try:
        return make_policy(name, configured(name, keys), run)
    except PolicyError as error:
        raise typer.BadParameter(f"--policy: {error}") from error


def replay_table(again: Replay) -> RenderableType:
    """Seconds by stage, predicted / measured, of every step; and over all."""
    stages = [error.stage for error in again.errors]
    steps = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    steps.add_column("step", justify="right")
    for stage in stages:
        steps.add_column(stage, justify="right", no_wrap=True)
    for step in again.steps:
        pairs = [(step.predicted_s[stage], step.measured_s[stage]) for stage in stages]
        steps.add_row(str(step.step), *(f"{predicted:.2f} / {measured:.2f}" for predicted, measured in pairs))
    over_all = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    over_all.add_column("seconds per step", no_wrap=True)
    off = "median error %" if again.policy == AS_RECORDED else "median change %"
    for heading in ("predicted", "measured", off, "of the mean %"):
        over_all.add_column(heading, justify="right")
    for error in again.errors:
        shares = (decimal(100 * share, 1) for share in (error.error, error.error_of_mean))
        over_all.add_row(error.stage, decimal(error.predicted_s), decimal(error.measured_s), *shares)
    prompts = [
        f"prompt tokens computed / unique, {each.function}  "
        f"{each.predicted:.2f} predicted, {each.measured:.2f} measured"
        for each in again.prompt_tokens
    ]
    cost = f"{money(again.predicted_usd)} predicted, {money(again.measured_usd)} measured"
    legend = (
        "above: predicted / measured seconds. of the mean: the median error of always predicting the mean of the "
        "fitted steps."
    )
    faults = [str(step.step) for step in again.steps if step.done_again]
    if faults:
        legend += (
            f" Steps {', '.join(faults)} were done again after a fault: measured is their last try, and the errors and "
            "means leave them out."
        )
    title = Text.assemble((again.run_id, "bold"), f"  {again.policy}; fitted to {again.fitted_to}")
    last: tuple[RenderableType, ...] = (f"cost of these steps  {cost}", *prompts, Text(legend, style="dim"))
    return Group(title, "", steps, "", over_all, "", *last)
