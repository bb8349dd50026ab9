"""Follows a run of a service on the terminal, as `rlhfless run` shows one of its own."""

from __future__ import annotations

import json
import sys
import threading

import typer
from rich.console import RenderableType

from rlhfless.cli.runs_tables import best_by
from rlhfless.cli.tables import final_report
from rlhfless.client import Client
from rlhfless.client.errors import ApiFault, ServiceAway
from rlhfless.control.lifecycle import AT_REST, DRIVEN, Status
from rlhfless.control.objects import EventObject, RunObject
from rlhfless.telemetry.console import Console

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
        typer.echo(f"not watched any more; the run goes on. Watch it with: {command}, end it with: "
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
    """0 for a run that has succeeded, 3 for one that has failed, 5 for one that was cancelled or paused."""
    return {Status.SUCCEEDED: 0, Status.FAILED: 3}.get(run.status, 5)


def _status(status: str, reason: str) -> str:
    """A status and its reason, which often begins with the status: `paused: stopped after step 25`."""
    return reason if reason.startswith(status) else f"{status}: {reason}"


def _at_rest(client: Client, event: EventObject) -> RunObject | None:
    """The run if the event is that of its rest; None for a pause after which it was resumed."""
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
