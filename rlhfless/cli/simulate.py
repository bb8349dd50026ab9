"""`rlhfless simulate`: time and cost of policies on a scenario, or on a recorded run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlhfless.spec.fleet import MOST_TENANTS

MOST_ARRIVING, MOST_LOAD = 100_000, 2.0

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
            min=2,
            max=MOST_ARRIVING,
            help=f"Number of runs that share the cluster, each on its own part or time-sliced; up to {MOST_TENANTS} "
            "without --arrivals.",
        ),
    ] = None,
    arrivals: Annotated[
        str | None,
        typer.Option(
            metavar="poisson:LOAD,...|FILE",
            help="Let runs come and go: at random, at these shares of the cluster's greatest throughput, or as in a "
            "CSV file with columns at_s and steps.",
        ),
    ] = None,
    run_steps: Annotated[
        str, typer.Option(metavar="N,N", help="With --arrivals poisson: steps of a run, drawn from these.")
    ] = "40",
    change_s: Annotated[
        float, typer.Option(min=0, help="With --arrivals: seconds that a change of an elastic run's size costs.")
    ] = 60.0,
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
            if arrivals is not None:
                _arrivals(path, arrivals, runs or 200, run_steps, change_s, seeds or 1)
            elif runs is None:
                _compare(path, policies, seeds, out or Path("simulations"), jobs)
            elif runs > MOST_TENANTS:
                what = f"{runs} runs that begin together, more than {MOST_TENANTS}"
                raise typer.BadParameter(f"{what}; ask for fewer, or add --arrivals", param_hint="--runs")
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


def _arrivals(path: Path, arrivals: str, runs: int, run_steps: str, change_s: float, seeds: int) -> None:
    from rlhfless.cli.simulate_tables import arrivals_table
    from rlhfless.sim.experiment.arrivals import compare_arrivals, poisson, read_arrivals, speeds_of, turns_of
    from rlhfless.sim.scenarios import load_scenario
    from rlhfless.telemetry.terminal import Terminal

    kind, _, text = arrivals.partition(":")
    loads = _numbers("--arrivals", text) if kind == "poisson" else []
    if not all(0 < load <= MOST_LOAD for load in loads):
        raise typer.BadParameter(f"loads are above 0 and at most {MOST_LOAD:g}, got {text}", param_hint="--arrivals")
    steps = [int(number) for number in _numbers("--run-steps", run_steps)]
    if min(steps) < 1:
        raise typer.BadParameter(f"a run has at least 1 step, got {run_steps}", param_hint="--run-steps")
    arriving = [] if loads else read_arrivals(Path(arrivals))
    scenario = load_scenario(path)
    speeds, rows = speeds_of(scenario), []
    turns = turns_of(scenario, speeds)
    for load in loads:
        for seed in range(seeds):
            label = f"load {load:g}" if seeds == 1 else f"load {load:g}, seed {seed}"
            drawn = poisson(speeds, load, runs, steps, seed)
            rows.append(compare_arrivals(label, speeds, drawn, change_s, turns))
    if arriving:
        rows.append(compare_arrivals(Path(arrivals).name, speeds, arriving, change_s, turns))
    what = f"{runs} runs of {run_steps} steps" if loads else f"{len(arriving)} runs of {arrivals}"
    Terminal().print(arrivals_table(speeds, scenario.name, f"{what}, {change_s:g} s a change", rows))


def _numbers(option: str, text: str) -> list[float]:
    try:
        return [float(number) for number in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{text!r} has no numbers; write them as 0.4,0.6", param_hint=option) from None


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
