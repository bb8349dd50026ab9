"""Rewrite pydantic's errors for users: field, value and hint."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol, Union, get_args, get_origin, runtime_checkable

from pydantic import BaseModel, Tag, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from rlhfless.spec.document import Path, dotted
from rlhfless.spec.errors import Problem
from rlhfless.spec.removed import removed_problems
from rlhfless.util.text import redacted

# Longest value quoted in a message.
_MAX_QUOTE = 80
# Minimum similarity to suggest a key of the same section; below it, the same key in another section is more likely.
_TYPING_ERROR = 0.8
# With more differences, difflib's similarity decides.
_MOST_TYPING_ERRORS = 2
# Most items named in a message; the rest are counted.
_MAX_COUNTED = 8

PROBLEMS_ERROR = "problems"
"""Pydantic error type for `several` problems found by a section's own check; the error's context holds them."""


@runtime_checkable
class ChoosesModel(Protocol):
    """Metadata of a field whose model depends on its value (see rlhfless.spec.extension)."""

    def model_of(self, value: Any) -> type[BaseModel]: ...


def explain(
    error: ValidationError, model: type[BaseModel], origins: Mapping[Path, str], data: Any = None
) -> list[Problem]:
    """Return one `Problem` per pydantic error. `origins` gives the place where the user wrote each path. `data` is the
    validated data, which determines the model of fields that name a user's own class."""
    errors = error.errors(include_url=False)
    # If a list's items are refused, pydantic also reports the list as too short, which would mislead.
    below = {loc[:length] for loc in (details["loc"] for details in errors) for length in range(len(loc))}
    shown = [details for details in errors if not (details["type"] == "too_short" and details["loc"] in below)]
    found = [
        problem for details in shown for problem in _problems(details, _Spot(model, data, details["loc"]), origins)
    ]
    gone = [
        dataclasses.replace(problem, origin=origin_of(path, origins))
        for path, problem in removed_problems(data, getattr(model, "removed", {}))
    ]
    of_gone = tuple(problem.where for problem in gone)
    return [*gone, *_together([problem for problem in found if problem.where not in of_gone])]


def _together(problems: Sequence[Problem]) -> list[Problem]:
    """Merge consecutive problems of the same field, which come from its alternatives (such as `auto` or a number)."""
    merged: list[Problem] = []
    for problem in problems:
        before = merged[-1] if merged else None
        value, _, what = problem.what.partition(": ")
        if before is not None and before.where == problem.where and before.what.startswith(f"{value}: "):
            hint = " ".join(filter(None, (before.hint, problem.hint)))
            merged[-1] = dataclasses.replace(before, what=f"{before.what}, or {what}", hint=hint)
        else:
            merged.append(problem)
    return merged


def several(problems: Sequence[Problem]) -> PydanticCustomError:
    """Return an error for a field's own check. Each problem's `where` is a key below the field, or empty for the
    field."""
    text = "; ".join(f"{problem.where}: {problem.what}; {problem.hint}".removeprefix(": ") for problem in problems)
    return PydanticCustomError(PROBLEMS_ERROR, "{text}", {"text": text, "problems": tuple(problems)})


def shown(value: object) -> str:
    """Return the `repr` of the value without secrets, truncated to fit a message."""
    text = repr(redacted(value))
    return text if len(text) <= _MAX_QUOTE else text[: _MAX_QUOTE - 1] + "…"


def nearest(word: str, valid: Iterable[str], cutoff: float = 0.6) -> str:
    """Return `did you mean ...? ` for the closest valid word, or an empty string. `cutoff` is difflib's."""
    close = closest(word, valid, cutoff)
    return f"did you mean `{close}`? " if close is not None else ""


def closest(word: str, valid: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the valid word that `word` most likely stands for; None if none is similar.

    Words with the fewest typing errors come first, because difflib alone finds `gspo` as similar to `gpro` as `grpo`.
    Case and the choice of `-` or `_` are ignored.
    """
    typed = _folded(word)

    def rank(candidate: str) -> tuple[int, float]:
        return min(_typing_errors(typed, _folded(candidate)), _MOST_TYPING_ERRORS + 1), -_similarity(typed, candidate)

    similar = [
        candidate
        for candidate in valid
        if _similarity(typed, candidate) >= cutoff
        or (len(typed) > 2 and _typing_errors(typed, _folded(candidate)) <= 1)
    ]
    return min(similar, key=rank, default=None)


def _folded(word: str) -> str:
    return word.casefold().replace("-", "_")


def _similarity(typed: str, candidate: str) -> float:
    return difflib.SequenceMatcher(None, _folded(candidate), typed).ratio()


def _typing_errors(a: str, b: str) -> int:
    """Return the insertions, deletions, substitutions and swaps of neighbors that turn `a` into `b` (optimal string
    alignment); more than _MOST_TYPING_ERRORS if the lengths alone rule out fewer."""
    if abs(len(a) - len(b)) > _MOST_TYPING_ERRORS:
        return _MOST_TYPING_ERRORS + 1
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        earlier, before, row = before, row, [i]
        for j, y in enumerate(b, 1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (x != y))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                cost = min(cost, earlier[j - 2] + 1)
            row.append(cost)
    return row[-1]


def keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield every dotted key below a model. Keys of list items look like `rewards.*.weight`."""
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}"
        starred = "*." if get_origin(field.annotation) in (tuple, list) else ""
        for part in models(field.annotation):
            yield from keys(part, f"{prefix}{name}.{starred}")


