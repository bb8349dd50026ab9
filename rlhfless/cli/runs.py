"""`rlhfless runs`: the runs of a service. Its address is found as by rlhfless.client.Client.

Exit codes, in addition to those of all commands: 3 if a watched run has failed, 4 if the service does not answer, 5 if
a watched run was cancelled or paused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from rlhfless.cli.options import (
    Limit,
    Overrides,
    Quantizations,
    SharedPrefixes,
    SpecFile,
    Speculations,
)
from rlhfless.util.text import legible

if TYPE_CHECKING:
    from rich.console import RenderableType

    from rlhfless.client import Client
    from rlhfless.control.objects import RunObject

Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        metavar="URL",
        help="URL of the service. Default: RLHFLESS_URL, the one in ./rlhfless-data, or http://127.0.0.1:8080.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
LengthsOf = Annotated[
    str | None, typer.Option(metavar="RUN", help="Use response lengths and latencies of this earlier run.")
]
RunId = Annotated[
    str, typer.Argument(metavar="RUN", help="Id or name of a run, or a prefix of its id; `last` is the newest.")
]

_WHOLE_ID = re.compile(r".+-\d{8}-\d{6}-[0-9a-f]{8}")
_MOST_PAGES = 10
"""Pages of a hundred runs that a short id is looked for in."""
_MOST_LISTED = 5

LAST = "last"

T = TypeVar("T")


runs = typer.Typer(help="Start, watch and control the runs of a service.", no_args_is_help=True)


@runs.command()
def create(
    spec: SpecFile,
    overrides: Overrides = None,
    watch: Annotated[bool, typer.Option("--watch", help="Follow the run until it ends.")] = False,
    idempotency_key: Annotated[
        str | None, typer.Option(metavar="KEY", help="Requests with the same key and spec create only one run.")
    ] = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Start a run."""
    from rlhfless.spec.load import load_values

    values = load_values(spec, overrides or ())
    with _client(url) as client:
        run = client.create_run(values, idempotency_key)
        if as_json:
            _print_json(run)
        else:
            typer.echo(f"{run.id} is {run.status}; its page is {client.url}/#/runs/{run.id}")
        if watch:
            _watch(client, run, as_json)


