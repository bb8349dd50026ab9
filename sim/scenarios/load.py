"""Load a `Scenario` from a file, reporting every problem at once.

Paths in a file are relative to the file's folder, so that a scenario works from anywhere.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rlhfless.records.schema import TraceError
from rlhfless.records.traces import read_meta, trace_folder
from rlhfless.sim.scenarios.scenario import Scenario
from rlhfless.sim.workloads.recorded import read_runtime
from rlhfless.spec import document
from rlhfless.spec.errors import InputError, Problem
from rlhfless.spec.explain import explain, nearest

_PATHS = (
    ("cluster", "prices"),
    ("cluster", "devices"),
    ("workload", "path"),
    ("engine", "latency", "path"),
    ("fleet", "path"),
)


def load_scenario(path: str | os.PathLike[str]) -> Scenario:
    """Read a YAML or JSON file. Raises InputError with all problems: field, line, value, and the hint."""
    path = Path(path)
    try:
        parsed = document.parse(_read(path))
    except document.DocumentError as error:
        raise InputError(str(path), [error.problem]) from error
    data = parsed.data
    if not isinstance(data, dict):
        what = "the file is empty" if data is None else f"a scenario is a mapping of keys, got a {type(data).__name__}"
        hint = "it needs at least `name`, `cluster`, `model`, `workload` and `policies`; see examples/scenarios"
        raise InputError(str(path), [Problem("", what, hint)])
    for keys in _PATHS:
        _resolve(data, keys, path.absolute().parent)
    data = with_recorded_keys(data)
    try:
        return Scenario.model_validate(data)
    except ValidationError as error:
        raise InputError(str(path), explain(error, Scenario, parsed.origins, data)) from error


def resolved_yaml(scenario: Scenario) -> str:
    """Return the whole scenario with every default filled in. `load_scenario` reads it back as an equal one."""
    return document.dump(scenario.model_dump(mode="json"))


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8-sig")
    except FileNotFoundError:
        siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        hint = nearest(path.name, siblings).strip() or f"looked in {path.absolute().parent}"
        raise InputError(str(path), [Problem("", "no such file", hint)]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(str(path), [Problem("", f"cannot be read: {error}", "name a scenario file")]) from error


def _resolve(data: Any, keys: Sequence[str], base: Path) -> None:
    """Make a path in the data absolute, in place. Values of a wrong type are left to validation."""
    *sections, key = keys
    for section in sections:
        data = data.get(section) if isinstance(data, dict) else None
    if isinstance(data, dict) and isinstance(data.get(key), str) and data[key]:
        data[key] = os.path.normpath(base / Path(data[key]).expanduser())


def with_recorded_keys(data: dict[str, Any]) -> dict[str, Any]:
    """Fill keys that a scenario leaves out with those of its trace. Raises TraceError, WorkloadError."""
    workload = data.get("workload")
    if (
        not isinstance(workload, dict)
        or workload.get("type") != "recorded"
        or not isinstance(workload.get("path"), str)
    ):
        return data
    folder = trace_folder(workload["path"])
    spec, drawn = read_meta(folder).spec, read_runtime(folder)
    if not drawn:
        raise TraceError(f"{folder} has no step with rollouts; name the trace of a run that has some")
    first = drawn[0]
    generation, engine = spec.get("generation", {}), spec.get("generation", {}).get("engine", {})
    # A spec without resolved devices leaves keys at `auto`: the scenario has its own defaults for these.
    learner = spec.get("learner") or {}
    engine, learner = ({key: value for key, value in of.items() if value != "auto"} for of in (engine, learner))
    longest = max(int(batch.response_tokens.max()) for batch in drawn)
    recorded = {
        "prompts_per_step": first.groups,
        "samples_per_prompt": first.samples // first.groups,
        "max_tokens": generation.get("max_tokens", longest),
        "steps": len(drawn),
        "heartbeat_s": generation.get("progress_interval_s"),
        "engine": {
            "max_sequences": engine.get("max_sequences"),
            "max_batch_tokens": engine.get("max_batch_tokens"),
            "tensor_parallel": engine.get("tensor_parallel_size"),
        },
        "learner": {
            "mini_batches": spec.get("mini_batches"),
            "epochs": spec.get("epochs"),
            "micro_batch_tokens": learner.get("micro_batch_tokens"),
            "gradient_checkpointing": learner.get("gradient_checkpointing"),
        },
    }
    return _filled(data, recorded)


def _filled(given: dict[str, Any], recorded: dict[str, Any]) -> dict[str, Any]:
    filled = dict(given)
    for name, value in recorded.items():
        section = filled.setdefault(name, {}) if isinstance(value, dict) else None
        if isinstance(section, dict):
            filled[name] = _filled(section, value)
        elif value is not None:
            filled.setdefault(name, value)
    return filled