def models(annotation: Any) -> list[type[BaseModel]]:
    """Return the models an annotation allows, including those in optionals, unions and lists."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) is Annotated:
        return models(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType, tuple, list):
        return [model for part in get_args(annotation) for model in models(part)]
    return []


def _members(annotation: Any) -> dict[str, Any]:
    """Return the tagged members of a union of a model and plain values, by tag."""
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) not in (Union, types.UnionType):
        return {}
    parts = [part for part in get_args(annotation) if get_origin(part) is Annotated]
    return {tag.tag: get_args(part)[0] for part in parts for tag in part.__metadata__ if isinstance(tag, Tag)}


@dataclass(frozen=True, slots=True)
class _Spot:
    """The place of an error in the data: pydantic's `loc` below `root`."""

    root: type[BaseModel]
    data: Any
    loc: tuple[int | str, ...]

    def locate(self) -> tuple[Path, Any]:
        """Return the user's path and the annotation there. Pydantic's `loc` also contains the tags of unions."""
        path: list[str | int] = []
        annotation: Any = self.root
        value = self.data
        for key in self.loc:
            candidates = models(annotation)
            if isinstance(key, str) and len(candidates) > 1:
                annotation = next((model for model in candidates if tag_of(model) == key), None)
                continue
            if isinstance(key, str) and not candidates and get_origin(annotation) in (Union, types.UnionType):
                continue  # the name of a union member
            if isinstance(key, str) and (members := _members(annotation)):
                annotation = members.get(key, annotation)
                continue
            path.append(key)
            value = _below(value, key)
            if get_origin(annotation) is dict:
                of_values = get_args(annotation)[1]
                annotation = _chosen(of_values, getattr(of_values, "__metadata__", ()), value)
            elif isinstance(key, str):
                field = candidates[0].model_fields.get(key) if candidates else None
                annotation = _chosen(field.annotation, field.metadata, value) if field else None
        return tuple(path), annotation

    def model(self) -> type[BaseModel]:
        """Return the model in which the last key of `loc` was looked up."""
        above = dataclasses.replace(self, loc=self.loc[:-1])
        return next(iter(models(above.locate()[1])), self.root)


def _chosen(annotation: Any, metadata: Iterable[Any], value: Any) -> Any:
    """Return the annotation, or the model if that depends on the value."""
    for choice in metadata:
        if isinstance(choice, ChoosesModel):
            with suppress(PydanticCustomError):
                return choice.model_of(value)
    return annotation


def _below(value: Any, key: int | str) -> Any:
    try:
        return value[key]
    except (TypeError, LookupError):
        return None


def _problems(details: ErrorDetails, spot: _Spot, origins: Mapping[Path, str]) -> Iterator[Problem]:
    if details["type"] != PROBLEMS_ERROR:
        yield _problem(details, spot, origins)
        return
    section, _ = spot.locate()
    for problem in details["ctx"]["problems"]:
        path = (*section, *filter(None, problem.where.split(".")))
        yield dataclasses.replace(problem, where=dotted(path), origin=origin_of(path, origins))


