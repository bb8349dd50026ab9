"""`rlhfless plan`: memory, time and cost of a run on given devices, before anything is started."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
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

if TYPE_CHECKING:
    from rlhfless.planning.memory_plan import MemoryPlan, Question
    from rlhfless.planning.suggestions import Change

DOES_NOT_FIT = 1
"""Exit code of a plan whose run would be refused, as of a test that fails."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(plan)


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
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Show memory per device and phase, the nearest change that fits, and the time and cost of the run.

    `--compare` shows where the run would be faster or cheaper. `rlhfless runs plan` and `runs compare` ask a service.
    """
    from rlhfless.planning.inputs import local_devices, parsed_sides
    from rlhfless.planning.memory_plan import edited
    from rlhfless.planning.resolve import plan_problems, resolve
    from rlhfless.planning.run_plan import Planner
    from rlhfless.planning.suggestions import nearest_change
    from rlhfless.records.traces import read_trace, trace_folder
    from rlhfless.spec.load import load_spec

    loaded = load_spec(spec, overrides or ())
    trace = None if lengths_of is None else read_trace(trace_folder(lengths_of), tokens=False)
    tried = {
        "quantization": quantization,
        "speculation": speculation,
        "share_prefixes": share_prefixes,
    }
    if compare:
        from rlhfless.cli.plan_compare import Asked, compare_devices

        _refuse_with_compare(measured)
        asked_for = Asked(devices or (), tried, limit)
        compare_devices(Planner(loaded, trace), asked_for, out, row, as_json=as_json)
        return
    options: dict[str, object] = {f"--{name.replace('_', '-')}": values for name, values in tried.items()}
    _refuse_without_compare(devices, options | {"--out": out, "--limit": limit})
    of_run, apart = parsed_sides(devices[0], draws=not loaded.supervised) if devices else (local_devices(loaded), {})
    resolved = resolve(edited(loaded, apart), of_run, required=True)
    asked, planned = resolved.asked, resolved.memory
    assert asked is not None
    assert planned is not None
    latency = None
    if measured is not None:
        from rlhfless.selftest.report import measured_latency

        latency = measured_latency(measured, asked)
    problems = plan_problems(asked, planned)
    change = None if planned.fits else nearest_change(asked)
    planner = Planner(asked.spec, trace, latency)
    if as_json:
        found = planner.row(asked)
        prefill = planner.prefill(asked)
        cost = {key: found[key] for key in ("predicted", "costs_usd", "reason")}
        cost |= {"lengths": planner.lengths.source} | planner.schedules(asked, found)
        cost["prefill"] = None if prefill is None else asdict(prefill)
        cost["decided"] = [asdict(each) for each in resolved.decided]
        typer.echo(json.dumps(_as_json(asked, planned, problems, change) | cost, indent=2))
    else:
        _show(asked, planned, problems, change)
        if not problems:
            hint = "" if trace else "; --lengths-of takes them from a recorded run"
            found = planner.row(asked)
            schedules = planner.schedules(asked, found)
            _show_cost(found, schedules, planner.lengths.source, hint)
            if (prefill := planner.prefill(asked)) is not None:
                typer.echo(prefill.text)
            _show_verdict(found, schedules)
    if problems:
        raise typer.Exit(DOES_NOT_FIT)


def _refuse_with_compare(measured: Path | None) -> None:
    if measured is not None:
        hint = "compare without it, or plan the devices of the report alone; --lengths-of takes a run's latencies"
        raise typer.BadParameter(f"a report is of one kind of device; {hint}", param_hint="--measured")


def _refuse_without_compare(devices: list[str] | None, given: Mapping[str, object]) -> None:
    if devices is not None and len(devices) > 1:
        raise typer.BadParameter("multiple devices require --compare", param_hint="--devices")
    for option, value in given.items():
        if value:
            raise typer.BadParameter("requires --compare", param_hint=option)


def _as_json(asked: Question, plan: MemoryPlan, problems: tuple[str, ...], change: Change | None) -> dict[str, Any]:
    values = asdict(plan) | {"fits": not problems, "problems": problems}
    for device, plan_ in zip(values["devices"], plan.devices, strict=True):
        device["size_bytes"], device["fits"] = plan_.size_bytes, plan_.fits
    return values | {
        "parameters": asked.shape.parameters,
        "device": {"kind": asked.sheet.kind, "count": asked.count},
        "nearest_change": None if change is None else change.text,
    }


def _learner_devices(asked: Question) -> str:
    """The learner's devices of another kind; nothing where there are none."""
    kind = asked.spec.placement.learner_kind
    return "" if kind is None else f" and {asked.learner_count} x {kind} for the learner"


