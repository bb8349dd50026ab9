"""Checks of what a spec names: files below the service's roots, code of allowed packages, and no environment secrets.

The checks run before anything is imported or opened. Validation imports the classes that a spec names, so their names
are checked in the raw values.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from rlhfless.control.settings import ServiceSettings
from rlhfless.records.checkpoints import CHECKPOINTS_FOLDER
from rlhfless.spec import RunSpec
from rlhfless.spec.base import locations
from rlhfless.spec.data import NOT_HERE, is_path, shadowed
from rlhfless.spec.errors import Problem
from rlhfless.spec.explain import shown
from rlhfless.spec.imports import IMPORT_PATH
from rlhfless.util.worker_process import OWN_PREFIX

CODE = ("algorithm", "algorithm.type", "schedule", "schedule.type", "scaling.policy", "scaling.policy.type",
        "rewards.*.target", "functions.*", "functions.*.type", "generation.engine.type")  # fmt: skip
"""Fields that may name user code."""

SCENARIO_FILES = frozenset({"path", "prices", "devices"})
"""Keys of a scenario that name a file if their value is a string."""


def code_problems(values: Mapping[str, Any], settings: ServiceSettings) -> list[Problem]:
    """Return the code paths in a spec that the service does not allow. `values` are not validated yet."""
    places = [position for field in CODE for position in values_at(values, field.split("."))]
    return [problem for place, value in places for problem in _code(place, value, settings)]


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
    ]:
        if value and not settings.trust_remote_code:
            yield Problem(place, "this service runs no code that comes with a model", "leave it out")
    for place, value in values_at(values, ["generation", "engine", "extra"]):
        if value and not settings.engine_extra:
            yield Problem(place, f"{shown(value)}: this service passes no unchecked arguments to vLLM", "leave it out")
    for place, value in values_at(values, ["rewards", "*", "token_env"]):
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
