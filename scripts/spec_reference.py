"""Writes the tables of all keys into docs/spec.md and docs/scenario.md, each between two markers, from the docstrings.

Run it after a change of rlhfless/spec or sim/scenarios; `--check` only says whether the pages are up to date (exit code
1 if not).
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from marked_page import write_part
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from rlhfless.sim.policies import POLICIES
from rlhfless.sim.scenarios import Scenario
from rlhfless.spec import RunSpec
from rlhfless.spec.explain import models, tag_of

DOCS = Path(__file__).parents[1] / "docs"
PAGES: dict[Path, tuple[str, type[BaseModel], dict[str, type[BaseModel]]]] = {
    DOCS / "spec.md": ("The spec", RunSpec, {}),
    DOCS / "scenario.md": (
        "The scenario",
        Scenario,
        {
            f"Settings of `{name}`": kind.settings
            for name, kind in POLICIES.items()
            if "baselines" in str(kind.settings)
        },
    ),
}
"""By page: the title and model of its first section, and further sections by their titles."""
BEGIN, END = "<!-- reference: begin -->", "<!-- reference: end -->"


def reference(whole: str, root: type[BaseModel], more: dict[str, type[BaseModel]]) -> str:
    """One table per section, that of the `whole` first; a section that several algorithms share, once."""
    sections = dict.fromkeys([*_sections("", root), *((title, model, False) for title, model in more.items())])
    return "\n".join(line for title, model, union in sections for line in _table(title or whole, model, union))


def _sections(prefix: str, model: type[BaseModel], union: bool = False) -> Iterator[tuple[str, type[BaseModel], bool]]:
    """Title, model, and whether the title stands for several models that `type` tells apart."""
    yield prefix, model, union
    for name, field in model.model_fields.items():
        parts = models(field.annotation)
        for part in parts:
            many = get_origin(field.annotation) is tuple
            yield from _sections(f"{prefix}.{name}".strip(".") + ("[]" if many else ""), part, many or len(parts) > 1)


def _table(title: str, model: type[BaseModel], union: bool) -> Iterator[str]:
    tag = f" (`type: {tag_of(model) or 'package.module:Name'}`)" if "type" in model.model_fields and union else ""
    yield f"### {title if title[:1].isupper() else f'`{title}`'}{tag}\n"
    yield " ".join((model.__doc__ or "").split()) + "\n"
    yield "| key | type | default | |\n|---|---|---|---|"
    for name, field in model.model_fields.items():
        if field.default is PydanticUndefined:
            default = "`{}`" if field.default_factory else "**required**"
        else:
            default = "see below" if isinstance(field.default, BaseModel) else f"`{_literal(field.default)}`"
        parts = models(field.annotation)
        described = field.description or (parts[0].__doc__ if len(parts) == 1 else None) or ""
        text = " ".join(described.split()).replace("|", "\\|")
        yield f"| `{name}` | {_type(field.annotation)} | {default} | {text} |"
    yield ""


def _type(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(arguments[0])
    if origin in (Union, types.UnionType):
        kept = [part for part in arguments if part is not types.NoneType]
        return "section" if all(models(part) for part in kept) else " or ".join(map(_type, kept))
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin in (tuple, list):
        return f"list of {_type(arguments[0])}"
    if origin is dict:
        return "mapping"
    return (
        "section"
        if models(annotation)
        else {"str": "text", "bool": "true/false"}.get(annotation.__name__, annotation.__name__)
    )


def _literal(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return str(value).lower().replace("none", "null")
    return str(list(value)) if isinstance(value, tuple) else str(value) or '""'


if __name__ == "__main__":
    sys.exit(max(write_part(page, BEGIN, END, reference(*what)) for page, what in PAGES.items()))
