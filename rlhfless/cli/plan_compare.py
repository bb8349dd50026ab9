"""`rlhfless plan --compare`: devices and placements of a run side by side, and the files of the chosen one."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
import yaml
from pydantic import ValidationError
from rich.console import Group, RenderableType

from rlhfless.cli.simulate_progress import Estimates
from rlhfless.cli.tables import table
from rlhfless.planning import compare
from rlhfless.planning.compare import Choice, spec_of
from rlhfless.planning.dimensions import Dimensions
from rlhfless.planning.host_memory import chart_shared_memory
from rlhfless.planning.objects import ComparedDevices, ComparisonObject
from rlhfless.planning.resolve import question_of
from rlhfless.planning.run_plan import Planner
from rlhfless.scaling.latency.devices import types_of
from rlhfless.scaling.memory import GIB
from rlhfless.scaling.placement import NODE_DEVICES
from rlhfless.spec import RunSpec
from rlhfless.telemetry.numbers import clock, decimal, money
from rlhfless.telemetry.terminal import Prose, Terminal, whole
from rlhfless.util.text import legible

NVIDIA, AMD = "nvidia.com/gpu", "amd.com/gpu"
"""What the device plugins call GPUs."""

HOST_MARGIN = 1.25
"""A pod's memory beside what the plan counts: Ray, and the page cache of the weights' files."""

CORES_PER_GPU = 8
"""Of a pod, for scoring and for what feeds the devices: an assumption, as clouds rent 8 to 28 cores with a GPU."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What is compared, as on the command line."""

    devices: Sequence[str]
    tried: Mapping[str, Sequence[Any] | None]
    """By the names of Dimensions."""
    limit: int | None = None
    """Most rows; by default LIMIT, and all of named devices."""

    def read(self) -> Dimensions:
        """Raises typer.BadParameter."""
        named = {name: tuple(values) for name, values in self.tried.items() if values}
        try:
            return Dimensions.model_validate(named)
        except ValidationError as error:
            first = error.errors()[0]
            what, option = f"{first['input']!r}: {first['msg']}", str(first["loc"][0]).replace("_", "-")
            raise typer.BadParameter(what, param_hint=f"--{option}") from error


def compare_devices(planner: Planner, asked: Asked, out: Path | None, row: int | None, *, as_json: bool) -> None:
    """Print the comparison, as a table or as JSON. Raises InputError for devices that do not exist, typer.BadParameter
    for a row that is not there, does not fit or cannot run."""
    estimates = Estimates(lambda text: print(text, file=sys.stderr), what="choices")
    dimensions = asked.read()
    show = estimates.progress if asked.devices else None  # a search does not know how many choices it will try
    tried = compare.compared(planner, asked.devices, dimensions, os.cpu_count() or 1, show)
    limit = asked.limit or (None if asked.devices else compare.LIMIT)
    found = compare.as_json(planner, tried, limit=limit)
    answer = ComparisonObject.model_validate(found)
    if as_json:
        typer.echo(json.dumps(answer.model_dump(mode="json"), indent=2))
    else:
        Terminal().print(comparison_lines(answer))
    if out is not None:
        _write(planner, answer, row, out)


def _write(planner: Planner, answer: ComparisonObject, wanted: int | None, out: Path) -> None:
    """Write run.yaml and values.yaml of a row; of the first that can run if none is wanted."""
    rows = answer.rows
    runs = [index for index, each in enumerate(rows, start=1) if each.fits and each.no_engine is None]
    number = wanted or next(iter(runs), 1)
    if number not in runs:
        hint = f"rows that can are {', '.join(map(str, runs))}" if runs else "none can"
        why = rows[number - 1].no_engine if number <= len(rows) else None
        what = f"{number} is no row that fits and runs" + (f" ({why})" if why else "")
        raise typer.BadParameter(f"{what}; {hint}", param_hint="--row")
    chosen = rows[number - 1]
    spec = spec_of(planner.spec, Choice(chosen.kind, chosen.count, chosen.changes))
    out.mkdir(parents=True, exist_ok=True)
    written = {
        "run.yaml": spec.model_dump(mode="json", exclude_unset=True),
        "values.yaml": chart_values(spec, chosen),
    }
    for name, values in written.items():
        (out / name).write_text(yaml.safe_dump(values, sort_keys=False), "utf-8")
    typer.echo(f"wrote {out / 'run.yaml'} and {out / 'values.yaml'} for row {number}", err=True)


def chart_values(spec: RunSpec, chosen: ComparedDevices) -> dict[str, Any]:
    """Values of the chart for a cluster that has these devices: a group of pods for each kind, each all of a node."""
    asked = question_of(spec, chosen.kind, chosen.count)
    plan = asked.plan()
    host_bytes = plan.host_bytes / _nodes(asked.learner_count)  # what functions of the learner's side load there
    groups = [_group(kind, count, host_bytes, plan.shared_bytes) for kind, count in asked.devices.items()]
    return {"ray": {"gpuGroups": groups}}