def _show(asked: Question, plan: MemoryPlan, problems: tuple[str, ...], change: Change | None) -> None:
    from rlhfless.cli.tables import table
    from rlhfless.planning.host_memory import CHART_KEY, chart_shared_memory
    from rlhfless.scaling.memory import GIB
    from rlhfless.telemetry.numbers import parameter_count
    from rlhfless.telemetry.terminal import Prose, Terminal

    console = Terminal()

    def say(text: str, style: str = "") -> None:
        console.print(Prose(text, style))

    say(
        f"{parameter_count(asked.shape.parameters)} parameters on {asked.count} x {asked.sheet.kind}"
        f"{_learner_devices(asked)}, {asked.spec.placement.mode}, sequences of at most {plan.sequence_tokens:,} tokens"
    )
    sizes = table("device", "function", "phase", "parts", "GiB", texts=4)
    sizes.columns[0].no_wrap = False
    for device in plan.devices:
        name = f"{device.count} x {device.kind}"
        for part, ranks in Counter(device.functions).items():
            function = str(part.function) if ranks == 1 else f"{ranks} x {part.function}"
            for phase in part.phases:
                largest = phase is part.largest
                parts = ", ".join(f"{p.name} {p.size_bytes / GIB:.1f}" for p in phase.parts if p.size_bytes)
                size = f"{phase.size_bytes / GIB:.1f}"
                sizes.add_row(
                    name, function, phase.name, parts if largest else "", size, style="" if largest else "dim"
                )
                name = function = ""
        state = "fits in" if device.fits else "[red]does not fit in[/red]"
        sizes.add_row("", f"{state} {device.memory_bytes / GIB:.1f}", "", "", f"{device.size_bytes / GIB:.1f}")
    console.print(sizes)
    cache = "" if plan.kv_tokens is None else f"KV cache of an actor: {max(plan.kv_tokens, 0):,} tokens; "
    say(
        f"{cache}largest micro-batch: {plan.micro_batch_tokens:,} tokens (learner.micro_batch_tokens is "
        f"{asked.spec.learner.pass_tokens:,}); activations are "
        f"{'computed twice' if asked.spec.learner.recomputes else 'kept'} (learner.gradient_checkpointing)"
    )
    say(
        f"host memory {plan.host_bytes / GIB:.1f} GiB in all; shared memory {plan.shared_bytes / GIB:.1f} GiB on the "
        f"learner's node, {plan.cache_bytes / GIB:.1f} on each other one; {plan.checkpoint_bytes / GIB:.1f} GiB more "
        "host memory while a checkpoint is written in the background"
    )
    say(f"on Kubernetes at least {CHART_KEY}: {chart_shared_memory(plan.shared_bytes)}, for each run at once")
    if asked.sheet.no_engine is not None:
        say(f"a plan only: {asked.sheet.no_engine}", style="red")
    learner = asked.spec.learner
    if learner.copies > 1:
        say(
            f"the learner's states are split over {learner.split_over(learner.world_size)} ranks each, in "
            f"{learner.copies} copies (learner.shard_ranks)"
        )
    for problem in problems:
        say(f"refused: {problem}", style="red")
    if change is not None:
        say(f"nearest change that fits: {change.text}")
    elif not plan.fits:
        say(
            "no one or two changes that are known here make it fit. The states of the learner are "
            f"{16 * asked.shape.parameters / GIB:.1f} GiB, which its ranks share: see docs/sizing.md"
        )


def _show_verdict(row: Mapping[str, Any], schedules: Mapping[str, Any]) -> None:
    """What to take, and which schedule would be faster with older samples."""
    from rlhfless.planning.objects import PlannedSchedule
    from rlhfless.telemetry.numbers import clock, money
    from rlhfless.telemetry.terminal import Prose, Terminal

    if row["predicted"] is None:
        return
    rows = [PlannedSchedule.model_validate(each) for each in schedules["schedules"]]
    wall_s, usd = row["predicted"]["wall_s"], row["predicted"]["cost_usd"]
    chosen = next((each for each in rows if each.chosen), None)
    name = ""
    if chosen is not None and chosen.wall_s is not None and chosen.cost_usd is not None:
        name, wall_s, usd = f" with schedule {chosen.schedule}", chosen.wall_s, chosen.cost_usd
    text = f"Take these devices{name}: {clock(wall_s)} for {money(usd)}."
    faster = [each for each in rows if each.refused is None and each.wall_s is not None and each.wall_s < 0.99 * wall_s]
    if faster:
        best = min(faster, key=lambda each: each.wall_s or 0.0)
        assert best.wall_s is not None
        text += (
            f" Where samples may be {best.max_staleness} versions old, {best.schedule} takes "
            f"{best.wall_s / wall_s:.2f} times as long, for {money(best.cost_usd)}."
        )
    console = Terminal()
    console.print()
    console.print(Prose(text, style="bold"))


def _show_cost(row: dict[str, Any], schedules: dict[str, Any], lengths: str, hint: str) -> None:
    """Time and cost, as the service's plan has them."""
    from rlhfless.cli.runs_tables import devices_lines, schedules_lines
    from rlhfless.planning.objects import PlannedDevices, PlannedSchedule
    from rlhfless.telemetry.numbers import money
    from rlhfless.telemetry.terminal import Prose, Terminal, whole
    from rlhfless.util.text import legible

    console = Terminal()
    console.print()
    console.print(devices_lines([PlannedDevices.model_validate(row)]))
    if rows := [PlannedSchedule.model_validate(each) for each in schedules["schedules"]]:
        console.print()
        console.print(schedules_lines(rows, schedules["schedule_reason"]))
    for source, usd in row["costs_usd"].items():
        text = "no price was read" if usd is None else money(usd)
        console.print(Prose(f"the run at the price of the table, {source}: {text}"))
    console.print(whole(f"response lengths: {legible(lengths)}{hint}"))
