"""Look up fields of a data row by dotted name: `reward_model.ground_truth`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rlhfless.spec.explain import nearest

# Number of names that a message lists; the rest are counted.
_MOST_NAMES = 12


class MissingField(Exception):
    """A row lacks a field. `what` names the missing part, `hint` the nearest name."""

    def __init__(self, what: str, hint: str) -> None:
        super().__init__(what, hint)
        self.what = what
        self.hint = hint

    def __str__(self) -> str:
        return self.what


def field_value(values: Mapping[str, Any], name: str) -> Any:
    """Return the value of a field. Raises MissingField.

    `a.b` is key `b` of the mapping in `a`, `a.0` the first item of the list in `a`, and `a.-1` its last. A key whose
    own name contains dots takes precedence. JSON inside strings is not parsed.
    """
    return _value(values, name.split("."), "")


def find_field(values: Mapping[str, Any], name: str) -> Any:
    """Return the value of a field; None if it is missing."""
    try:
        return field_value(values, name)
    except MissingField:
        return None


def dotted_names(values: Mapping[str, Any], depth: int = 2) -> list[str]:
    """Return the names of all fields, including nested fields down to `depth`."""
    names = []
    for key, value in values.items():
        names.append(str(key))
        if isinstance(value, Mapping) and depth > 1:
            names += [f"{key}.{inner}" for inner in dotted_names(value, depth - 1)]
    return names


def _value(values: Mapping[str, Any], parts: list[str], above: str) -> Any:
    for length in range(len(parts), 0, -1):
        key = ".".join(parts[:length])
        if key in values:
            return _below(values[key], parts[length:], f"{above}{key}")
    name, place = ".".join(parts), f"`{above[:-1]}` has" if above else "there is"
    what = f"{place} no field `{parts[0]}` (the fields are {_listed(values)})"
    hint = nearest(name, dotted_names(values)) or nearest(parts[0], map(str, values))
    raise MissingField(what, hint.replace("`", f"`{above}", 1))


def _below(value: Any, parts: list[str], path: str) -> Any:
    if not parts:
        return value
    if isinstance(value, Mapping):
        return _value(value, parts, f"{path}.")
    if isinstance(value, list | tuple):
        index = int(parts[0]) if parts[0].removeprefix("-").isdecimal() else None
        if index is None or not -len(value) <= index < len(value):
            what = f"`{path}` is a list of {len(value)}, and `{parts[0]}` is not an index of it"
            raise MissingField(what, f"write `{path}.0` for its first item. ")
        return _below(value[index], parts[1:], f"{path}.{parts[0]}")
    kind = "null" if value is None else f"a {'text' if isinstance(value, str) else type(value).__name__}"
    raise MissingField(f"`{path}` is {kind}, which has no field `{'.'.join(parts)}`", "")


def _listed(values: Iterable[str]) -> str:
    names = list(map(str, values))
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return (", ".join(names[:_MOST_NAMES]) or "none") + more
