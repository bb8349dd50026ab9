"""`rlhfless plan --compare`: devices and placements of a run side by side, and the files of the chosen one."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
import yaml
from pydantic import ValidationError

from rlhfless.cli.plan_tables import comparison_lines
from rlhfless.cli.simulate_progress import Estimates
from rlhfless.planning.dimensions import Dimensions
from rlhfless.planning.host_memory import chart_shared_memory
from rlhfless.planning.objects import ComparedDevices, ComparisonObject
from rlhfless.planning.resolve import question_of
from rlhfless.prediction import compare
from rlhfless.prediction.compare import Choice, spec_of
from rlhfless.prediction.run_plan import Planner
from rlhfless.scaling.latency.devices import types_of
from rlhfless.scaling.memory import GIB
from rlhfless.scaling.placement import NODE_DEVICES
from rlhfless.spec import RunSpec
from rlhfless.telemetry.terminal import Terminal

NVIDIA, AMD = "nvidia.com/gpu", "amd.com/gpu"
"""What the device plugins call GPUs."""

HOST_MARGIN = 1.25
"""Factor for the memory that the plan does not count: Ray, and the page cache of the weights' files."""

CORES_PER_GPU = 8
"""Cores of a pod per GPU, for scoring and data loading. An assumption: clouds rent 8 to 28 cores with a GPU."""


def compare_devices(
    planner: Planner,
    devices: Sequence[str],
    tried: Mapping[str, Sequence[Any] | None],
    limit: int | None,
    out: Path | None,
    row: int | None,
    *,
    as_json: bool,
) -> None:
    """Print the comparison, as a table or as JSON. Raises InputError for devices that do not exist, and
    typer.BadParameter for a row that is not there, does not fit or cannot run.

    `tried`: values by the names of Dimensions. `limit`: maximum number of rows; by default LIMIT, or all of `devices`.
    """
    estimates = Estimates(lambda text: print(text, file=sys.stderr), what="choices")
    dimensions = _dimensions(tried)
    show = estimates.progress if devices else None  # a search does not know how many choices it will try
    found = compare.compared(planner, devices, dimensions, os.cpu_count() or 1, show)
    limit = limit or (None if devices else compare.LIMIT)
    values = compare.as_json(planner, found, predict=compare.again(planner), limit=limit)
    answer = ComparisonObject.model_validate(values)
    if as_json:
        typer.echo(json.dumps(answer.model_dump(mode="json"), indent=2))
    else:
        Terminal().print(comparison_lines(answer))
    if out is not None:
        _write(planner, answer, row, out)


def _dimensions(tried: Mapping[str, Sequence[Any] | None]) -> Dimensions:
    try:
        return Dimensions.model_validate({name: tuple(values) for name, values in tried.items() if values})
    except ValidationError as error:
        first = error.errors()[0]
        what, option = f"{first['input']!r}: {first['msg']}", str(first["loc"][0]).replace("_", "-")
        raise typer.BadParameter(what, param_hint=f"--{option}") from error


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
    """Return the chart's values for a cluster with these devices: a group of pods per kind, each pod a whole node."""
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
