"""Plugin fields: spec fields that name a part of the run, either built in or the user's own.

    algorithm: {type: grpo, clip_high: 0.3}                 built in, by its short name
    algorithm: {type: my_module:LeaveOneOut, scale: 2}      the user's own, by import path, with its own keys

A string alone (`algorithm: grpo`) stands for `{type: grpo}`. An import path names a class whose attribute `Settings` is
a subclass of PluginSpec. The fields of `Settings` are the keys; unknown keys are refused. The class is checked and its
keys are validated when the spec is loaded. The RunSpec then holds an instance of `Settings`, and `make(settings)`
creates the algorithm, schedule or policy in any process that needs it.

Invariant: a PluginSpec is sent to other processes as plain data, with the folders to import from. An instance of a
user's class cannot be sent: unpickling it would import its module before our code could set the import path.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from rlhfless.spec.base import SpecModel
from rlhfless.spec.errors import InputError, Problem
from rlhfless.spec.explain import nearest, several, tag_of
from rlhfless.spec.imports import IMPORT_PATH, TargetError, add_import_paths, import_paths, load_target


class PluginSpec(SpecModel):
    """Your own class. `type` is its import path; all other keys are the fields of its `Settings`. See
    docs/extending.md."""

    type: str
    """Import path, `package.module:Name`."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.model_dump(mode="json"), import_paths())


@dataclass(frozen=True, slots=True)
class PluginField:
    """Annotates a field that names a part of the run: `Annotated[BuiltInSpec | PluginSpec, PluginField(...)]`."""

    noun: str
    """The kind of part, as named in messages, such as `algorithm`."""
    built_in: tuple[type[SpecModel], ...]
    """Built-in settings classes, each with its short name as the literal `type`. The first is the default; if empty,
    users must name their own class."""
    methods: tuple[str, ...]
    """Attributes that a user's own class must have."""
    settings: type[PluginSpec] = PluginSpec
    """Base class of the `Settings` of a user's own class."""

    def model_of(self, value: Any) -> type[SpecModel]:
        """Return the settings class that validates `value`, as written in the spec; the default's if `value` names
        none.

        Raises PydanticCustomError if the name is unknown.
        """
        name = _name(value)
        if name is None and self.built_in:
            return self.built_in[0]
        if name is None:
            raise _error(value, f"this {self.noun} has no `type`", "Name it as `package.module:Name`")
        if ":" in name:
            try:
                return self._own(name)
            except TargetError as error:
                raise _error(value, error.what, error.hint) from error
        by_tag = {tag_of(model): model for model in self.built_in}
        if name in by_tag:
            return by_tag[name]
        known = f"Built in: {', '.join(map(repr, by_tag))}. " if by_tag else ""
        hint = f"{nearest(name, by_tag)}{known}One of your own is named as `package.module:Name`"
        raise _error(value, f"{name!r} is no {self.noun}", hint)

    def _own(self, target: str) -> type[PluginSpec]:
        """Return the settings class of a user's own class. Raises TargetError."""
        if not IMPORT_PATH.fullmatch(target):
            raise TargetError(f"{target!r} is no import path", "write it as `package.module:Name`")
        loaded = load_target(target)
        if not inspect.isclass(loaded):
            raise TargetError(f"{target!r} is a {type(loaded).__name__}, not a class", f"Name a class {self._wanted()}")
        lacking = [name for name in self.methods if not hasattr(loaded, name)]
        if lacking:
            what = f"{target!r} is no {self.noun}: it has no {' and no '.join(f'`{name}`' for name in lacking)}"
            raise TargetError(what, f"Name a class {self._wanted()}")
        return _settings_class(loaded, target, self.settings)

    def _wanted(self) -> str:
        return f"with {', '.join(f'`{name}`' for name in (*self.methods, 'Settings'))}"

    def _validated(self, value: Any) -> SpecModel:
        if isinstance(value, SpecModel) and isinstance(value, (*self.built_in, self.settings)):
            return value
        model = self.model_of(value)
        return model.model_validate({"type": value} if isinstance(value, str) else value)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            self._validated,
            serialization=core_schema.plain_serializer_function_ser_schema(_dumped, info_arg=True),
        )

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Return a schema with built-in settings in full. For a user's own class, only `type` is included, because its
        other keys are in its module."""
        own = {
            "type": "object",
            "description": inspect.getdoc(PluginSpec),
            "properties": {"type": {"type": "string", "pattern": f"^{IMPORT_PATH.pattern}$"}},
            "required": ["type"],
        }
        named = {"type": "string", "description": "Its `type` alone, with the defaults of all other keys."}
        return {"anyOf": [*(handler(model.__pydantic_core_schema__) for model in self.built_in), own, named]}


def make(settings: SpecModel, built_in: Mapping[str, str]) -> Any:
    """Create the algorithm, schedule or policy from its settings. `built_in` maps short names to import paths, so that
    only the class in use is imported. Raises TargetError."""
    name = str(getattr(settings, "type", ""))
    return load_target(built_in.get(name, name))(settings)


def _restored(data: Mapping[str, Any], paths: Sequence[str]) -> PluginSpec:
    """Restore a PluginSpec in another process. Raises InputError if its module cannot be imported there."""
    add_import_paths(paths)
    target = data["type"]
    try:
        return _settings_class(load_target(target), target, PluginSpec).model_validate(data)
    except TargetError as error:
        raise InputError(f"the settings of {target!r}", [Problem("type", error.what, error.hint)]) from error


def _settings_class(loaded: Any, target: str, base: type[PluginSpec]) -> type[PluginSpec]:
    """Return the `Settings` of a class. Raises TargetError if it has none of the right kind."""
    settings = getattr(loaded, "Settings", None)
    if inspect.isclass(settings) and issubclass(settings, base):
        return settings
    what = "has no `Settings`" if settings is None else f"has a `Settings` that is no {base.__name__}"
    raise TargetError(f"{target!r} {what}", f"Derive the class of its keys from {base.__module__}.{base.__name__}")


def _name(value: Any) -> str | None:
    """Return the `type` in a spec value, or None."""
    named = value.get("type") if isinstance(value, Mapping) else value
    return named if isinstance(named, str) else None


def _error(value: Any, what: str, hint: str) -> PydanticCustomError:
    return several([Problem("type" if isinstance(value, Mapping) else "", what, hint)])


def _dumped(value: SpecModel, info: core_schema.SerializationInfo) -> Any:
    """Dump a value by its own class, not by the annotated one."""
    return value.model_dump(mode=info.mode)
