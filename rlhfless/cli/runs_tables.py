"""Runs of a service as tables, and a run followed live, as `rlhfless run` shows its own."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Sequence

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rlhfless.cli.tables import final_report, functions_table, table
from rlhfless.client import Client
from rlhfless.client.errors import ApiFault, ServiceAway
from rlhfless.control.lifecycle import AT_REST, DRIVEN, Status
from rlhfless.control.objects import CheckpointObject, EventObject, FleetObject, RunObject, UsageObject
from rlhfless.telemetry.console import Console
from rlhfless.telemetry.terminal import Prose, clock, count, decimal, money, whole
from rlhfless.util.text import legible

REASONS_FROM = 110
"""Columns of a terminal that is wide enough for the reasons of runs' statuses."""


def runs_table(runs: Sequence[RunObject], width: int | None) -> Table:
    """Render a line per run, with the reason of its status if there is room. `width`: None for unlimited lines."""
    made = table("run", "status", "step", "reward", "cost", "left", texts=2)
    for column in made.columns:
        column.no_wrap = True
    if width is None or width >= REASONS_FROM:
        made.expand = width is not None
        made.add_column("", no_wrap=True, ratio=1)  # what the other columns leave
    for run in runs:
        cells: list[str | Text] = [
            run.id,
            str(run.status),
            f"{count(run.step)}/{count(run.steps)}",
            decimal(run.latest.get("reward_mean")),
            money(run.cost_usd),
            clock(run.left_s) if run.left_s is not None else "",
            Text(legible(" ".join(run.status_reason.split())), style="dim", overflow="ellipsis"),
        ]
        made.add_row(*cells[: len(made.columns)])
    return made


def best_by(checkpoint: CheckpointObject) -> str:
    """Say why a checkpoint is the best: metric, value and step."""
    if checkpoint.score is None:
        return f"the newest, because {checkpoint.metric or 'checkpoint.best.metric'} was not measured at a saved step"
    return f"{checkpoint.metric or 'score'} = {checkpoint.score:.4g} after step {checkpoint.step}"


def run_lines(run: RunObject) -> RenderableType:
    """Render a run in a few lines."""
    head = Text.assemble((run.id, "bold"), f"  {run.status}")
    parts: list[RenderableType] = [head, Prose(run.status_reason, style="dim")]
    learns = "loss" if "loss" in run.latest and "reward_mean" not in run.latest else "reward"
    value = run.latest.get("loss" if learns == "loss" else "reward_mean")
    figures = f"step {count(run.step)} of {count(run.steps)}   {learns} {decimal(value)}"
    cost = f"   {money(run.cost_usd)} for {decimal(run.device_hours, 2)} device-hours"
    left = f"   {clock(run.left_s)} left" if run.left_s is not None else ""
    parts.append(Text(figures + cost + left))
    if run.latest_checkpoint is not None:
        parts.append(whole(f"checkpoint {run.latest_checkpoint.location}"))
    if run.best_checkpoint is not None:
        parts.append(whole(f"best checkpoint ({best_by(run.best_checkpoint)}) {run.best_checkpoint.location}"))
    if run.error is not None:
        parts.append(Prose(f"{run.error.code}: {run.error.message}", style="red"))
    return Group(*parts)


def usage_table(usage: UsageObject) -> RenderableType:
    """Render the usage by function, the best static fleet, and a step as planned and as measured."""
    parts: list[RenderableType] = [functions_table([(row.function, row) for row in usage.functions])]
    best = usage.best_static
    if best is not None:
        parts += [
            "",
            Prose(
                f"the best static fleet for the same {count(best.steps)} steps (simulated): {best.actors} actor(s), "
                f"{money(best.cost_usd)} in {clock(best.wall_s)}; this run in the same simulation "
                f"{money(best.same_cost_usd)}"
            ),
        ]
    planned, measured = usage.planned, usage.measured
    if planned is not None:
        measured_text = "not measured yet"
        if measured is not None:
            steps = count(measured.steps)
            measured_text = f"measured {_step(measured.step_s, measured.step_usd)} over {steps} steps"
        predicted = _step(planned.step_s, planned.cost_usd / planned.steps)
        parts += ["", Prose(f"a step was predicted to take {predicted}; {measured_text}")]
    return Group(*parts)


def fleets_tables(fleets: Sequence[FleetObject]) -> RenderableType:
    """Render a table per fleet: the device time of its runs, idle time and starts, which add up."""
    parts: list[RenderableType] = []
    for fleet in fleets:
        up = sum(engine.up for engine in fleet.engines)
        slots = sum(engine.slots for engine in fleet.engines if engine.up)
        head = f"  {fleet.terms.get('model.path')}   {up} engines up, {slots} slots"
        made = table("device-seconds", "busy", "share %", "waiting", "running")
        for run in fleet.runs:
            name = run.run_id if run.present else f"{run.run_id} (left)"
            requests = (count(run.waiting), count(run.running)) if run.present else ("", "")
            made.add_row(name, decimal(run.busy_device_s, 1), decimal(100 * run.share, 0), *requests)
        for what, seconds in (
            ("idle", fleet.idle_device_s),
            ("starts", fleet.cold_device_s),
            ("provisioned", fleet.provisioned_device_s),
        ):
            made.add_row(what, decimal(seconds, 1), style="bold" if what == "provisioned" else "dim")
        parts += [Text.assemble((f"fleet {fleet.id}", "bold"), head), made, ""]
    return Group(*parts[:-1])


