"""Load a spec file and overrides into a `RunSpec`, report all problems at once, and compare specs for a resumed run.

Relative paths in a file are relative to the file's folder, and modules that it names are searched there, so that a spec
works from anywhere. Paths in an override are relative to the current folder, matching shell completion. A name that is
not a path there (`Qwen/Qwen3-0.6B`) is left unchanged: it may be a hub name. Output paths are always relative to the
current folder.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from rlhfless.spec import document
from rlhfless.spec.base import SpecModel, locations
from rlhfless.spec.document import MOST_CHARACTERS, DocumentError, dotted, walk
from rlhfless.spec.environment import EnvironmentSpec
from rlhfless.spec.errors import InputError, Problem, SpecError
from rlhfless.spec.explain import explain, nearest, origin_of, shown
from rlhfless.spec.extension import PluginSpec
from rlhfless.spec.generation import EngineSpec
from rlhfless.spec.imports import search_in
from rlhfless.spec.rewards import PythonRewardSpec
from rlhfless.spec.run import RunSpec
from rlhfless.spec.teachers import MAY_DIFFER_OF_A_TEACHER, MOST_TEACHERS
from rlhfless.util.text import storable

_RENAME = "rename the file or folder, or write the character in full"
# A hub name never ends like this, so such a value is a path even if no such file exists.
_FILE_SUFFIXES = frozenset({".jsonl", ".json", ".parquet", ".csv", ".yaml", ".yml"})

SPEC_FILE = "spec.yaml"
"""File in the run's folder with its spec, including all defaults."""

IMPORTS_FILE = "imports.txt"
"""File next to a run's spec that lists the folders from which it imports the user's modules, one per line, for
resuming."""


def load_spec(path: str | Path, overrides: Sequence[str] = ()) -> RunSpec:
    """Read a YAML or JSON file, apply overrides such as `steps=10` or `rewards.0.weight=2`, and validate.

    Raises SpecError with all problems.
    """
    return _load(path, overrides)[0]


