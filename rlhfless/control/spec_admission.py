"""Checks of a POSTed spec, before any file is opened."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pydantic import ValidationError

from rlhfless.control.errors import refused
from rlhfless.control.objects import MOST_INTEGER
from rlhfless.control.settings import ServiceSettings
from rlhfless.control.spec_paths import code_problems, file_problems, values_at
from rlhfless.spec import RunSpec
from rlhfless.spec.base import size_problems
from rlhfless.spec.document import MOST_DEPTH
from rlhfless.spec.errors import Problem
from rlhfless.spec.explain import explain, shown
from rlhfless.util.text import storable

OWN = {
    ("output",): "the service keeps each run in its own folder",
    ("placement", "ray_address"): "the service runs on its own Ray cluster",
    ("placement", "trusted_network"): "the service runs on its own Ray cluster",
    ("scoring", "http_hosts"): "the service says which hosts rewards may reach",
    ("logging", "metrics_port"): "the service serves the metrics of all runs under /metrics",
}
"""Keys of a spec that only the service sets, and why."""

RESOLVE_S = 0.8
"""Maximum wait for the resolver, so that a POST is answered within a second."""

_RESOLVERS = ThreadPoolExecutor(8, "resolve")
"""Threads for the system's resolver, which may take half a minute. No other work waits for them."""

MOST_PLACE = 200
"""Maximum characters of a field name in an error."""


def posted_spec(values: dict[str, Any], settings: ServiceSettings) -> RunSpec:
    """Validate a POSTed spec. Raises ApiError (422) with every wrong field."""
    if problems := list(unstorable(values)):
        raise refused("the spec", problems)
    if problems := code_problems(values, settings):  # before any named code is imported
        raise refused("the spec", problems)
    try:
        spec = RunSpec.model_validate(values)
    except ValidationError as error:
        raise refused("the spec", explain(error, RunSpec, {}, values)) from error
    problems = [
        Problem(".".join(path), f"cannot be set: {why}", "leave it out")
        for path, why in OWN.items()
        if any(values_at(values, path))
    ]
    problems += size_problems(spec.asked(), settings.sizes, "this service")
    problems += file_problems(spec, settings)
    if problems:
        raise refused("the spec", problems)
    return spec


async def accepted_spec(values: dict[str, Any], settings: ServiceSettings) -> RunSpec:
    """Validate as `posted_spec` does, and check the addresses of HTTP rewards.

    The driver checks names that are not resolved in time, and checks every address again on connection.
    """
    from rlhfless.rewards.http import refusal

    spec = posted_spec(values, settings)
    loop, hosts = asyncio.get_running_loop(), settings.http_hosts
    urls = {f"rewards.{index}.url": reward.url for index, reward in enumerate(spec.rewards) if reward.type == "http"}
    asked = {loop.run_in_executor(_RESOLVERS, refusal, url, hosts): place for place, url in urls.items()}
    if not asked:
        return spec
    done, late = await asyncio.wait(asked, timeout=RESOLVE_S)
    for answer in late:
        answer.cancel()
    problems = [Problem(asked[answer], answer.result(), "name another host") for answer in done if answer.result()]
    if problems:
        raise refused("the spec", sorted(problems, key=lambda problem: problem.where))
    return spec


def unstorable(values: Any, place: str = "", depth: int = 0) -> Iterator[Problem]:
    """Yield strings and integers that a database cannot store, and values that are nested too deeply."""
    if depth > MOST_DEPTH:
        yield Problem(place[:MOST_PLACE], f"nested more than {MOST_DEPTH} deep", "write it flat")
    elif isinstance(values, Mapping):
        for key, inner in values.items():
            yield from unstorable(key, place, depth)
            yield from unstorable(inner, f"{place}.{key}" if place else str(key), depth + 1)
    elif isinstance(values, list):
        for index, inner in enumerate(values):
            yield from unstorable(inner, f"{place}.{index}", depth + 1)
    elif isinstance(values, str) and storable(values) != values:
        yield Problem(place, f"{shown(values)}: has a NUL or half a surrogate pair", "leave it out")
    elif isinstance(values, int) and abs(values) > MOST_INTEGER:
        yield Problem(place, f"{shown(values)}: should be at most {MOST_INTEGER}")
