"""Fields of a spec that name files, marked where they are declared.

Two readers share the marks: `load_spec`, which makes relative paths absolute, and a service, which checks what a POSTed
spec may name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel

from rlhfless.spec.explain import models


@dataclass(frozen=True, slots=True)
class Location:
    """The mark of a field whose value names a file or a folder."""

    kind: Literal["hub", "file", "kept"]
    """`hub`: it is read, and may be a name of the hub instead. `file`: it is read. `kept`: the run writes there, and a
    relative path is counted from the current folder, not from the spec's."""
    words: frozenset[str] = frozenset()
    """Values that name no file."""


HubPath = Annotated[str, Location("hub")]
"""A file or folder, or a name of the hub."""

FilePath = Annotated[str, Location("file")]
KeptPath = Annotated[str, Location("kept")]
"""A folder or URL that the run writes to."""


@cache
def locations(model: type[BaseModel]) -> Mapping[str, Location]:
    """The marked fields of a model and of its sections: dotted, with `*` for each item of a list."""
    return dict(_marked(model, ""))


def _marked(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, Location]]:
    for name, field in model.model_fields.items():
        for part in (field.annotation, *field.metadata):
            yield from ((f"{prefix}{name}", mark) for mark in _marks(part))
        starred = "*." if get_origin(field.annotation) in (tuple, list) else ""
        for section in models(field.annotation):
            yield from _marked(section, f"{prefix}{name}.{starred}")


def _marks(annotation: Any) -> Iterator[Location]:
    """The marks in an annotation or its metadata, through optionals and unions."""
    if isinstance(annotation, Location):
        yield annotation
    for part in get_args(annotation):
        yield from _marks(part)
