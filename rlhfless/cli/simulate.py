"""`rlhfless simulate`: time and cost of policies on a scenario, or on a recorded run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlhfless.spec.fleet import MOST_TENANTS

if TYPE_CHECKING:
    from rlhfless.sim.replay.what_if import OtherDevices


def simulate(
    inputs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="SCENARIO...", help="Scenario files; with --calibrate, folders of recorded runs."),
    ] = None,
    policies: Annotated[
        str | None, typer.Option(metavar="A,B", help="Labels of the scenario's policies to simulate. Default: all.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Number of seeds. Default: the scenario's.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Folder for reports; with --calibrate or --replay, the file to write."),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Number of parallel processes.")] = 1,
    runs: Annotated[
        int | None,
        typer.Option(
            min=2, max=MOST_TENANTS, help="Number of runs that share the cluster, each on its own part or time-sliced."
        ),
    ] = None,
    replay: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Recorded run to replay, with predicted and measured seconds.")
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="With --replay: another policy, by name or module:Class."),
    ] = None,
    actors: Annotated[
        int | None, typer.Option(min=1, help="With --replay: another number of generation actors.")
    ] = None,
    kind: Annotated[
        str | None,
        typer.Option(metavar="KIND", help="With --replay: another kind of accelerator, extrapolated from data sheets."),
    ] = None,
    ahead: Annotated[
        int | None,
        typer.Option(min=0, max=16, help="With --replay: steps generated ahead of the learner; 0 is sync."),
    ] = None,
    latency: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --replay: a file written by --calibrate.")
    ] = None,
    calibrate: Annotated[bool, typer.Option("--calibrate", help="Fit the latency model to recorded runs.")] = False,
) -> None:
    """Simulate scaling policies on a scenario: time, cost and regret, with confidence intervals."""
    paths = inputs or []
    if calibrate:
        _calibrate(_require_some(paths, "folder of a recorded run"), out or Path("latency.yaml"))
    elif replay is not None:
        if paths:
            raise typer.BadParameter(f"--replay takes no scenario, got {paths[0]}; leave one of the two out")
        from rlhfless.sim.replay.what_if import OtherDevices

        _replay(replay, policy, latency, out, OtherDevices(kind, actors, ahead))
    else:
        for path in _require_some(paths, "scenario file"):
            if runs is None:
                _compare(path, policies, seeds, out or Path("simulations"), jobs)
            else:
                _share(path, runs)


def _require_some(paths: list[Path], what: str) -> list[Path]:
    if not paths:
        raise typer.BadParameter(f"no {what} was given; name at least one")
    return paths


def _share(path: Path, runs: int) -> None:
    from rlhfless.cli.simulate_tables import arrangements_table
    from rlhfless.sim.experiment.shared import arrangements
    from rlhfless.sim.scenarios import load_scenario
    from rlhfless.telemetry.terminal import Terminal

    scenario = load_scenario(path)
    Terminal().print(arrangements_table(scenario, runs, arrangements(scenario, [runs])[runs]))


def _compare(path: Path, policies: str | None, seeds: int | None, out: Path, jobs: int) -> None:
    from rlhfless.cli.simulate_progress import shown
    from rlhfless.cli.simulate_tables import comparison_table
    from rlhfless.sim.experiment.compare import compare
    from rlhfless.sim.report import write_report
    from rlhfless.sim.scenarios import load_scenario
    from rlhfless.telemetry.terminal import Terminal

    scenario = load_scenario(path)
    if seeds is not None:
        scenario = scenario.model_copy(update={"seeds": seeds})
    labels = policies.split(",") if policies else [entry.shown for entry in scenario.policies]
    with shown(scenario, len(labels), jobs) as progress:
        comparison = compare(scenario, labels, jobs, progress)
    Terminal().print(comparison_table(comparison))
    folder = out / scenario.name
    write_report(comparison, folder)
    typer.echo(f"\n{folder / 'report.html'}")


def _calibrate(folders: Sequence[Path], out: Path) -> None:
    """Fit the latency model to all steps of the traces, and write it."""
    from rlhfless.records.traces import read_trace, trace_folder
    from rlhfless.sim.replay.latency_file import write_latency
    from rlhfless.sim.replay.replay import fitted
    from rlhfless.sim.workloads.recorded import read_runtime

    traces = [read_trace(trace_folder(folder), tokens=False) for folder in folders]
    latency = fitted(traces, [read_runtime(trace_folder(folder)) for folder in folders])
    write_latency(latency, out)
    typer.echo(f"{out}: fitted to {latency.steps} steps of {', '.join(latency.traces)}")


def _replay(folder: Path, policy: str | None, latency: Path | None, out: Path | None, other: OtherDevices) -> None:
    """Print predicted and measured seconds, or another policy or other devices compared with the replay as recorded.

    Write them to `out`, if given."""
    import json

    from rlhfless.cli.simulate_tables import beside_table, replay_table
    from rlhfless.records.traces import read_trace, trace_folder
    from rlhfless.sim.policies import PolicyError
    from rlhfless.sim.replay.beside import Beside
    from rlhfless.sim.replay.calibrate import device_kind
    from rlhfless.sim.replay.latency_file import load_latency
    from rlhfless.sim.replay.recorded import AS_IT_WAS
    from rlhfless.sim.replay.replay import fitted, replay
    from rlhfless.sim.replay.what_if import policy_of, run_policy
    from rlhfless.sim.workloads.recorded import read_runtime
    from rlhfless.telemetry.terminal import Terminal

    folder = trace_folder(folder)
    trace = read_trace(folder, tokens=False)
    typer.echo(f"replaying {len(trace.steps)} steps of {trace.meta.run_id}", err=True)
    try:
        chosen = None if policy is None and other.actors is None else run_policy(trace, policy)
    except PolicyError as error:
        raise typer.BadParameter(f"--policy: {error}") from error
    fit = load_latency(latency) if latency else None
    drawn = read_runtime(folder)
    again = replay(trace, drawn, fit, chosen, other)
    report = again.report()
    if chosen is None and other == AS_IT_WAS:
        Terminal().print(replay_table(again))
    else:
        # A fit to other devices says nothing of the run's own.
        own = fit if fit is None or fit.device_kind == device_kind(trace) else fitted([trace], [drawn])
        beside = Beside(again, replay(trace, drawn, own), policy_of(trace), other.max_staleness)
        Terminal().print(beside_table(beside))
        report |= {"as_recorded": beside.base.report(), "times": beside.times, "costs": beside.costs}
    if out is not None:
        out.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