def load_values(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return the values that `load_spec` validates: the keys the user has written, with absolute paths. Raises
    SpecError."""
    return _load(path, overrides)[1]


def _load(path: str | Path, overrides: Sequence[str]) -> tuple[RunSpec, dict[str, Any]]:
    path = Path(path)
    source = str(path)
    text = _read(path)
    try:
        parsed = document.parse(text)
    except DocumentError as error:
        raise SpecError(source, [error.problem]) from error
    data = parsed.data
    if data is None:
        what, hint = "the file is empty", "it needs at least `model`, `prompts` and `rewards`"
        raise SpecError(source, [Problem("", what, hint)])
    if not isinstance(data, dict):
        what = f"a spec is a mapping of keys, got a {type(data).__name__}"
        raise SpecError(source, [Problem("", what, "start it with, for example, `steps: 100`", "line 1")])

    origins = dict(parsed.origins)
    _resolve_paths(data, path.absolute().parent)
    recorded = path.with_name(IMPORTS_FILE)
    search_in([*(recorded.read_text("utf-8").splitlines() if recorded.is_file() else ()), os.path.abspath(path.parent)])
    problems: list[Problem] = []
    for override in overrides:
        try:
            _override(data, override, origins)
        except DocumentError as error:
            problems.append(error.problem)
    _resolve_paths(data, Path.cwd())
    problems += _unicode_problems(data, origins)
    try:
        spec = RunSpec.model_validate(data)
    except ValidationError as error:
        raise SpecError(source, [*problems, *explain(error, RunSpec, origins, data)]) from error
    if problems:
        raise SpecError(source, problems)
    return spec, data


def json_schema(model: type[BaseModel] = RunSpec) -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of a spec file or another model, for editors and other tools."""
    schema = model.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def set_yaml(spec: RunSpec) -> str:
    """Return the keys that were given, without defaults, as YAML. `load_spec` reads it back as an equal spec."""
    return document.dump(spec.model_dump(mode="json", exclude_unset=True))


def resolved_yaml(spec: RunSpec) -> str:
    """Return the whole spec, including all defaults, as YAML. `load_spec` reads it back as an equal spec."""
    return document.dump(spec.model_dump(mode="json"))


def _unicode_problems(data: Any, origins: Mapping[document.Path, str]) -> list[Problem]:
    """Return a problem for each string that cannot be stored, because strings become names of files, metrics and
    replicas."""
    return [
        Problem(dotted(path), _not_unicode(text), _RENAME, origin_of(path, origins))
        for path, text in _texts(data)
        if storable(text) != text
    ]


def _not_unicode(text: str) -> str:
    return f"{shown(text)} is not valid Unicode, or holds a NUL"


def _texts(data: Any) -> Iterator[tuple[document.Path, str]]:
    """Yield all strings in the data, each with its path; for a key, the path of its section."""
    for path, value in document.walk(data):
        if path and isinstance(path[-1], str):
            yield path[:-1], path[-1]
        if isinstance(value, str):
            yield path, value


def _read(path: Path) -> str:
    """Return the text of the file. Raises SpecError if it cannot be read."""
    try:
        if stat.S_ISDIR(path.stat().st_mode):
            raise SpecError(str(path), [Problem("", "is a folder, not a spec file")])
        with path.open("rb") as stream:  # limited, because /dev/zero has no end
            return stream.read(MOST_CHARACTERS * 4 + 1).decode("utf-8-sig")
    except FileNotFoundError:
        siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        hint = nearest(path.name, siblings).strip() or f"looked in {path.absolute().parent}"
        raise SpecError(str(path), [Problem("", "no such file", hint)]) from None
    except UnicodeDecodeError as error:
        what = f"not UTF-8 text: byte {error.start} is 0x{error.object[error.start]:02x}"
        raise SpecError(str(path), [Problem("", what, "save it as UTF-8")]) from error
    except OSError as error:
        raise SpecError(str(path), [Problem("", f"cannot be read: {error.strerror or error}")]) from error


def _override(data: dict[str, Any], text: str, origins: dict[document.Path, str]) -> None:
    """Apply one `a.b=c` override to the data in place. Raises DocumentError."""
    key, equals, value_text = text.partition("=")
    key = key.strip()
    if not equals or not key or not all(key.split(".")):
        raise DocumentError(Problem("", f"`--set {text}` is not of the form key=value", "write it as --set steps=10"))
    if storable(value_text) != value_text:
        raise DocumentError(Problem(key, _not_unicode(value_text), _RENAME, f"--set {text}"))
    try:
        value = document.parse_value(value_text)
    except DocumentError as error:
        what, hint = f"{shown(value_text)}: {error.problem.what}", error.problem.hint or "quote it"
        raise DocumentError(Problem(key, what, hint, f"--set {key}=...")) from error
    section: Any = data
    path: document.Path = ()
    *parents, last = key.split(".")
    for part in parents:
        step = _step(section, part, path, text)
        if isinstance(section, dict) and section.get(part) is None:
            section[part] = {}
        section, path = section[step], (*path, step)
    step = _step(section, last, path, text)
    section[step] = value
    path = (*path, step)
    for old in [old for old in origins if old[: len(path)] == path]:
        del origins[old]
    origins[path] = f"--set {text}"


def _step(section: Any, part: str, path: document.Path, text: str) -> Any:
    """Return the key or index of the next level in a section or list. Raises DocumentError if there is none."""
    if isinstance(section, dict):
        return part
    hint = ""
    if not isinstance(section, list):
        what = f"{dotted(path)} is {section!r}, so there is no `{part}` below it"
        hint = f"where a section may be, write it out: {dotted(path)}: {{type: {section}}}"
    elif part.isdecimal() and int(part) < len(section):
        return int(part)
    else:
        what = f"{part!r} is not an index of {dotted(path)}, which has {len(section)} items"
        hint = f"use 0 to {len(section) - 1}"
    raise DocumentError(Problem(dotted((*path, part)), what, hint, f"--set {text}"))


def _resolve_paths(data: dict[str, Any], base: Path) -> None:
    """Make the paths in the data absolute, in place. Values of a wrong type are left for validation to report."""
    marks = locations(RunSpec)
    for path, value in list(document.walk(data)):
        mark = marks.get(dotted(tuple("*" if isinstance(key, int) else key for key in path)))
        if mark and mark.kind != "kept" and isinstance(value, str) and value and value not in mark.words:
            section: Any = data
            for key in path[:-1]:
                section = section[key]
            section[path[-1]] = _absolute(value, base)


def _absolute(value: str, base: Path) -> str:
    path = Path(value).expanduser()
    explicit = value.startswith((".", "~")) or path.suffix.lower() in _FILE_SUFFIXES
    if path.is_absolute() or not (explicit or (base / path).exists()):
        return str(path) if path.is_absolute() else value
    return os.path.normpath(base / path)


M = TypeVar("M", bound=SpecModel)


def read_values(path: str | os.PathLike[str], model: type[M], hint: str) -> M:
    """Read the values of a YAML or JSON file. `hint` is shown if the file cannot be read.

    Raises InputError with all problems: file, line, field, value and hint.
    """
    try:
        parsed = document.parse(Path(path).read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(str(path), [Problem("", f"cannot be read: {error}", hint)]) from error
    except document.DocumentError as error:
        raise InputError(str(path), [error.problem]) from error
    try:
        return model.model_validate(parsed.data)
    except ValidationError as error:
        raise InputError(str(path), explain(error, model, parsed.origins)) from error


def targets(spec: BaseModel) -> tuple[str, ...]:
    """Return the import paths in a spec, such as `my_rewards:score`, sorted."""
    return tuple(sorted(set(fields_of_targets(spec).values())))


def fields_of_targets(spec: BaseModel) -> dict[str, str]:
    """Return the import paths in a spec, by dotted field."""
    return dict(_targets(spec, ""))


def _targets(value: object, field: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, PluginSpec):
        yield f"{field}.type", value.type
    elif isinstance(value, PythonRewardSpec):
        yield f"{field}.target", value.target
    elif isinstance(value, EnvironmentSpec):
        yield f"{field}.type", value.type
    elif isinstance(value, EngineSpec):
        yield from ((f"{field}.type", value.type),) if ":" in value.type else ()
    elif isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from _targets(getattr(value, name), f"{field}.{name}".lstrip("."))
    elif isinstance(value, tuple | list | Mapping):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            yield from _targets(item, f"{field}.{key}")


MAY_DIFFER = (
    "steps",
    "checkpoint",
    "critic.ranks",
    "critic.shard_ranks",
    "critic.expert_parallel",
    "critic.micro_batch_tokens",
    "critic.threads",
    "critic.gradient_checkpointing",
    "environment.call_s",
    "environment.cores",
    "environment.memory_mib",
    "environment.sessions",
    "evaluation",
    "generation.engine",
    "generation.progress_interval_s",
    "learner.compile",
    "learner.ranks",
    "learner.shard_ranks",
    "learner.expert_parallel",
    "learner.logits_mib",
    "learner.micro_batch_tokens",
    "learner.threads",
    "learner.gradient_checkpointing",
    "limits",
    "logging",
    "metadata",
    "output",
    "placement",
    "priority",
    "recovery",
    "reference.ranks",
    "scaling",
    "scoring.http_hosts",
    "scoring.max_failed",
    "scoring.reward_model_ranks",
    "scoring.timeout_s",
    "scoring.workers",
    *(f"teachers.{index}.{key}" for index in range(MOST_TEACHERS) for key in MAY_DIFFER_OF_A_TEACHER),
    "timeouts",
    "weights",
)
"""Fields that a resumed run may change, including all fields below them. Changes to learner and critic fields and to
numbers of ranks affect the weights only by rounding."""


def check_resumable(before: RunSpec, now: RunSpec, source: str) -> None:
    """Raise InputError naming every field that differs but must not. `source` names the refused spec."""
    problems = [
        Problem(name, f"{new!r}, but the run started with {old!r}", "set it back, or start a run of its own")
        for name, old, new in differences(before, now)
        if not any(name == field or name.startswith(f"{field}.") for field in MAY_DIFFER)
    ]
    if problems:
        raise InputError(f"{source} cannot resume this run", problems)


def differences(before: RunSpec, now: RunSpec) -> list[tuple[str, Any, Any]]:
    """Return (field, value before, value now) for every field that differs; None means that the field is missing."""
    old, new = _leaves(before), _leaves(now)
    names = dict.fromkeys((*old, *new))
    return [(name, old.get(name), new.get(name)) for name in names if old.get(name) != new.get(name)]


def _leaves(spec: RunSpec) -> dict[str, Any]:
    """Return the value of each field without fields of its own."""
    values = walk(spec.model_dump(mode="json"))
    return {dotted(path): value for path, value in values if not (isinstance(value, dict | list) and value)}
