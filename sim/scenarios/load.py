"""From a scenario file to a `Scenario`, with every problem reported at once.

Paths in a file are relative to the file's folder, so that a scenario works from anywhere.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rlhfless.sim.scenarios.recorded import with_recorded_keys
from rlhfless.sim.scenarios.scenario import Scenario
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
    """Reads a YAML or JSON file. Raises InputError with all problems: field, line, value, and the hint."""
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
    """The whole scenario with every default filled in. `load_scenario` reads it back as an equal one."""
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
    """Makes a path in the data absolute, in place. Values of a wrong type are left to validation."""
    *sections, key = keys
    for section in sections:
        data = data.get(section) if isinstance(data, dict) else None
    if isinstance(data, dict) and isinstance(data.get(key), str) and data[key]:
        data[key] = os.path.normpath(base / Path(data[key]).expanduser())