def _group(kind: str, count: int, host_bytes: float, shared_bytes: int) -> dict[str, Any]:
    gpus = min(count, NODE_DEVICES)
    memory = f"{math.ceil((HOST_MARGIN * host_bytes + shared_bytes) / GIB)}Gi"
    cores = CORES_PER_GPU * gpus
    return {
        "name": kind,
        "kind": kind,
        "acceleratorType": types_of(kind)[0],
        "gpus": gpus,
        "resourceName": AMD if kind.startswith("mi") else NVIDIA,
        "cores": cores // 2,
        "minNodes": 0,
        "maxNodes": _nodes(count),
        "idleSeconds": 300,
        "resources": {"requests": {"cpu": str(cores), "memory": memory}, "limits": {"memory": memory}},
        "sharedMemory": chart_shared_memory(shared_bytes),
    }


def _nodes(count: int) -> int:
    return math.ceil(count / NODE_DEVICES)


MOST_REASONS = 8
"""Reasons why devices do not hold a run that are shown; `--json` has all."""


def comparison_lines(compared: ComparisonObject) -> RenderableType:
    """The rows that fit, those on the front marked, with numbers to choose them by; and why others do not fit."""
    made = table("", "devices", "placement", "step", "run", "cost", "$/M tok", "kWh", "busiest", texts=3, padding=1)
    for number, row in enumerate(compared.rows, start=1):
        if row.predicted is None:
            continue
        busiest, share = max(row.shares.items(), key=lambda item: item[1])
        made.add_row(
            f"{number}{' *' if row.on_front else ''}",
            _devices(row) + (" (plan only)" if row.no_engine else ""),
            row.placement,
            f"{decimal(row.predicted.step_s, 0)} s",
            clock(row.predicted.wall_s),
            money(row.predicted.cost_usd),
            decimal(row.usd_per_million_tokens, 2),
            "-" if row.energy_kwh is None else decimal(row.energy_kwh, 2),
            f"{busiest} {share:.0%}",
            style="bold" if row.on_front else "",
        )
    lengths = whole(f"response lengths: {legible(compared.lengths)}")
    decided = verdict(compared)
    last = ("", Prose(decided, style="bold")) if decided else ()
    return Group(made, "", *map(Prose, _notes(compared)), lengths, *last)


def verdict(compared: ComparisonObject) -> str:
    """The row to take under the run's contract, which orders them; empty if none can run."""
    rows = [(number, row) for number, row in enumerate(compared.rows, start=1) if row.predicted and not row.no_engine]
    if not rows:
        return ""
    number, best = rows[0]
    assert best.predicted is not None
    time_s, usd = best.predicted.wall_s, best.predicted.cost_usd
    text = f"Take row {number}, {best.count} x {best.kind}, {best.placement}: {clock(time_s)} for {money(usd)}."
    by_time = min(rows, key=lambda each: each[1].predicted.wall_s if each[1].predicted else math.inf)
    by_cost = min(rows, key=lambda each: each[1].predicted.cost_usd if each[1].predicted else math.inf)
    for what, (other, row) in (("fastest", by_time), ("cheapest", by_cost)):
        if other == number or row.predicted is None:
            continue
        times, cost = row.predicted.wall_s / time_s, row.predicted.cost_usd / usd if usd else 1.0
        text += f" The {what}, row {other}, takes {times:.2f} times as long at {cost:.2f} times the cost."
    return text


def _devices(row: ComparedDevices) -> str:
    """The devices, with settings that are not the defaults."""
    draws = [each for each in (row.quantization, row.speculation) if each != "off"]
    if not row.share_prefixes:
        draws.append("no sharing")
    return " ".join([f"{row.count} x {row.kind}", *draws])


def _notes(compared: ComparisonObject) -> Iterator[str]:
    """What the table means, and the rows that are not in it."""
    if compared.left_out:
        yield (
            f"{compared.left_out} of the {compared.tried} choices that were tried are left out, the worst by the run's "
            "contract; --limit shows more, --devices names others"
        )
    yield "* no other is both faster and cheaper; kWh of a step, at most"
    if any(row.no_engine for row in compared.rows):
        yield "(plan only) no run can be started so; --json says why"
    left = [row for row in compared.rows if row.predicted is None]
    if left:
        yield f"without a prediction are {len(left)} of {len(compared.rows)}:"
    for row in left[:MOST_REASONS]:
        if row.fits:
            yield f"{_devices(row)}, {row.placement}: {row.reason}"
            continue
        why = f"fits with {row.nearest_change}" if row.nearest_change else next(iter(row.problems), row.reason or "")
        yield f"{_devices(row)}, {row.placement}: {why}"
