"""The import paths of all parts of a spec that are the user's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pydantic import BaseModel

from rlhfless.spec.extension import OwnSpec
from rlhfless.spec.generation import EngineSpec
from rlhfless.spec.rewards import PythonRewardSpec


def targets(spec: BaseModel) -> tuple[str, ...]:
    """The import paths, such as `my_rewards:score`, sorted."""
    return tuple(sorted(set(fields_of_targets(spec).values())))


def fields_of_targets(spec: BaseModel) -> dict[str, str]:
    """The same by the dotted field that names each."""
    return dict(_targets(spec, ""))


def _targets(value: object, field: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, OwnSpec):
        yield f"{field}.type", value.type
    elif isinstance(value, PythonRewardSpec):
        yield f"{field}.target", value.target
    elif isinstance(value, EngineSpec):
        yield from ((f"{field}.type", value.type),) if ":" in value.type else ()
    elif isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from _targets(getattr(value, name), f"{field}.{name}".lstrip("."))
    elif isinstance(value, tuple | list | Mapping):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            yield from _targets(item, f"{field}.{key}")
