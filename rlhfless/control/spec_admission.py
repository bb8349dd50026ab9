"""Checks of a POSTed spec, before any file is opened or code imported: files below the service's roots, code of allowed
packages, and no environment secrets.

Validation imports the classes that a spec names, so their names are checked in the raw values.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from pydantic import ValidationError

from rlhfless.control.errors import refused
from rlhfless.control.objects import MOST_INTEGER
from rlhfless.control.settings import ServiceSettings
from rlhfless.records.checkpoints import CHECKPOINTS_FOLDER
from rlhfless.spec import HttpSpec, JudgeSpec, RunSpec
from rlhfless.spec.base import locations, size_problems
from rlhfless.spec.data import NOT_HERE, is_path, shadowed
from rlhfless.spec.document import MOST_DEPTH
from rlhfless.spec.errors import Problem
from rlhfless.spec.explain import explain, shown
from rlhfless.spec.imports import IMPORT_PATH
from rlhfless.util.text import storable
from rlhfless.util.worker_process import OWN_PREFIX

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
    """Validate as `posted_spec` does, and check the addresses of HTTP rewards and teachers.

    The driver checks names that are not resolved in time, and checks every address again on connection.
    """
    from rlhfless.rewards.endpoint import refusal

    spec = posted_spec(values, settings)
    loop, hosts = asyncio.get_running_loop(), settings.http_hosts
    asked_of = [each if isinstance(each, HttpSpec | JudgeSpec) else None for each in spec.rewards]
    urls = {f"rewards.{index}.url": each.url for index, each in enumerate(asked_of) if each and each.url is not None}
    urls |= {f"teachers.{index}.url": each.url for index, each in enumerate(spec.teachers) if each.url is not None}
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


# -- what a spec names


CODE = ("algorithm", "algorithm.type", "schedule", "schedule.type", "scaling.policy", "scaling.policy.type",
        "rewards.*.target", "functions.*", "functions.*.type", "generation.engine.type",
        "environment.type")  # fmt: skip
"""Fields that may name user code."""

ENVIRONMENT_CODE = (("command", "a program"), ("servers", "programs, or connects to hosts of its choice"),
                    ("url", "hosts of its choice to play on"), ("id", "a module to import"))  # fmt: skip
"""Keys of an environment that no service takes, and what they name. The `id` of a game may be `module:Game-v1`."""

SCENARIO_FILES = frozenset({"path", "prices", "devices"})
"""Keys of a scenario that name a file if their value is a string."""


def code_problems(values: Mapping[str, Any], settings: ServiceSettings) -> list[Problem]:
    """Return the code paths in a spec that the service does not allow. `values` are not validated yet."""
    places = [position for field in CODE for position in values_at(values, field.split("."))]
    problems = [problem for place, value in places for problem in _code(place, value, settings)]
    hint = "name a class of an allowed package that does it, as `environment.type`"
    for key, what in ENVIRONMENT_CODE:
        for place, value in values_at(values, ["environment", key]):
            if value and (key != "id" or ":" in str(value)):
                problems.append(Problem(place, f"{shown(value)}: this service runs no spec that names {what}", hint))
    return problems


def _code(place: str, value: Any, settings: ServiceSettings) -> Iterator[Problem]:
    if not isinstance(value, str) or not IMPORT_PATH.fullmatch(value):
        return
    module = value.partition(":")[0]
    if not any(module == package or module.startswith(f"{package}.") for package in settings.code):
        allowed = f"it allows {', '.join(settings.code)}" if settings.code else "it allows none"
        hint = f"its operator allows a package with `rlhfless up --code {module.partition('.')[0]}`"
        yield Problem(place, f"{value!r} is code that this service does not run; {allowed}", hint)


def simulation_problems(values: Mapping[str, Any], settings: ServiceSettings) -> list[Problem]:
    """Return the code and files that a scenario names. `values` are not validated yet, and a policy name that looks
    like an import path counts as code."""
    places = [*values_at(values, ["policies", "*", "name"]), *values_at(values, ["policies", "*"])]
    problems = [problem for place, value in places for problem in _code(place, value, settings)]
    for place, key, value in _texts(values):
        if key in SCENARIO_FILES:
            problems.append(Problem(place, f"{shown(value)}: names a file", "give its values: POSTed specs have none"))
    return problems


def _texts(values: Any, place: str = "", key: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield each string in nested values, with its dotted place and its key."""
    if isinstance(values, Mapping):
        for name, inner in values.items():
            yield from _texts(inner, f"{place}.{name}" if place else str(name), str(name))
    elif isinstance(values, list | tuple):
        for index, inner in enumerate(values):
            yield from _texts(inner, f"{place}.{index}", key)
    elif isinstance(values, str):
        yield place, key, values


def file_problems(spec: RunSpec, settings: ServiceSettings) -> list[Problem]:
    """Return the files, folders and URLs in a spec that are outside the roots, and other keys that are not allowed."""
    values = spec.model_dump(mode="json")
    problems = location_problems(values, settings.roots, str(settings.runs), hub=settings.allow_hub)
    return [*problems, *_other_problems(values, settings)]