@runs.command()
def plan(
    spec: SpecFile,
    overrides: Overrides = None,
    lengths_of: LengthsOf = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Show memory, time and cost of a run on the service's devices. Starts nothing."""
    from rlhfless.cli.plan_tables import plan_lines
    from rlhfless.planning.objects import PlanObject
    from rlhfless.spec.load import load_values

    values = load_values(spec, overrides or ())
    with _client(url) as client:
        earlier = None if lengths_of is None else _id(client, lengths_of)
        answer = client.plan(values, lengths_of=earlier)
    _print(PlanObject.model_validate(answer), as_json, plan_lines)


@runs.command()
def compare(
    spec: SpecFile,
    overrides: Overrides = None,
    devices: Annotated[
        list[str] | None,
        typer.Option(
            "--devices",
            metavar="NxKIND",
            help="Devices, such as 8xh100 or 8xl40s+2xh100. Default: the service's and the best of the price book.",
        ),
    ] = None,
    quantization: Quantizations = None,
    speculation: Speculations = None,
    share_prefixes: SharedPrefixes = None,
    lengths_of: LengthsOf = None,
    deadline_s: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Deadline of the whole run in seconds; devices that meet it come first."),
    ] = None,
    limit: Limit = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Show on which devices and with which placement a run would be faster or cheaper. Starts nothing."""
    from rlhfless.cli.plan_tables import comparison_lines
    from rlhfless.planning.objects import ComparisonObject
    from rlhfless.spec.load import load_values

    values = load_values(spec, overrides or ())
    with _client(url) as client:
        earlier = None if lengths_of is None else _id(client, lengths_of)
        answer = client.compare(
            values,
            devices=devices or [],
            quantization=quantization or [],
            speculation=speculation or [],
            share_prefixes=share_prefixes or [],
            lengths_of=earlier,
            deadline_s=deadline_s,
            limit=limit,
        )
    _print(ComparisonObject.model_validate(answer), as_json, comparison_lines)


@runs.command("list")
def list_runs(
    status: Annotated[list[str] | None, typer.Option(help="Only these statuses.")] = None,
    label: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="Only runs with this label.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=100, help="Maximum number of runs.")] = 20,
    after: Annotated[str | None, typer.Option(metavar="RUN", help="Continue the list after this run.")] = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """List the runs of the service, newest first."""
    from rlhfless.cli.runs_tables import runs_table
    from rlhfless.telemetry.terminal import Terminal

    labels = dict(_label(text) for text in label or ())
    with _client(url) as client:
        page = client.list_runs(after, limit, status or (), labels)
    if as_json:
        _print_json(page)
        return
    console = Terminal()
    console.print(runs_table(page.data, console.width if console.is_terminal else None))
    if page.has_more:
        typer.echo(f"there are more: --after {page.data[-1].id}")


def _label(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise typer.BadParameter(f"{text!r} is not of the form NAME=VALUE", param_hint="--label")
    return name, value


@runs.command()
def show(run: RunId, url: Url = None, as_json: Json = False) -> None:
    """Show a run."""
    with _client(url) as client:
        _print_run(client.get_run(_id(client, run)), as_json)


@runs.command()
def watch(run: RunId, url: Url = None, as_json: Json = False) -> None:
    """Follow a run until it ends. Ctrl-C stops watching, not the run."""
    with _client(url) as client:
        _watch(client, client.get_run(_id(client, run)), as_json)


@runs.command()
def cancel(run: RunId, url: Url = None, as_json: Json = False) -> None:
    """Stop a run permanently. Its files are kept."""
    with _client(url) as client:
        _print_run(client.cancel_run(_id(client, run)), as_json)


@runs.command()
def pause(run: RunId, url: Url = None, as_json: Json = False) -> None:
    """Checkpoint and stop a run after its current step; its devices are released."""
    with _client(url) as client:
        _print_run(client.pause_run(_id(client, run)), as_json)


@runs.command()
def resume(
    run: RunId,
    limits: Annotated[
        list[str] | None, typer.Option("--limit", metavar="KEY=VALUE", help="New limit, such as max_cost_usd=20.")
    ] = None,
    allow_changed: Annotated[
        list[str] | None,
        typer.Option("--allow-changed", metavar="WHAT", help="Accept changes of data, model or code. Repeatable."),
    ] = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Resume a paused run."""
    from rlhfless.spec import document

    raised = {name: document.parse_value(value) for name, value in map(_label, limits or ())}
    with _client(url) as client:
        _print_run(client.resume_run(_id(client, run), raised or None, allow_changed or ()), as_json)


@runs.command()
def delete(run: RunId, url: Url = None, as_json: Json = False) -> None:
    """Delete a finished run and its folder."""
    with _client(url) as client:
        run_id = _id(client, run)
        client.delete_run(run_id)
    typer.echo(json.dumps({"id": run_id, "deleted": True}) if as_json else f"{run_id} is deleted")


@runs.command()
def logs(
    run: RunId,
    lines: Annotated[int, typer.Option(min=1, max=5000, help="Number of lines.")] = 100,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Show the end of a run's log."""
    with _client(url) as client:
        run_id = _id(client, run)
        text = client.logs(run_id, lines)
    if as_json:
        typer.echo(json.dumps({"run_id": run_id, "lines": text.splitlines()}, indent=2))
    else:
        typer.echo(legible(text), nl=False)


@runs.command()
def usage(run: RunId, url: Url = None, as_json: Json = False) -> None:
    """Show device time and cost of a run, by function."""
    from rlhfless.cli.runs_tables import usage_table

    with _client(url) as client:
        _print(client.usage(_id(client, run)), as_json, usage_table)


@runs.command()
def fleets(url: Url = None, as_json: Json = False) -> None:
    """List the fleets of runs that share engines, with the device time of each run."""
    from rlhfless.cli.runs_tables import fleets_tables

    with _client(url) as client:
        page = client.fleets()
    if page.data or as_json:
        _print(page, as_json, lambda shown: fleets_tables(shown.data))
    else:
        typer.echo("no run has shared engines since the service started (placement.share: adapters)")


@runs.command()
def events(
    run: RunId,
    after: Annotated[int, typer.Option(metavar="ID", help="Only events after this one.")] = 0,
    limit: Annotated[int, typer.Option(help="Maximum number of events.")] = 1000,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """List the events of a run."""
    with _client(url) as client:
        page = client.events(_id(client, run), after, limit)
    if as_json:
        _print_json(page)
        return
    from rlhfless.cli.runs_tables import time_of

    for event in page.data:
        level = "" if event.level == "info" else f"{event.level}: "
        typer.echo(legible(f"{event.id:>5}  {time_of(event.created_at)}  {event.type:<10}  {level}{event.message}"))


@runs.command()
def checkpoints(run: RunId, url: Url = None, as_json: Json = False) -> None:
    """List the checkpoints of a run, newest first."""
    with _client(url) as client:
        page = client.checkpoints(_id(client, run))
    if as_json:
        _print_json(page)
        return
    for checkpoint in page.data:
        score = "-" if checkpoint.score is None else f"{checkpoint.metric} {checkpoint.score:.4g}".strip()
        typer.echo(f"{checkpoint.id}  {'best' if checkpoint.best else '':4}  {score}  {checkpoint.location}")


@runs.command()
def samples(
    run: RunId,
    step: Annotated[int | None, typer.Option("--step", help="Only samples of this step.")] = None,
    dataset: Annotated[
        str | None, typer.Option("--dataset", metavar="NAME", help="`train`, `held_out`, or the name of a set.")
    ] = None,
    prompt: Annotated[str | None, typer.Option("--prompt", metavar="ID", help="Only samples of this prompt.")] = None,
    search: Annotated[str | None, typer.Option("--search", metavar="TEXT", help="Only samples with this text.")] = None,
    failed: Annotated[bool, typer.Option("--failed", help="Only samples with a failed reward.")] = False,
    limit: Annotated[int, typer.Option("--limit", min=1, max=100, help="Print at most this many samples.")] = 10,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Print a few samples of the newest steps and evaluations, with what was expected and each reward."""
    from rlhfless.cli.trace import print_samples

    filters = {"data_set": dataset, "prompt_id": prompt, "search": search, "result": "failed" if failed else None}
    given = {name: value for name, value in filters.items() if value is not None}
    with _client(url) as client:
        page = client.rollouts(_id(client, run), step, limit, **given)
    if as_json:
        _print_json(page)
    else:
        print_samples([sample.model_dump() for sample in page.data])


def _client(url: str | None) -> Client:
    from rlhfless.client import Client

    return Client(url)


def _id(client: Client, run: str) -> str:
    """Return the id of a run, given the id, a prefix of it or of its last part, the run's name or folder, or `last`.

    Raises UserError if several runs match.
    """
    from rlhfless.util.errors import UserError

    if run == LAST:
        newest = client.list_runs(limit=1).data
        if not newest:
            raise UserError("the service has no run; start one with `rlhfless runs create SPEC`")
        return newest[0].id
    named = Path(run).name  # users also name a run's folder
    if not named or _WHOLE_ID.fullmatch(named):
        return named
    newest = list(_newest(client))
    found = [each.id for each in newest if each.name == named]
    ids = [each.id for each in newest]
    found = found or [each for each in ids if each.startswith(named) or each.rpartition("-")[2].startswith(named)]
    if len(found) > 1:
        listed = ", ".join(found[:_MOST_LISTED]) + (
            f" and {len(found) - _MOST_LISTED} more" * (len(found) > _MOST_LISTED)
        )
        raise UserError(f"{legible(named)!r} means {len(found)} runs: {listed}; write more of the id")
    return found[0] if found else named  # the service says that there is no such run


def _newest(client: Client) -> Iterator[RunObject]:
    """Yield the newest runs of the service."""
    after = None
    for _ in range(_MOST_PAGES):
        page = client.list_runs(after, limit=100)
        yield from page.data
        if not page.has_more:
            return
        after = page.data[-1].id


def _print_json(answer: Any) -> None:
    typer.echo(json.dumps(answer.model_dump(mode="json"), indent=2))


def _print(answer: T, as_json: bool, rendered: Callable[[T], RenderableType]) -> None:
    """Print an answer as JSON, or as `rendered` shows it."""
    from rlhfless.telemetry.terminal import Terminal

    if as_json:
        _print_json(answer)
    else:
        Terminal().print(rendered(answer))


def _print_run(run: RunObject, as_json: bool) -> None:
    from rlhfless.cli.runs_tables import run_lines

    _print(run, as_json, run_lines)


def _watch(client: Client, run: RunObject, as_json: bool) -> None:
    from rlhfless.cli.runs_tables import exit_code_of, watch_run

    ended = watch_run(client, run, as_json)
    if code := exit_code_of(ended):
        raise typer.Exit(code)