def _step(step_s: float, step_usd: float) -> str:
    return f"{decimal(step_s, 2)} s and {money(step_usd) if step_usd >= 0.01 else f'${step_usd:.6f}'}"


def time_of(unix_s: float) -> str:
    """Format a time in the terminal's time zone."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s))


READ_S = 1.0
"""Seconds between two readings of a watched run's status."""

EVAL = "eval/"


def watch_run(client: Client, run: RunObject, as_json: bool) -> RunObject:
    """Show events until the run has ended or is paused; returns the run."""
    if as_json:
        for event in client.watch(run.id):
            typer.echo(json.dumps(event.model_dump(mode="json")))
            if (ended := _at_rest(client, event)) is not None:
                return ended
        return client.get_run(run.id)
    console = Console(
        "live" if sys.stdout.isatty() else "lines", f"run {run.id}  {client.url}/#/runs/{run.id}", run.steps
    )
    over = threading.Event()
    reasons = threading.Thread(target=_show_reasons, args=(client.url, run.id, console, over), daemon=True)
    reasons.start()
    before: dict[str, float] = {}
    worked = DrivenTime()
    try:
        for event in client.watch(run.id):
            worked.add(event)
            _show(console, event, before)
            if console.closed_by_reader:
                raise BrokenPipeError
            if _at_rest(client, event) is not None:
                break
    except KeyboardInterrupt:
        console.close()
        command = f"rlhfless runs watch {run.id}"
        typer.echo(f"stopped watching; the run continues. Watch it again with: {command}, end it with: "
                   f"rlhfless runs cancel {run.id}", err=True)  # fmt: skip
        raise typer.Exit(0) from None
    finally:
        over.set()
        console.set_activity("")
        console.close()
    ended = client.get_run(run.id)
    if ended.status is Status.SUCCEEDED:
        console.show(_report(client, ended, before, worked.seconds))
    else:
        typer.echo(f"{run.id} {_status(ended.status, ended.status_reason)}", err=True)
    return ended


def exit_code_of(run: RunObject) -> int:
    """Return 0 for a succeeded run, 3 for a failed one, 5 for a cancelled or paused one."""
    return {Status.SUCCEEDED: 0, Status.FAILED: 3}.get(run.status, 5)


def _status(status: str, reason: str) -> str:
    """Return status and reason, without the status if the reason starts with it (`paused: stopped after step 25`)."""
    return reason if reason.startswith(status) else f"{status}: {reason}"


def _at_rest(client: Client, event: EventObject) -> RunObject | None:
    """Return the run if this event ended or paused it; None if it was resumed since."""
    if event.type != "status" or event.data.get("status") not in AT_REST:
        return None
    run = client.get_run(event.run_id)
    return run if run.status in AT_REST and event.created_at >= run.status_since else None


def _show_reasons(url: str, run_id: str, console: Console, over: threading.Event) -> None:
    """Show the reason of the run's status, until `over`."""
    with Client(url) as client:
        while not over.wait(READ_S):
            try:
                run = client.get_run(run_id)
            except (ApiFault, ServiceAway) as error:
                console.set_activity(str(error))
                continue
            if not over.is_set():
                console.set_activity(_status(run.status, run.status_reason))


def _show(console: Console, event: EventObject, before: dict[str, float]) -> None:
    if event.type in ("metrics", "evaluation"):
        values = event.data["metrics"]
        if event.type == "evaluation" and not before:
            before |= {name.removeprefix(EVAL): value for name, value in values.items()}
        console.emit(event.data["step"], values)
    elif event.type == "status":
        console.show(_status(event.data["status"], event.message))
    else:
        console.show(event.message if event.level == "info" else f"{event.level}: {event.message}")


class DrivenTime:
    """The seconds in which a run had a driver, from all its events: neither its queue nor its pauses."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._since: float | None = None

    def add(self, event: EventObject) -> None:
        if event.type != "status":
            return
        if self._since is not None:
            self.seconds += event.created_at - self._since
        self._since = event.created_at if event.data["status"] in DRIVEN else None


def _report(client: Client, run: RunObject, before: dict[str, float], worked_s: float) -> RenderableType:
    return final_report(
        f"run {run.id} succeeded",
        run.steps,
        worked_s,
        [(row.function, row) for row in client.usage(run.id).functions],
        before,
        {name.removeprefix(EVAL): value for name, value in run.latest.items() if name.startswith(EVAL)},
        {
            "checkpoint": run.latest_checkpoint.location if run.latest_checkpoint is not None else "",
            "best checkpoint": run.best_checkpoint.location if run.best_checkpoint is not None else "",
            "best by": best_by(run.best_checkpoint) if run.best_checkpoint is not None else "",
            "page": f"{client.url}/#/runs/{run.id}",
        },
        attempts=run.attempt,
    )