def location_problems(
    values: Mapping[str, Any], roots: Sequence[str], runs: str, *, hub: bool, inside: bool = False
) -> list[Problem]:
    """Return the files, folders and URLs in a spec that are neither below a root nor a checkpoint of `runs`.

    `hub`: allow names of the hub. `inside`: also search the named folders for links out of the roots.
    """
    hint = f"name one below {', '.join(roots)}" if roots else "ask its operator for a root"
    allowed = _Allowed(roots, runs)
    problems = []
    for field, mark in locations(RunSpec).items():
        for place, value in values_at(values, field.split(".")):
            if not isinstance(value, str) or value in mark.words:
                continue
            if is_path(value) or "://" in value or "::" in value or mark.kind != "hub":
                what = allowed.refusal(value) or (inside and mark.kind == "hub" and allowed.link_out_of(value))
                problems += [Problem(place, what, hint)] if what else []
            elif what := _no_name(value, hub):
                problems.append(Problem(place, what, hint))
            elif what := shadowed(value):
                problems.append(Problem(place, what, NOT_HERE))
    return problems


def _other_problems(values: Mapping[str, Any], settings: ServiceSettings) -> Iterator[Problem]:
    for place, value in [
        *values_at(values, ["model", "trust_remote_code"]),
        *values_at(values, ["rewards", "*", "trust_remote_code"]),
        *values_at(values, ["teachers", "*", "trust_remote_code"]),
    ]:
        if value and not settings.trust_remote_code:
            yield Problem(place, "this service runs no code that comes with a model", "leave it out")
    for place, value in values_at(values, ["generation", "engine", "extra"]):
        if value and not settings.engine_extra:
            yield Problem(place, f"{shown(value)}: this service passes no unchecked arguments to vLLM", "leave it out")
    for place, value in [
        *values_at(values, ["rewards", "*", "token_env"]),
        *values_at(values, ["teachers", "*", "token_env"]),
    ]:
        # A spec must not be able to send any other secret of the machine to a host of its choice.
        if value and not value.startswith(OWN_PREFIX):
            yield Problem(place, f"{value!r} may not be sent", f"name a variable that starts with {OWN_PREFIX}")


def _no_name(value: str, hub: bool) -> str:
    """Return why a value that is not a path cannot be a hub name; empty if it can. Clients make local paths
    absolute."""
    if not hub:
        return f"{value!r} is no absolute path, and this service uses no hub"
    plain = not value.startswith(("~", ".")) and ".." not in value.split("/")
    return "" if plain else f"{value!r} is no absolute path"


class _Allowed:
    def __init__(self, roots: Sequence[str], runs: str) -> None:
        self._urls = [f"{root.rstrip('/')}/" for root in roots if "://" in root]
        self._folders = [Path(os.path.realpath(root)) for root in roots if "://" not in root]
        self._runs = Path(os.path.realpath(runs))
        self._data = self._runs.parent

    def refusal(self, value: str) -> str:
        """Return why a location is not allowed; empty if it is."""
        if "::" in value:
            return f"{value!r} chains file systems, which this service does not allow"
        if "://" in value:
            plain = ".." not in unquote(value).split("/") and not value.startswith(("file:", "local:"))
            inside = plain and any(f"{value}/".startswith(root) for root in self._urls)
        elif not is_path(value):
            return f"{value!r} is no absolute path"
        else:
            inside = self._has(value)
        return "" if inside else f"{value!r} is below none of the service's roots"

    def _has(self, path: str) -> bool:
        resolved = Path(os.path.realpath(path))
        in_runs = resolved.is_relative_to(self._runs)
        if in_runs and resolved.relative_to(self._runs).parts[1:2] == (CHECKPOINTS_FOLDER,):
            return True
        # The data folder contains keys, other users' specs and drivers' secrets, and may be below a root.
        in_data = resolved.is_relative_to(self._data)
        return any(
            resolved.is_relative_to(folder) and (not in_data or folder.is_relative_to(self._data))
            for folder in self._folders
        )

    def link_out_of(self, value: str) -> str:
        """Return an error with the first link below a folder that leads out of the roots; empty if there is none."""
        folders, seen = [os.path.realpath(value)], set[str]()
        while folders:
            folder = folders.pop()
            if folder in seen or not os.path.isdir(folder):
                continue
            seen.add(folder)
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.is_symlink() and not self._has(entry.path):
                        return f"{entry.path!r} is a link out of the service's roots"
                    folders.append(os.path.realpath(entry.path))
        return ""


def values_at(values: Any, path: Sequence[str], place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values at a path in raw values, each with its dotted place. `*` matches every item of a list or
    mapping."""
    if not path:
        yield place, values
        return
    head, *rest = path
    if head == "*":
        listed = enumerate(values) if isinstance(values, list | tuple) else ()
        for key, item in values.items() if isinstance(values, Mapping) else listed:
            yield from values_at(item, rest, f"{place}.{key}")
    elif isinstance(values, Mapping) and head in values:
        yield from values_at(values[head], rest, f"{place}.{head}" if place else head)
