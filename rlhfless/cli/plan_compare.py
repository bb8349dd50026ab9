"""`rlhfless plan --compare`: devices and placements of a run side by side, and the files of the one that is chosen."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
import yaml
from rich.console import Console

from rlhfless.cli.runs_tables import comparison_lines
from rlhfless.cli.simulate_progress import Estimates
from rlhfless.control.compute import comparing
from rlhfless.control.compute.comparing import Choice, spec_of
from rlhfless.control.compute.planning import Planner
from rlhfless.control.objects.costs import ComparedDevices, ComparisonObject
from rlhfless.prepare.memory.assumed import question_of
from rlhfless.prepare.memory.room import chart_shared_memory
from rlhfless.scaling.accelerators import types_of
from rlhfless.scaling.memory import GIB
from rlhfless.scaling.placement import NODE_DEVICES
from rlhfless.spec import RunSpec

NVIDIA, AMD = "nvidia.com/gpu", "amd.com/gpu"
"""What the device plugins call GPUs."""

HOST_MARGIN = 1.25
"""A pod's memory beside what the plan counts: Ray, and the page cache of the weights' files."""

CORES_PER_GPU = 8
"""Of a pod, for scoring and for what feeds the devices: an assumption, as clouds rent 8 to 28 cores with a GPU."""


def compare_devices(planner: Planner, devices: Sequence[str], out: Path | None, row: int, *, as_json: bool) -> None:
    """Print the comparison, as a table or as JSON. Raises InputError for devices that do not exist, typer.BadParameter
    for a row that is not there or does not fit."""
    console = Console(highlight=False)
    estimates = Estimates(lambda text: print(text, file=sys.stderr), what="choices")
    tried = comparing.compared(planner, devices, os.cpu_count() or 1, estimates.progress)
    answer = ComparisonObject.model_validate(comparing.as_json(planner, tried))
    if as_json:
        typer.echo(json.dumps(answer.model_dump(mode="json"), indent=2))
    else:
        console.print(comparison_lines(answer))
    if out is not None:
        _write(planner, answer, row, out)


def _write(planner: Planner, answer: ComparisonObject, number: int, out: Path) -> None:
    """Write run.yaml and values.yaml of a row."""
    rows = answer.rows
    if number > len(rows) or not rows[number - 1].fits:
        fits = [str(index) for index, each in enumerate(rows, start=1) if each.fits]
        hint = f"rows that fit are {', '.join(fits)}" if fits else "none fits"
        raise typer.BadParameter(f"{number} is no row that fits; {hint}", param_hint="--row")
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
    """Values of the chart for a cluster that has these devices: one group of pods, each all of a node."""
    asked = question_of(spec, chosen.kind, chosen.count)
    plan = asked.plan()
    gpus = min(chosen.count, NODE_DEVICES)
    nodes = math.ceil(chosen.count / gpus)
    shared = chart_shared_memory(plan.shared_bytes)
    memory = f"{math.ceil((HOST_MARGIN * plan.host_bytes / nodes + plan.shared_bytes) / GIB)}Gi"
    cores = CORES_PER_GPU * gpus
    group = {
        "name": chosen.kind,
        "kind": chosen.kind,
        "acceleratorType": types_of(chosen.kind)[0],
        "gpus": gpus,
        "resourceName": AMD if chosen.kind.startswith("mi") else NVIDIA,
        "cores": cores // 2,
        "minNodes": 0,
        "maxNodes": nodes,
        "idleSeconds": 300,
        "resources": {"requests": {"cpu": str(cores), "memory": memory}, "limits": {"memory": memory}},
        "sharedMemory": shared,
    }
    return {"ray": {"gpuGroups": [group]}}
