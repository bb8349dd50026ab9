"""`rlhfless plan`: memory, time and cost of a run on given devices, before anything is started."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlhfless.cli.options import (
    Limit,
    Overrides,
    Quantizations,
    SharedPrefixes,
    SpecFile,
    Speculations,
)
from rlhfless.spec.fleet import MOST_TENANTS

if TYPE_CHECKING:
    from rlhfless.planning.memory_plan import MemoryPlan, Question
    from rlhfless.planning.resolve import ResolvedRun
    from rlhfless.planning.suggestions import Change
    from rlhfless.prediction.run_plan import Planner

DOES_NOT_FIT = 1
"""Exit code of a plan whose run would be refused, as of a test that fails."""


def plan(
    spec: SpecFile,
    overrides: Overrides = None,
    devices: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NxKIND",
            help="Devices, such as 8xh100, or 8xl40s+2xh100 with the learner's last. Default: this machine's.",
        ),
    ] = None,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare", help="Compare devices and placements: those of --devices, or the best of the price book."
        ),
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder to write run.yaml and values.yaml of a compared row to.")
    ] = None,
    row: Annotated[
        int | None,
        typer.Option(min=1, help="Number of the row to write. Default: the first that can run."),
    ] = None,
    quantization: Quantizations = None,
    speculation: Speculations = None,
    share_prefixes: SharedPrefixes = None,
    limit: Limit = None,
    lengths_of: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Use response lengths and latencies of this recorded run."),
    ] = None,
    measured: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Use the speeds in this report of `rlhfless selftest SPEC --out FILE`."),
    ] = None,
    runs: Annotated[
        int | None,
        typer.Option(
            min=2,
            max=MOST_TENANTS,
            help="Also compare ways to place this number of such runs: on parts, in turns, with shared engines.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Show memory per device and phase, the nearest change that fits, and the time and cost of the run.

    `--compare` shows where the run would be faster or cheaper. `rlhfless runs plan` and `runs compare` ask a service.
    """
    from rlhfless.planning.inputs import local_devices, parsed_sides
    from rlhfless.planning.memory_plan import edited
    from rlhfless.planning.resolve import resolve
    from rlhfless.prediction.run_plan import Planner
    from rlhfless.records.traces import read_trace, trace_folder
    from rlhfless.spec.load import load_spec

    loaded = load_spec(spec, overrides or ())
    trace = None if lengths_of is None else read_trace(trace_folder(lengths_of), tokens=False)
    tried = {"quantization": quantization, "speculation": speculation, "share_prefixes": share_prefixes}
    if runs is not None and (compare or loaded.supervised):
        what = "runs that learn from written responses share no engines" if loaded.supervised else "not with --compare"
        raise typer.BadParameter(what, param_hint="--runs")
    if compare:
        from rlhfless.cli.plan_compare import compare_devices

        if measured is not None:
            hint = "compare without it, or plan the devices of the report alone; --lengths-of takes a run's latencies"
            raise typer.BadParameter(f"a report is of one kind of device; {hint}", param_hint="--measured")
        compare_devices(Planner(loaded, trace), devices or (), tried, limit, out, row, as_json=as_json)
        return
    if devices is not None and len(devices) > 1:
        raise typer.BadParameter("multiple devices require --compare", param_hint="--devices")
    for name, value in (tried | {"out": out, "limit": limit}).items():
        if value:
            raise typer.BadParameter("requires --compare", param_hint=f"--{name.replace('_', '-')}")
    of_run, apart = parsed_sides(devices[0], draws=not loaded.supervised) if devices else (local_devices(loaded), {})
    resolved = resolve(edited(loaded, apart), of_run, required=True)
    asked = resolved.asked
    assert asked is not None
    latency = None
    if measured is not None:
        from rlhfless.selftest.report import measured_latency

        latency = measured_latency(measured, asked)
    planner = Planner(asked.spec, trace, latency)
    sizes = planner.sizes(edited(loaded, apart), of_run.kind, of_run.count)
    if not _show(resolved, planner, sizes, trace is not None, as_json, runs):
        raise typer.Exit(DOES_NOT_FIT)


def _show(
    resolved: ResolvedRun,
    planner: Planner,
    sizes: dict[str, Any] | None,
    has_trace: bool,
    as_json: bool,
    runs: int | None,
) -> bool:
    """Print a plan, and return whether a run would be accepted. `runs`: see `plan`."""
    from rlhfless.cli.plan_tables import cost_lines, memory_lines, sizes_lines, verdict_lines
    from rlhfless.cli.simulate_tables import arrangements_table
    from rlhfless.planning.resolve import plan_problems
    from rlhfless.planning.suggestions import nearest_change
    from rlhfless.telemetry.terminal import Prose, Terminal

    asked, planned = resolved.asked, resolved.memory
    assert asked is not None
    assert planned is not None
    problems = plan_problems(asked, planned)
    change = None if planned.fits else nearest_change(asked)
    if as_json:
        found = planner.row(asked)
        prefill = planner.prefill(asked)
        cost = {key: found[key] for key in ("predicted", "costs_usd", "reason")}
        cost |= {"lengths": planner.lengths.source} | planner.schedules(asked, found)
        cost["prefill"] = None if prefill is None else asdict(prefill)
        cost["sizes"] = sizes
        if runs is not None:
            cost["arrangements"] = [asdict(each) for each in planner.arranged(asked, runs)[1]]
        cost["decided"] = [asdict(each) for each in resolved.decided]
        typer.echo(json.dumps(_as_json(asked, planned, problems, change) | cost, indent=2))
        return not problems
    lines = memory_lines(asked, planned, problems, change)
    if not problems:
        found = planner.row(asked)
        schedules = planner.schedules(asked, found)
        hint = "" if has_trace else "; --lengths-of takes them from a recorded run"
        lines += cost_lines(found, schedules, f"{planner.lengths.source}{hint}")
        lines += [] if sizes is None else sizes_lines(sizes)
        lines += [] if (prefill := planner.prefill(asked)) is None else [Prose(prefill.text)]
        lines += verdict_lines(found, schedules)
        if runs is not None:
            scenario, ways = planner.arranged(asked, runs)
            lines += ["", arrangements_table(scenario, runs, ways)]
    console = Terminal()
    for line in lines:
        console.print(line)
    return not problems


def _as_json(asked: Question, plan: MemoryPlan, problems: tuple[str, ...], change: Change | None) -> dict[str, Any]:
    values = asdict(plan) | {"fits": not problems, "problems": problems}
    for device, plan_ in zip(values["devices"], plan.devices, strict=True):
        device["size_bytes"], device["fits"] = plan_.size_bytes, plan_.fits
    return values | {
        "parameters": asked.shape.parameters,
        "device": {"kind": asked.sheet.kind, "count": asked.count},
        "nearest_change": None if change is None else change.text,
    }
