"""What is checked of a spec when it is POSTed, before any file is looked at."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from rlhfless.control.errors import refused
from rlhfless.control.security.named import code_problems, file_problems
from rlhfless.control.settings import ServiceSettings
from rlhfless.spec import RunSpec
from rlhfless.spec.errors import Problem
from rlhfless.spec.explain import explain

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


def _has(values: Any, path: tuple[str, ...]) -> bool:
    for key in path:
        if not isinstance(values, dict) or key not in values:
            return False
        values = values[key]
    return True