def _problem(details: ErrorDetails, spot: _Spot, origins: Mapping[Path, str]) -> Problem:
    path, annotation = spot.locate()
    kind, value, context = details["type"], details["input"], details.get("ctx", {})
    message = details["msg"].replace("Input should be", "should be").removeprefix("Value error, ")
    what, hint = message, ""
    if kind == "extra_forbidden":
        what, hint = "unknown key", _key_hint(path, spot)
    elif kind == "missing":
        what, hint = "missing, and it has no default", _description(path, spot)
    elif kind in ("union_tag_invalid", "union_tag_not_found"):
        path = (*path, str(context["discriminator"]).strip("'"))
        what, hint = _tag_message(str(context.get("tag", "")), annotation)
    elif kind in ("model_type", "model_attributes_type"):
        what = f"is a section with keys of its own, got {shown(value)}"
        hint = _section_hint(models(annotation))
    elif kind in ("tuple_type", "list_type"):
        what, hint = (
            f"should be a list, got {shown(value)}",
            "write each item on a line that starts with `- `",
        )
    elif kind == "too_short":
        what, hint = "should have at least one item, and is empty", ""
    elif kind == "literal_error":
        what = f"{shown(value)}: {message}"
        hint = nearest(str(value), map(str, get_args(annotation))).strip()
    elif not models(annotation) or not isinstance(value, Mapping):  # a section's own check quotes the values
        what = f"{shown(value)}: {message}"
        hint = _matching(str(value), context["pattern"]) if kind == "string_pattern_mismatch" else ""
    return Problem(dotted(path), what, hint, origin_of(path, origins))


def _key_hint(path: Path, spot: _Spot) -> str:
    root = spot.root
    key, valid, places = str(path[-1]), list(spot.model().model_fields), list(keys(root))
    elsewhere = [place for place in places if place.rpartition(".")[2] == key]
    of_other_tool = getattr(root, "name_elsewhere", None)
    words = set(key.split("_"))
    longer = [each for each in valid if words < set(each.split("_"))]
    if types := _types_with(path, root):
        hint = f"it is a key of other types: {', '.join(types)}. "
    elif (name := of_other_tool(key, spot.data) if of_other_tool else None) in places:
        hint = f"here it is `{name}`. "
    elif hint := nearest(key, valid, cutoff=_TYPING_ERROR):
        pass
    elif len(path) > 1 and len(longer) == 1:  # `schedule` in `optimizer` is `rate_schedule`, not the run's schedule
        hint = f"did you mean `{longer[0]}`? "
    else:
        hint = f"did you mean `{elsewhere[0]}`? " if elsewhere else nearest(key, valid)
    return f"{hint}Valid keys here: {', '.join(valid)}"


def _matching(value: str, pattern: str) -> str:
    """Return a hint with the value as a name that the pattern allows; empty if neither `-` nor `_` makes it one."""
    names = (re.sub(r"[^a-z0-9]+", joint, value.lower()).strip(joint) for joint in "-_")
    return next((f"did you mean `{name}`?" for name in names if re.search(pattern, name)), "")


def _types_with(path: Path, root: type[BaseModel]) -> list[str]:
    """Return the types of a section that have the key at the end of a path."""
    sections = [root]
    for key in path[:-1]:
        if isinstance(key, str):
            fields = [section.model_fields[key] for section in sections if key in section.model_fields]
            sections = [model for field in fields for model in models(field.annotation)]
    return [tag_of(section) for section in sections if path[-1] in section.model_fields]


def _tag_message(tag: str, annotation: Any) -> tuple[str, str]:
    valid = sorted(tag_of(model) for model in models(annotation))
    what = f"{tag!r} is not one of the types" if tag else "missing, and it has no default"
    return what, f"{nearest(tag, valid)}Valid types: {', '.join(valid)}"


def _section_hint(candidates: list[type[BaseModel]]) -> str:
    if len(candidates) == 1:
        return f"give it some of these keys, or leave it out: {', '.join(candidates[0].model_fields)}"
    return f"start it with `type:`, one of {', '.join(sorted(map(tag_of, candidates)))}"


def _description(path: Path, spot: _Spot) -> str:
    field = spot.model().model_fields.get(str(path[-1]))
    if field is None:
        return ""
    sections = models(field.annotation)
    return field.description or (inspect.getdoc(sections[0]) or "" if len(sections) == 1 else "")


def tag_of(model: type[BaseModel]) -> str:
    """Return the value of the model's literal `type`; empty if it has none."""
    field = model.model_fields.get("type")
    literal = field.annotation if field else None
    return str(get_args(literal)[0]) if get_origin(literal) is Literal else ""


def origin_of(path: Path, origins: Mapping[Path, str]) -> str:
    """Return where the user wrote the path, or the nearest enclosing section for missing keys."""
    for length in range(len(path), 0, -1):
        if path[:length] in origins:
            return origins[path[:length]]
    return ""


def counted(noun: str, items: Iterable[str]) -> str:
    """Return `tensor a`, or `3 tensors: a, b, c`, naming at most _MAX_COUNTED items."""
    listed = list(items)
    if len(listed) == 1:
        return f"{noun} {listed[0]}"
    more = f" and {len(listed) - _MAX_COUNTED} more" if len(listed) > _MAX_COUNTED else ""
    return f"{len(listed)} {noun}s: {', '.join(listed[:_MAX_COUNTED])}{more}"
