"""What is checked of a spec when it is POSTed, before any file is looked at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from rlhfless.control.errors import refused
from rlhfless.control.objects import MOST_INTEGER
from rlhfless.control.security.named import code_problems, file_problems
from rlhfless.control.settings import ServiceSettings
from rlhfless.spec import RunSpec
from rlhfless.spec.errors import Problem
from rlhfless.spec.explain import explain, shown
from rlhfless.text import storable

OWN = {
    ("output",): "the service keeps each run in its own folder",
    ("placement", "ray_address"): "the service runs on its own Ray cluster",
    ("placement", "trusted_network"): "the service runs on its own Ray cluster",
    ("scoring", "http_hosts"): "the service says which hosts rewards may reach",
    ("logging", "metrics_port"): "the service serves the metrics of all runs under /metrics",
}
"""Keys of a spec that are the service's own, and why."""


def posted_spec(values: dict[str, Any], settings: ServiceSettings) -> RunSpec:
    """The spec. Raises ApiError (422) with every wrong field."""
    if problems := list(unstorable(values)):
        raise refused("the spec", problems)
    if problems := code_problems(values, settings):  # before anything that it names is imported
        raise refused("the spec", problems)
    try:
        spec = RunSpec.model_validate(values)
    except ValidationError as error:
        raise refused("the spec", explain(error, RunSpec, {}, values)) from error
    problems = [
        Problem(".".join(path), f"cannot be set: {why}", "leave it out")
        for path, why in OWN.items()
        if _has(values, path)
    ]
    problems += file_problems(spec, settings)
    if problems:
        raise refused("the spec", problems)
    return spec


def unstorable(values: Any, place: str = "") -> Iterator[Problem]:
    """Texts and integers that no database keeps as they are."""
    if isinstance(values, Mapping):
        for key, inner in values.items():
            yield from unstorable(key, place)
            yield from unstorable(inner, f"{place}.{key}" if place else str(key))
    elif isinstance(values, list):
        for index, inner in enumerate(values):
            yield from unstorable(inner, f"{place}.{index}")
    elif isinstance(values, str) and storable(values) != values:
        yield Problem(place, f"{shown(values)}: has a NUL or half a surrogate pair", "leave it out")
    elif isinstance(values, int) and abs(values) > MOST_INTEGER:
        yield Problem(place, f"{shown(values)}: should be at most {MOST_INTEGER}")


def _has(values: Any, path: tuple[str, ...]) -> bool:
    for key in path:
        if not isinstance(values, dict) or key not in values:
            return False
        values = values[key]
    return True
